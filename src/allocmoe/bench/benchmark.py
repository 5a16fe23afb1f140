"""The speed of plans against the unmodified model, all in one run on one device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from allocmoe.artifacts import Benchmark, Plan, Protocol, Speed
from allocmoe.bench.clock import copy_bandwidth
from allocmoe.bench.machine import describe_machine
from allocmoe.bench.measure import UNMODIFIED, Setup
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoEModel, inspect_model
from allocmoe.progress import Progress
from allocmoe.runtime.hf import IMPLEMENTATION, use_kernel
from allocmoe.runtime.kernel import KERNEL
from allocmoe.text import text_from_ids

STOCK = "unmodified, stock"


def benchmark(
    model: nn.Module,
    plans: Mapping[str, Plan],
    *,
    protocol: Protocol | None = None,
    experts: Literal["allocmoe", "stock"] = "allocmoe",
    stock: bool = True,
    compiled: bool | None = None,
    graphs: bool | None = None,
    random_weights: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Benchmark:
    """Prefill and decode times of every plan; the unmodified model is timed before and after.

    On CUDA the decode step is `compiled` and the steps are replayed as CUDA `graphs`, unless told
    otherwise. `experts` chooses what runs the routed experts wherever a plan leaves the choice: our
    implementation, where its fused kernel can run, or the one of transformers. With the former,
    `stock` adds a row for the unmodified model as transformers runs it: not compiled, in graphs.
    """
    moe = inspect_model(model)
    for name, plan in plans.items():
        plan.check_fits(moe.info)
        if name in (UNMODIFIED, STOCK):
            raise AllocMoEError(f"a plan cannot be named {name!r}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise AllocMoEError("a benchmark runs on one device; this model is spread over several")
    device = devices.pop()
    cuda = device.type == "cuda"
    own, stock = cuda and experts == "allocmoe", cuda and experts == "allocmoe" and stock
    ours = (layer.experts.config._experts_implementation == IMPLEMENTATION for layer in moe.layers)
    if (stock or not own) and any(ours):
        raise AllocMoEError(
            "this model already runs our experts, with nothing left to compare them with: "
            'model.set_experts_implementation("grouped_mm") goes back to those of transformers'
        )
    setup = Setup(
        moe,
        device,
        protocol or Protocol(),
        compiled=cuda if compiled is None else compiled,
        graphs=cuda and graphs is not False,
    )
    progress = progress or Progress()
    with torch.cuda.device(device) if cuda else nullcontext():
        bandwidth = copy_bandwidth(device)
        again = setup.protocol.warmups + setup.protocol.runs
        with progress.bar("bench", (len(plans) + 1 + stock) * setup.work + again) as bar:
            before = [replace(setup, compiled=False).measure(STOCK, None, bar)[0]] if stock else []
            setup.free()
            with _own_experts(moe, own) as fused:
                if own and not fused:
                    progress.note("no fused kernel fits this model: transformers runs its experts")
                first, stepper = setup.measure(UNMODIFIED, None, bar)
                rest = []
                for name, plan in plans.items():
                    rest.append(setup.measure(name, plan, bar)[0])
                    setup.free()
                steps = setup.protocol.decode_tokens
                last = setup.time(stepper, steps, lambda: bar.advance(1, "unmodified, again"))
    if setup.graphs and not first.decode.captured:
        progress.note("the cache of this model slides its window: its steps ran as plain calls")
    rows = [_against(first, row, bandwidth) for row in (first, *before, *rest)]
    times = (first.prefill[0].time, first.decode.step)
    prefill_drift, decode_drift = (
        statistics.median(after) / timing.median_ms - 1
        for timing, after in zip(times, last, strict=True)
    )
    return Benchmark(
        model=moe.info,
        text=text_from_ids(setup.prompt_BS(setup.protocol.prompt_lengths[0]), "random tokens").info,
        protocol=setup.protocol,
        machine=describe_machine(device),
        command=command,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        random_weights=random_weights,
        fused=fused,
        copy_bytes_per_second=bandwidth,
        prefill_drift=prefill_drift,
        decode_drift=decode_drift,
        rows=tuple(rows),
    )


@contextmanager
def _own_experts(moe: MoEModel, wanted: bool) -> Iterator[bool]:
    """Our experts implementation for the unmodified model too, where its fused kernel can run."""
    configs = {id(layer.experts.config): layer.experts.config for layer in moe.layers}.values()
    before = [(config, config._experts_implementation_internal) for config in configs]
    kernels = [layer.experts.__dict__.get(KERNEL) for layer in moe.layers]
    try:
        yield wanted and use_kernel(moe.model)
    finally:
        for config, implementation in before:
            config._experts_implementation_internal = implementation
        for layer, kernel in zip(moe.layers, kernels, strict=True):
            layer.experts.__dict__.pop(KERNEL, None)
            if kernel is not None:
                layer.experts.__dict__[KERNEL] = kernel


def _against(first: Speed, row: Speed, bandwidth: float) -> Speed:
    """The row with its speedups over the first one, and its floor at this bandwidth."""
    floor_ms = 1e3 * row.decode.floor_bytes / bandwidth
    step_ms = row.decode.step.median_ms
    return replace(
        row,
        prefill=tuple(
            replace(own, speedup=base.time.median_ms / own.time.median_ms)
            for base, own in zip(first.prefill, row.prefill, strict=True)
        ),
        decode=replace(
            row.decode,
            speedup=first.decode.step.median_ms / step_ms,
            floor_ms=floor_ms,
            times_floor=step_ms / floor_ms,
        ),
    )
