"""How long work takes on a device, and how fast its memory is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def time_ms(device: torch.device, work: Callable[[], object]) -> float:
    """Milliseconds from the start of `work` to its end on the device, which is idle before."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second, in the best of several large copies on the device."""
    size = 1 << 28
    if device.type == "cuda":
        size = min(1 << 30, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.zeros_like(source)
    best_ms = min(time_ms(device, lambda: target.copy_(source)) for _ in range(10))
    return 2e3 * size / best_ms
