"""The routed experts over a list of kept (token, expert, weight) pairs."""

from allocmoe.kernels.experts import Pairs, compact, run_experts
from allocmoe.kernels.layout import Layout, Weights, read_layout, weights_of

__all__ = ["Layout", "Pairs", "Weights", "compact", "read_layout", "run_experts", "weights_of"]
