"""Log-likelihoods of texts under a model, as lm-eval defines them."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import ConfigError, NonFiniteError
from slipstream.train.trained import TrainedModel

BATCH_TOKENS = 8192
REQUESTS_AT_ONCE = 4096
"""Whose tokens are in memory together: enough to put texts of like length into a batch."""
BATCH_LOGITS = 2**25
"""Most logits made at once: 128 MiB, and four times as much on the way to log-probabilities in float64."""


class Score(NamedTuple):
    """How a model takes a continuation."""

    log_likelihood: float
    """Natural logarithm of its probability."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest."""


class _Window(NamedTuple):
    """Tokens to predict, and what the model sees before them."""

    request: int
    tokens: tuple[int, ...]
    num_predicted: int
    """Of the last tokens; the others, at least one, are context."""


class Scorer:
    """Scores texts with a model.

    Args:
        model: With a tokenizer.
        device: Where to compute.
        max_length: Most tokens the model sees at once; ``None``: its context length.

    Raises:
        ConfigError: ``max_length`` is below 1.
    """

    def __init__(
        self, model: TrainedModel, *, device: torch.device | str = "cpu", max_length: int | None = None
    ) -> None:
        self.tokenizer = model.need_tokenizer()
        self.max_length = model.context_length if max_length is None else max_length
        if self.max_length < 1:
            raise ConfigError(f"max_length is {self.max_length}; it must be 1 or more.")
        # The choices of a question follow one another, and share their context.
        self._encoded = functools.lru_cache(maxsize=1)(self.tokenizer.encode)
        self._model = model
        self._body, self._head = model.body_and_head(device)
        self._device = torch.device(device)
        self._positions_at_once = max(1, BATCH_LOGITS // model.cfg.vocab_size)

    def log_likelihoods(self, requests: Sequence[tuple[str, str]]) -> list[Score]:
        """Score continuations of contexts.

        Args:
            requests: Pairs (context, continuation). White space at the end of a context counts to the continuation;
                an empty context stands for the beginning of a document.

        Returns:
            A score for each. What does not fit is cut off the context's beginning; a continuation that alone does not
            fit is scored in parts, each after as much context as fits.
        """
        scores: list[Score] = []
        for start in range(0, len(requests), REQUESTS_AT_ONCE):
            some = requests[start : start + REQUESTS_AT_ONCE]
            windows = itertools.chain.from_iterable(self._windows(i, *request) for i, request in enumerate(some))
            scores += self._score(list(windows), len(some))
        return scores

    def rolling(self, texts: Sequence[str]) -> list[tuple[Score, int]]:
        """Score whole texts, each from the beginning of a document; return scores and numbers of tokens.

        Cut into windows of ``max_length`` tokens, each predicted once; the first token of a window is predicted from
        the last of the window before, and the last window reaches back so that it is full.
        """
        encoded = [self.tokenizer.encode(text) for text in texts]
        return [(score, len(ids)) for score, ids in zip(self.rolling_ids(encoded), encoded)]

    def rolling_ids(self, texts: Sequence[list[int]]) -> list[Score]:
        """Score whole texts that are ids already; see :meth:`rolling`."""
        windows = itertools.chain.from_iterable(self._rolled(i, ids) for i, ids in enumerate(texts))
        return self._score(list(windows), len(texts))

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of what continues it, parted where the context's own ids end.

        Before the context is what the model was trained to see before every text.
        """
        whole = self.tokenizer.encode(context + continuation)
        if not context:
            return [self._model.first_id], whole
        ids = self._encoded(context.rstrip())
        # A context of nothing but white space may leave no id to predict from.
        return self._model.begun(ids), whole[len(ids) :]

    def _windows(self, request: int, context: str, continuation: str) -> Iterator[_Window]:
        before, after = self.encode_pair(context, continuation)
        part = len(after) if len(after) <= self.max_length else max(1, self.max_length // 2)
        tokens = before + after
        for start in range(0, len(after), max(part, 1)):
            num_predicted = min(part, len(after) - start)
            end = len(before) + start + num_predicted
            yield _Window(request, tuple(tokens[max(0, end - self.max_length - 1) : end]), num_predicted)

    def _rolled(self, request: int, ids: list[int]) -> Iterator[_Window]:
        tokens = [self._model.first_id, *ids]
        for start in range(0, len(ids), self.max_length):
            end = min(start + self.max_length, len(ids))
            yield _Window(request, tuple(tokens[max(0, end - self.max_length) : end + 1]), end - start)

    def _score(self, windows: list[_Window], num_requests: int) -> list[Score]:
        self._model.check_ids(max(window.tokens) for window in windows)
        totals, greedy = [0.0] * num_requests, [True] * num_requests
        # Choices of one letter share all that the model sees: it computes each input once.
        by_input: dict[tuple[int, ...], list[_Window]] = {}
        for window in windows:
            by_input.setdefault(window.tokens[:-1], []).append(window)
        for batch in _batches(sorted(by_input, key=len, reverse=True), BATCH_TOKENS):
            for inputs, hidden_TD in zip(batch, self._hidden(batch)):
                some = by_input[inputs]
                first = len(inputs) - max(window.num_predicted for window in some)
                for start in range(first, len(inputs), self._positions_at_once):
                    end = min(start + self._positions_at_once, len(inputs))
                    logs_TV = torch.log_softmax(self._head(hidden_TD[start:end]).double(), dim=-1)
                    for window in some:
                        # Position i predicts token i + 1; shorter continuations begin later.
                        begin = max(start, len(inputs) - window.num_predicted)
                        targets_T = torch.tensor(window.tokens[begin + 1 : end + 1], dtype=torch.int64)
                        targets_T, predicted_TV = targets_T.to(self._device), logs_TV[begin - start :]
                        totals[window.request] += float(predicted_TV.gather(1, targets_T.unsqueeze(1)).sum())
                        greedy[window.request] &= bool((predicted_TV.argmax(-1) == targets_T).all())
        # NaN would order all choices alike, and the first would be taken for the model's answer.
        if not all(map(math.isfinite, totals)):
            raise NonFiniteError(
                "the model gives log-likelihoods that are not finite numbers, so nothing can be scored with it. "
                "Evaluate an earlier checkpoint of the run, from before it diverged."
            )
        return [Score(*score) for score in zip(totals, greedy)]

    @torch.no_grad()
    def _hidden(self, batch: list[tuple[int, ...]]) -> Tensor:
        # Padded on the right: no position sees what comes after it.
        tokens_BT = torch.zeros(len(batch), len(batch[0]), dtype=torch.int64)
        for row, inputs in enumerate(batch):
            tokens_BT[row, : len(inputs)] = torch.tensor(inputs)
        hidden: Tensor = self._body(tokens_BT.to(self._device))
        return hidden


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Return a loss of so many nats over so many UTF-8 bytes in bits per byte; NaN without bytes."""
    return nats / math.log(2) / num_bytes if num_bytes else math.nan


def _batches(inputs: list[tuple[int, ...]], batch_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Cut inputs, longest first, so that a batch padded to its longest has at most so many tokens."""
    start = 0
    while start < len(inputs):
        rows = max(1, batch_tokens // len(inputs[start]))
        yield inputs[start : start + rows]
        start += rows
