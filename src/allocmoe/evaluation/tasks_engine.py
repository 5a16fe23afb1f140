"""An engine as lm-eval sees models. Imported only where lm-eval is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from allocmoe.runtime.engine import Engine


class EngineLM(TemplateLM):  # type: ignore[misc]
    """Token ids in, log-likelihoods and texts out, as lm-eval's own model classes do it."""

    backend = "causal"

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        super().__init__()
        self._engine, self.tokenizer = engine, tokenizer
        self.on_share: Callable[[float], None] = lambda share: None

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def max_gen_toks(self) -> int:
        return 256

    def tok_encode(self, string: str, **kwargs: Any) -> list[int]:
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=False)
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        prompts, starts = [], []
        for _, context, continuation in requests:
            # too long an input loses its beginning
            ids = [*context, *continuation][-self._engine.max_length :]
            prompts.append(ids)
            starts.append(max(1, len(ids) - len(continuation)))
        return self._engine.score(prompts, starts)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                # one token less, which the prefix takes
                max_seq_len=self._engine.max_length - 1,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, options = [], []
        for request in requests:
            context, given = request.args
            room = int(given.get("max_gen_toks", self.max_gen_toks))
            prompts.append(self.tok_encode(context)[-(self._engine.max_length - room) :])
            until = given.get("until") or []
            sample = bool(given.get("do_sample", False))
            options.append(
                dict(
                    max_tokens=room,
                    stop=[until] if isinstance(until, str) else list(until),
                    temperature=float(given.get("temperature", 1.0)) if sample else 0.0,
                )
            )
        return self._engine.generate(prompts, options)
