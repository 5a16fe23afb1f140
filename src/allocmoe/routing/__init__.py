"""Token-level rules: scores `[T, K]` in, keep-mask `[T, K]` out.

Shape legend: T tokens, K = k_orig candidates of a token in the model's own order of preference
(column 0 is its first choice), B sequences. All functions are pure and keep their tensors on the
device they came on.
"""

from allocmoe.routing.alloc_t import (
    calibrate_threshold,
    select_batch,
    select_sequence,
    select_threshold,
)
from allocmoe.routing.budget import base_of, num_pairs
from allocmoe.routing.dynamic_moe import calibrate_dynamic_moe, select_dynamic_moe
from allocmoe.routing.naee import calibrate_naee, select_naee
from allocmoe.routing.top_k import select_top_k
from allocmoe.routing.weights import reweigh

__all__ = [
    "base_of",
    "calibrate_dynamic_moe",
    "calibrate_naee",
    "calibrate_threshold",
    "num_pairs",
    "reweigh",
    "select_batch",
    "select_dynamic_moe",
    "select_naee",
    "select_sequence",
    "select_threshold",
    "select_top_k",
]
