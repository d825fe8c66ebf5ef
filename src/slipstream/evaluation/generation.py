"""A model continues a text."""

from typing import NamedTuple

import torch

from slipstream.data.text_checks import check_text
from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import ConfigError, NonFiniteError
from slipstream.train.trained import TrainedModel


class Generation(NamedTuple):
    """What a model wrote."""

    text: str
    """Without the prompt."""
    ids: list[int]
    """Without those of the prompt; the end-of-document id last, where the model ended there."""


@torch.no_grad()
def generate(
    model: TrainedModel,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Generation:
    """Continue a text until the model ends it or ``max_new_tokens`` are written.

    The last ``context_length`` tokens are seen, each time anew: the cost of a token is that of a forward pass.

    Args:
        model: With a tokenizer.
        prompt: Empty: the beginning of a document.
        max_new_tokens: From 1.
        temperature: Logits are divided by it before a token is drawn; 0: always the likeliest token.
        seed: Of the draws, from 0 to 2^64 - 1.
        device: Where to compute.

    Raises:
        ConfigError: A number is out of range.
        DataError: The model has no tokenizer, or the prompt is not text.
        NonFiniteError: The model gives no probabilities.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must be 1 or more.")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(
            f"the temperature is {temperature}; allowed are 0 (the likeliest token) and finite numbers above."
        )
    if not 0 <= seed < 2**64:
        raise ConfigError(f"the seed is {seed}; allowed are whole numbers from 0 to 2^64 - 1.")
    check_text(prompt, what="the prompt")
    tokenizer, (body, head) = model.need_tokenizer(), model.body_and_head(device)
    generator = torch.Generator().manual_seed(seed)
    ids = model.begun(tokenizer.encode(prompt))
    model.check_ids(ids)
    start = len(ids)
    while len(ids) < start + max_new_tokens:
        seen = torch.tensor([ids[-model.context_length :]], device=device)
        # Rows beyond the tokenizer's ids are padding of the embedding.
        logits_V = head(body(seen)[0, -1])[: tokenizer.vocab_size].double().cpu()
        if not logits_V.isfinite().all():
            raise NonFiniteError(
                "the model gives logits that are not finite numbers, so it cannot write. Take an earlier checkpoint of "
                "the run, from before it diverged."
            )
        if temperature == 0:
            ids.append(int(logits_V.argmax()))
        else:
            # The largest is 0: however small the temperature, no quotient is beyond all numbers but on the safe side.
            probabilities_V = torch.softmax((logits_V - logits_V.max()) / temperature, dim=-1)
            ids.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
        if ids[-1] == tokenizer.eos_id:
            break
    return Generation(text=_added(tokenizer, ids, start), ids=ids[start:])


def _added(tokenizer: Tokenizer, ids: list[int], start: int) -> str:
    """Return the text of ids from one on; some tokenizers drop the space before the first of all."""
    whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:start])
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(ids[start:])
