"""Budget-aware expert activation for Mixture-of-Experts models.

model -> profile -> Sensitivity -> solve -> Plan -> apply -> evaluate
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allocmoe.artifacts import (
        Analysis,
        Benchmark,
        Evaluation,
        Plan,
        Protocol,
        Sensitivity,
        TaskEvaluation,
        TokenRule,
    )
    from allocmoe.bench.benchmark import benchmark
    from allocmoe.errors import AllocMoEError
    from allocmoe.evaluation.analysis import analyze
    from allocmoe.evaluation.quality import evaluate
    from allocmoe.evaluation.tasks import evaluate_tasks, load_tasks
    from allocmoe.planning.compare import compare
    from allocmoe.planning.methods import make_plan
    from allocmoe.planning.optimize import optimize
    from allocmoe.planning.solve import solve
    from allocmoe.profiling.profile import profile
    from allocmoe.runtime.hf import apply, use_kernel
    from allocmoe.runtime.vllm.engine import VllmEngine
    from allocmoe.text import load_text, text_from_ids

_HOME = {
    "AllocMoEError": "allocmoe.errors",
    "Analysis": "allocmoe.artifacts",
    "Benchmark": "allocmoe.artifacts",
    "Evaluation": "allocmoe.artifacts",
    "Plan": "allocmoe.artifacts",
    "Protocol": "allocmoe.artifacts",
    "Sensitivity": "allocmoe.artifacts",
    "TaskEvaluation": "allocmoe.artifacts",
    "TokenRule": "allocmoe.artifacts",
    "VllmEngine": "allocmoe.runtime.vllm.engine",
    "analyze": "allocmoe.evaluation.analysis",
    "apply": "allocmoe.runtime.hf",
    "benchmark": "allocmoe.bench.benchmark",
    "compare": "allocmoe.planning.compare",
    "evaluate": "allocmoe.evaluation.quality",
    "evaluate_tasks": "allocmoe.evaluation.tasks",
    "load_tasks": "allocmoe.evaluation.tasks",
    "load_text": "allocmoe.text",
    "make_plan": "allocmoe.planning.methods",
    "optimize": "allocmoe.planning.optimize",
    "profile": "allocmoe.profiling.profile",
    "solve": "allocmoe.planning.solve",
    "text_from_ids": "allocmoe.text",
    "use_kernel": "allocmoe.runtime.hf",
}

__all__ = [
    "AllocMoEError",
    "Analysis",
    "Benchmark",
    "Evaluation",
    "Plan",
    "Protocol",
    "Sensitivity",
    "TaskEvaluation",
    "TokenRule",
    "VllmEngine",
    "analyze",
    "apply",
    "benchmark",
    "compare",
    "evaluate",
    "evaluate_tasks",
    "load_tasks",
    "load_text",
    "make_plan",
    "optimize",
    "profile",
    "solve",
    "text_from_ids",
    "use_kernel",
]


def __getattr__(name: str) -> Any:
    # importing allocmoe stays quick: torch loads with the first name that needs it
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'allocmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
