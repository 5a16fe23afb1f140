"""Where a benchmark ran: machine, versions (with the commit) and command, for its result file."""

from __future__ import annotations

import shlex
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
        "command": f"python {shlex.join(sys.argv)}",
        "created": now(),
    }
