"""The speed of one entry: a plan, or the unmodified model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from allocmoe.artifacts import (
    Decode,
    LayerActivity,
    Plan,
    Prefill,
    Protocol,
    Speed,
    Timing,
    TokenRule,
)
from allocmoe.bench.clock import time_ms
from allocmoe.bench.floor import floor_bytes
from allocmoe.bench.steps import Stepper, capture, warm_up
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoEModel
from allocmoe.progress import Bar
from allocmoe.runtime.hf import Controller, apply

UNMODIFIED = "unmodified"


@dataclass(frozen=True)
class Setup:
    """What is the same for all entries."""

    moe: MoEModel
    device: torch.device
    protocol: Protocol
    compiled: bool
    graphs: bool

    @property
    def work(self) -> int:
        """How often the measurement of an entry advances a bar: once to prepare, once a run and
        once to count, for each prompt length."""
        return len(self.protocol.prompt_lengths) * (2 + self.protocol.warmups + self.protocol.runs)

    def prompt_BS(self, length: int) -> torch.Tensor:
        """The same tokens for every entry; a shorter prompt is the beginning of a longer one."""
        generator = torch.Generator().manual_seed(self.protocol.seed)
        vocabulary = self.moe.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        shape = (max(self.protocol.prompt_lengths), self.protocol.batch_size)
        ids_SB = torch.randint(vocabulary, shape, generator=generator)
        return ids_SB[:length].T.contiguous().to(self.device)

    def measure(self, name: str, plan: Plan | None, bar: Bar) -> tuple[Speed, Stepper]:
        """The speed of one entry, and the steps that were timed at the first prompt length.

        What is relative to other entries is left at 0. `free` what is no longer needed.
        """
        with self._applied(plan, count=False):
            experts = self.moe.layers[0].experts.config._experts_implementation or "eager"
        first, *others = self.protocol.prompt_lengths

        def done() -> None:
            bar.advance(1, name)

        try:
            steps = self.protocol.decode_tokens
            prefill, decode, stepper = self._measure_at(first, plan, steps, done)
            further = [self._measure_at(length, plan, 0, done)[0] for length in others]
        except AllocMoEError as error:
            raise AllocMoEError(f"{name}: {error}") from error
        assert decode is not None
        speed = Speed(
            name=name,
            method=UNMODIFIED if plan is None else plan.method,
            token="none" if plan is None else plan.token.label,
            budget=float(sum(self.moe.k_orig)) if plan is None else float(plan.budget),
            experts=experts,
            prefill=(prefill, *further),
            decode=decode,
        )
        return speed, stepper

    def _measure_at(
        self, length: int, plan: Plan | None, steps: int, done: Callable[[], None]
    ) -> tuple[Prefill, Decode | None, Stepper]:
        """Prompts of one length, and what follows them if there are steps."""
        with self._applied(plan, count=False) as controller:
            stepper = Stepper(
                self.moe.model,
                self.prompt_BS(length),
                steps,
                graphs=self.graphs,
                compiled=self.compiled and steps > 0,
            )
            done()
            prefill_ms, step_ms = self.time(stepper, steps, done)
            experts_ms = self._time_experts(stepper, steps, controller) if steps else []
        in_prefill, in_decode = self._count(plan, stepper, steps)
        done()
        prefill = Prefill(
            prompt_length=length,
            captured=stepper.prefill_captured,
            time=Timing.of(prefill_ms),
            speedup=0.0,
            realised_per_layer=tuple(layer.mean for layer in in_prefill),
        )
        decode = self._decode(stepper, length, step_ms, experts_ms, in_decode) if steps else None
        self.free()
        return prefill, decode, stepper

    def _applied(
        self, plan: Plan | None, *, count: bool
    ) -> AbstractContextManager[Controller | None]:
        if plan is not None:
            return apply(self.moe.model, plan, count=count)
        # the unmodified model is timed untouched
        return Controller(self.moe, TokenRule()) if count else nullcontext()

    def time(
        self, stepper: Stepper, steps: int, done: Callable[[], None]
    ) -> tuple[list[float], list[float]]:
        """Milliseconds of the prefill, and of a decode step, in every timed run."""

        def decode() -> None:
            for _ in range(steps):
                stepper.decode_step()

        prefill_ms, step_ms = [], []
        for _ in range(self.protocol.warmups + self.protocol.runs):
            stepper.reset()
            prefill_ms.append(time_ms(self.device, stepper.prefill))
            if steps:
                step_ms.append(time_ms(self.device, decode) / steps)
            done()
        return prefill_ms[self.protocol.warmups :], step_ms[self.protocol.warmups :]

    @torch.no_grad()
    def _time_experts(
        self, stepper: Stepper, steps: int, controller: Controller | None
    ) -> list[float]:
        """Milliseconds of the routed experts of all layers, on the inputs of a step in mid-decode.

        The steps up to there are plain calls, because a replay leaves no tensors that last.
        """
        routed: list[Any] = []
        inputs: list[tuple[torch.Tensor, ...]] = []
        stepper.reset()
        stepper.plain_prefill()
        for _ in range(steps // 2):
            stepper.plain_decode_step()
        hooks = []
        for layer in self.moe.layers:
            hooks += [
                layer.router.register_forward_hook(lambda module, args, out: routed.append(out)),
                layer.experts.register_forward_pre_hook(
                    lambda module, args: inputs.append(tuple(arg.clone() for arg in args))
                ),
            ]
        stepper.plain_decode_step()
        for hook in hooks:
            hook.remove()

        def run_experts() -> None:
            for layer, args, out in zip(self.moe.layers, inputs, routed, strict=True):
                if controller is not None:  # a token rule asks what the router said before
                    controller.controls[layer.index].see_router(out)
                layer.experts(*args)

        warm_up(run_experts)
        work = capture(run_experts) if stepper.captured else run_experts
        runs = range(self.protocol.warmups + self.protocol.runs)
        return [time_ms(self.device, work) for _ in runs][self.protocol.warmups :]

    def _count(
        self, plan: Plan | None, stepper: Stepper, steps: int
    ) -> tuple[list[LayerActivity], list[LayerActivity]]:
        """What runs in the prefill and in the decode, counted in passes that nobody times."""
        with self._applied(plan, count=True) as controller:
            assert controller is not None
            stepper.reset()
            stepper.plain_prefill()
            in_prefill = controller.activity()
            controller.reset()
            for _ in range(steps):
                stepper.plain_decode_step()
            return in_prefill, controller.activity()

    def _decode(
        self,
        stepper: Stepper,
        length: int,
        step_ms: list[float],
        experts_ms: list[float],
        activity: list[LayerActivity],
    ) -> Decode:
        step, experts = Timing.of(step_ms), Timing.of(experts_ms)
        distinct = tuple(layer.distinct_per_step for layer in activity)
        num_cached = length + self.protocol.decode_tokens / 2
        return Decode(
            compiled=stepper.compiled,
            captured=stepper.captured,
            step=step,
            speedup=0.0,
            tokens_per_second=1e3 * self.protocol.batch_size / step.median_ms,
            experts=experts,
            rest_ms=step.median_ms - experts.median_ms,
            realised_per_layer=tuple(layer.mean for layer in activity),
            distinct_per_step=distinct,
            floor_bytes=floor_bytes(self.moe, distinct, stepper.cache, num_cached),
            floor_ms=0.0,
            times_floor=0.0,
        )

    def free(self) -> None:
        """Give back the compiled code, and the graphs that nobody holds any more."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
