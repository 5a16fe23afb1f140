"""The routed experts over a list of kept (token, expert, weight) pairs."""

from allocmoe.kernels.experts import Pairs, compact, run_experts

__all__ = ["Pairs", "compact", "run_experts"]
