"""Block sizes of the fused kernel for the shape of a model, found on the device."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Sequence

import torch

from allocmoe.bench.clock import time_ms
from allocmoe.bench.steps import capture, warm_up
from allocmoe.errors import AllocMoEError
from allocmoe.kernels import read_layout
from allocmoe.models import MoEModel
from allocmoe.progress import Progress
from allocmoe.runtime.blocks import Entry, TunedShape, shape_key

TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
# calls in a graph, and replays of it, for one timing
_CALLS, _REPLAYS = 5, 5


def tune_model(
    moe: MoEModel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: Sequence[int] = TOKENS,
    progress: Progress | None = None,
) -> TunedShape:
    """The fastest blocks at each number of tokens, on random weights in the model's shape.

    The model may be a skeleton without weights.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise AllocMoEError("the fused kernel runs on a CUDA device, in bfloat16 or float16")
    from allocmoe.kernels.fused import tune

    layer = moe.layers[0]
    layout = read_layout(layer.experts)
    if layout is None:
        raise AllocMoEError(f"the experts of {moe.info.id} do not fit the fused kernel")
    E, H, inner = layer.experts.down_proj.shape
    if layout.transposed:
        H, inner = inner, H
    problem = tune.Problem(E, H, inner, layer.k_orig, dtype, layout)
    tokens = sorted(set(tokens))
    progress = progress or Progress()

    with torch.cuda.device(device), torch.no_grad():
        total = len(tune.tasks(problem, tokens, device))
        workers = max(1, min(16, (os.cpu_count() or 2) - 1))
        with progress.bar("compile", total) as bar:
            for done in tune.compile_all(problem, tokens, device, workers):
                bar.advance(done)
        hopper = tune.is_hopper(device)
        tries = sum(
            len(list(problem.candidates(T, hopper, up))) for T in tokens for up in (True, False)
        )
        weights = problem.weights(device)
        try:
            with progress.bar("tune", tries) as bar:
                found = [
                    tune.tune(problem, weights, T, _timer(device), lambda: bar.advance(1))
                    for T in tokens
                ]
        except tune.NothingRan as error:
            raise AllocMoEError(str(error)) from error
    # half way to the next number of tokens, in the geometric sense
    rows = [T * layer.k_orig / E for T in tokens]
    reach = [(a * b) ** 0.5 for a, b in itertools.pairwise(rows)]
    entries = zip([*reach, None], found, strict=True)
    return TunedShape(
        shape_key(weights.down, layout), tuple(Entry(far, blocks) for far, blocks in entries)
    )


def _timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    def timer(run: Callable[[], object]) -> float:
        def several() -> None:
            for _ in range(_CALLS):
                run()

        warm_up(run)
        replay = capture(several)
        return statistics.median(time_ms(device, replay) for _ in range(_REPLAYS + 1))

    return timer
