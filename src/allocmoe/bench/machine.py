"""The machine a number was measured on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from allocmoe.artifacts import Machine


def describe_machine(device: torch.device) -> Machine:
    return Machine(
        processor=_processor(),
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        system=f"{platform.system()} {platform.machine()}",
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
