"""Prefill and greedy decode in steps that can be timed: plain calls, or replays of CUDA graphs.

Shape legend: B sequences, S tokens of a prompt.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from allocmoe.errors import AllocMoEError

# A capture wants a few calls before it; the first of them compiles.
_CALLS_BEFORE_CAPTURE = 3
# More tokens than this keep a device busy without a graph, and outside of a capture transformers
# leaves the causal mask to the attention kernel instead of building it.
_MOST_TOKENS_CAPTURED = 2048
# The layers run one code with values of their own, each of which is one more compilation.
_RECOMPILES = {"recompile_limit": 4096, "accumulated_recompile_limit": 65536}


class Stepper:
    """One batch of prompts over a static cache: `reset`, `prefill`, then `decode_step` as often as
    `num_steps` says. `ids_B1` holds the newest token of each sequence.

    Everything that a step reads or writes keeps its place in memory, so with `graphs` a step is
    captured once and replayed. `plain_prefill` and `plain_decode_step` are the same steps as plain
    calls. What changes the model, a plan or hooks, must be in place before, and stay.
    """

    def __init__(
        self,
        model: Any,
        prompt_BS: torch.Tensor,
        num_steps: int,
        *,
        graphs: bool = False,
        compiled: bool = False,
    ) -> None:
        from transformers import StaticCache

        self.ids_B1 = prompt_BS[:, -1:].clone()
        self._prompt_BS = prompt_BS
        self._num_steps = num_steps
        self._model = model
        last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options = {"use_cache": True, **({"logits_to_keep": 1} if last else {})}
        self.prefill: Callable[[], None] = self.plain_prefill
        self.decode_step: Callable[[], None] = self.plain_decode_step
        try:
            self.cache = StaticCache(
                config=model.config, max_cache_len=prompt_BS.shape[1] + num_steps
            )
            self._run_once()
        except (KeyError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise AllocMoEError(f"this model cannot run on a static cache: {reason}") from error
        # such a cache counts on the host, which a replay would not
        slides = any(self.cache.is_sliding)
        self.captured, self.compiled = graphs and not slides, compiled and not slides
        self.prefill_captured = self.captured and prompt_BS.numel() <= _MOST_TOKENS_CAPTURED
        if self.compiled:
            forward = torch.compile(model.forward, dynamic=False)
            self.decode_step = lambda: self._advance(forward, self.ids_B1)
        with torch._dynamo.config.patch(_RECOMPILES), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the compiler thinks of the model's code
            if self.captured or self.compiled:
                warm_up(self._run_once)
            if self.captured:
                self._capture()

    def reset(self) -> None:
        self.cache.reset()

    def plain_prefill(self) -> None:
        self._advance(self._model, self._prompt_BS)

    def plain_decode_step(self) -> None:
        self._advance(self._model, self.ids_B1)

    @torch.no_grad()
    def _advance(self, forward: Callable[..., Any], ids_BS: torch.Tensor) -> None:
        # without position ids a model takes them from the cache, whose length is a tensor
        logits = forward(input_ids=ids_BS, past_key_values=self.cache, **self._options).logits
        self.ids_B1.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def _run_once(self) -> None:
        self.reset()
        self.prefill()
        if self._num_steps:
            self.decode_step()

    def _capture(self) -> None:
        self.reset()
        if self.prefill_captured:
            self.prefill = capture(self.prefill)
        else:
            self.prefill()
        if self._num_steps:
            self.decode_step = capture(self.decode_step)


def warm_up(work: Callable[[], object]) -> None:
    """A few calls of `work`; where there is CUDA on another stream, as a capture asks for."""
    stream = _side_stream(torch.cuda.current_device()) if torch.cuda.is_available() else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # None is no stream
        for _ in range(_CALLS_BEFORE_CAPTURE):
            work()
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    # cuBLAS keeps a workspace for every stream that it has seen
    return torch.cuda.Stream(device)


def capture(work: Callable[[], object]) -> Callable[[], None]:
    """`work` as one CUDA graph; calling the result replays it."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise AllocMoEError(
            f"a step cannot be captured in a CUDA graph ({reason}); measure with --no-graphs"
        ) from error
    return graph.replay
