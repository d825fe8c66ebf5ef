"""A model of ours as lm-eval takes it: its whole catalogue of tasks, on a run directory. Extra ``eval``.

::

    import lm_eval
    from slipstream.evaluation.lm_eval_adapter import SlipstreamLM

    lm_eval.simple_evaluate(SlipstreamLM("runs/demo"), tasks=["arc_easy"])
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.evaluation.generation import generate
from slipstream.evaluation.scoring import Scorer
from slipstream.executor import Point
from slipstream.train.trained import open_trained

if TYPE_CHECKING:
    LM = object
else:
    try:
        from lm_eval.api.model import LM
    except ImportError:  # said when a model is made: the module can be imported without the extra
        LM = object


class SlipstreamLM(LM):
    """A model for ``lm_eval.simple_evaluate``.

    Args:
        path: A run directory or a model folder.
        weights: Of a run: ``x`` or ``y``.
        device: Where to compute.
        max_length: Most tokens seen at once; ``None``: the length it was trained on.

    Raises:
        ConfigError: lm-eval is not installed.
        SlipstreamError: The model cannot be read; see :func:`open_trained`.
    """

    def __init__(
        self, path: str | Path, *, weights: Point = "x", device: str = "cpu", max_length: int | None = None
    ) -> None:
        if LM is object:
            raise ConfigError("lm-eval is not installed. Install the extra: pip install 'slipstream[eval]'.")
        super().__init__()
        self._model = open_trained(path, weights=weights)
        self._device = device
        self._scorer = Scorer(self._model, device=device, max_length=max_length)
        self._num_written = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations of contexts."""
        return list(self._scorer.log_likelihoods([request.args for request in requests]))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts."""
        scored = self._scorer.rolling([request.args[0] for request in requests])
        return [score.log_likelihood for score, _ in scored]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts, each up to the first of its stop texts."""
        return [self._continue(*request.args) for request in requests]

    def _continue(self, context: str, settings: dict[str, Any]) -> str:
        stops = settings.get("until") or []
        # A request may be asked many times, to vote among the answers: each draw is another one.
        seed, self._num_written = self._num_written, self._num_written + 1
        written = generate(
            self._model,
            context,
            max_new_tokens=int(settings.get("max_gen_toks", 256)),
            temperature=float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0,
            seed=seed,
            device=self._device,
        )
        text = written.text
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.split(stop)[0] if stop else text
        return text
