"""What a decode step cannot do without: the bytes that it has to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from allocmoe.models import MoEModel


def floor_bytes(
    moe: MoEModel, distinct_per_step: Sequence[float], cache: Any, num_cached: float
) -> int:
    """P - sum_l (1 - d_l / E_l) X_l + C.

    P is the size of the decoder's and the output layer's parameters, X_l that of the E_l experts of
    layer l, of which a step runs d_l, and C that of the keys and values of `num_cached` positions.
    Of an embedding table a step reads a few rows, which are left out.
    """
    output = moe.model.get_output_embeddings()  # type: ignore[operator]
    parts = [*moe.decoder.modules(), *([] if output is None else [output])]
    # a table that is also the output layer is read whole, and counted there
    parameters = {
        id(parameter): parameter
        for part in parts
        if not isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
    }
    total = float(_size(parameters.values()))
    for layer, distinct in zip(moe.layers, distinct_per_step, strict=True):
        total -= (1 - distinct / layer.num_experts) * _size(layer.experts.parameters())
    for layer in cache.layers:
        for states in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if states is not None:
                # [batch, heads, positions, width]; a sliding window holds no more than it sees
                positions = states.shape[2]
                total += states.nbytes / positions * min(num_cached, positions)
    return round(total)


def _size(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
