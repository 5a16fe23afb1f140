"""Where a benchmark ran: machine, versions, commit and command, for its result file."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch

from allocmoe.artifacts import now, package_versions
from allocmoe.bench.machine import describe_machine


def provenance() -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "machine": asdict(describe_machine(device)),
        "versions": package_versions(),
        "commit": _commit(),
        "command": f"python {shlex.join(sys.argv)}",
        "created": now(),
    }


def _commit() -> str | None:
    # a machine that got the files without their history is told
    if "BENCHMARK_COMMIT" in os.environ:
        return os.environ["BENCHMARK_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
