"""Launches the Triton kernels: no synchronisation, so CUDA graphs can capture them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from allocmoe.kernels.blocks import Blocks
from allocmoe.kernels.fused.gemm import linear_kernel, sum_kernel
from allocmoe.kernels.fused.select import BINS, DIGITS, digit_kernel, keys_kernel, select_kernel
from allocmoe.kernels.fused.sort import count_kernel, sort_kernel
from allocmoe.kernels.layout import Activation, Layout, Weights

# pairs that one program sorts
_CHUNK = 2048
# blocks of so many pairs are halved where they are less than half full
_TAILS = 128
# tokens up to which nothing is sorted
_FEW = 16
# padded pairs of a pool up to which one program decides on it, and up to which counting who stands
# before whom is quicker than radix selection
_POOL = 256
_STANDING = 8192
_NO_ACTIVATION = Activation("none", gated=False)


def launch_experts(
    hidden_TH: torch.Tensor,
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    weights: Weights,
    layout: Layout,
    blocks: Blocks,
) -> torch.Tensor:
    """out[t] = sum over k of w[t, k] * E_index[t, k](x_t); an index out of range is no pair.

    The experts of one token must differ.
    """
    T, K = index_TK.shape
    if T * K == 0:
        return torch.zeros_like(hidden_TH)
    hidden, index = hidden_TH.contiguous(), index_TK.contiguous()
    E, H = weights.up.shape[0], hidden.shape[1]
    inner = weights.down.shape[1 if layout.transposed else 2]
    a, y = hidden.new_empty(T * K, inner), hidden.new_empty(T * K, H)
    out = torch.empty_like(hidden)
    block_h = min(1024 if T > 64 else 256, triton.next_power_of_2(H))
    with _on_device_of(hidden):
        routing = _route(index, E, blocks.block_m)
        _linear(hidden, weights.up, weights.up_bias, a, routing, layout, blocks, up=True)
        _linear(a, weights.down, weights.down_bias, y, routing, layout, blocks, up=False)
        sum_kernel[(T, triton.cdiv(H, block_h))](
            y, index, weights_TK.contiguous(), out, E, H, K, block_h, num_warps=4
        )
    return out


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, wherever its arguments are."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def product(
    hidden_TH: torch.Tensor,
    index_TK: torch.Tensor,
    weights: Weights,
    layout: Layout,
    blocks: Blocks,
    up: bool,
) -> Callable[[], None]:
    """One of the two products alone, over random numbers where it follows the other; for tuning."""
    inner = weights.down.shape[1 if layout.transposed else 2]
    a = torch.randn(index_TK.numel(), inner, dtype=hidden_TH.dtype, device=hidden_TH.device)
    y = a.new_empty(len(a), hidden_TH.shape[1])
    with _on_device_of(a):
        routing = _route(index_TK, weights.up.shape[0], blocks.block_m)

    def run() -> None:
        with _on_device_of(a):
            if up:
                _linear(hidden_TH, weights.up, weights.up_bias, a, routing, layout, blocks, up=True)
            else:
                _linear(a, weights.down, weights.down_bias, y, routing, layout, blocks, up=False)

    return run


@dataclass(frozen=True)
class _Routing:
    """The pairs as the products read them: sorted into blocks, or few and as they come."""

    index_TK: torch.Tensor
    num_blocks: int
    slot: torch.Tensor | None = None
    table: torch.Tensor | None = None


def _route(index_TK: torch.Tensor, num_experts: int, block_m: int) -> _Routing:
    if index_TK.shape[0] <= min(_FEW, block_m):
        return _Routing(index_TK, num_experts)
    slot, table = _sort(index_TK, num_experts, block_m)
    return _Routing(index_TK, table.shape[0], slot, table)


def table_size(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks that `num_pairs` pairs can make: every expert may leave one unfilled."""
    return min(num_pairs, num_pairs // block_m + min(num_experts, num_pairs))


def _sort(
    index_TK: torch.Tensor, num_experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots sorted by expert, and the table of blocks."""
    N = index_TK.numel()
    num_blocks = table_size(N, num_experts, block_m)
    experts = triton.next_power_of_2(num_experts + 1)
    chunk = min(_CHUNK, max(16, triton.next_power_of_2(N)))
    chunks = triton.cdiv(N, chunk)
    new = lambda *shape: torch.empty(*shape, dtype=torch.int32, device=index_TK.device)  # noqa: E731
    slot, table, cursor = new(N), new(num_blocks, 3), new(chunks, experts)
    counts = cursor
    if chunks > 1:
        counts = new(chunks, experts)
        count_kernel[(chunks,)](index_TK, counts, N, num_experts, chunk, experts, num_warps=4)
    sort_kernel[(chunks,)](
        index_TK, counts, cursor, slot, table, N, num_experts, chunks, num_blocks,
        block_m, chunk, experts, chunks == 1, 64, num_warps=8,
    )  # fmt: skip
    return slot, table


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routing: _Routing,
    layout: Layout,
    blocks: Blocks,
    *,
    up: bool,
) -> None:
    T, K = routing.index_TK.shape
    tile = blocks.up if up else blocks.down
    f = layout.activation if up else _NO_ACTIVATION
    interleaved = f.gated and layout.interleaved
    size_n, size_k = out.shape[1], x.shape[1]
    stride_k, stride_n = weight.stride(1), weight.stride(2)
    if not layout.transposed:
        stride_k, stride_n = stride_n, stride_k
    if bias is not None:
        bias = bias.contiguous()
    descriptor = None
    if tile.tma and _takes_bulk_copies(weight):
        width = 2 * tile.block_n if interleaved else tile.block_n
        if layout.transposed:  # by expert, so that nothing of the next one is read after the last k
            descriptor = TensorDescriptor.from_tensor(weight, [1, tile.block_k, width])
        else:
            rows = weight.view(-1, weight.shape[2])
            descriptor = TensorDescriptor.from_tensor(rows, [width, tile.block_k])
    clamped = not math.isinf(f.limit)
    linear_kernel[(routing.num_blocks * triton.cdiv(size_n, tile.block_n),)](
        x, weight, descriptor, bias, out, routing.index_TK, routing.slot, routing.table,
        T * K, routing.num_blocks, K, size_n, size_k, weight.stride(0), stride_n, stride_k,
        f.alpha, f.limit if clamped else 0.0, f.shift,
        UP=up, GATED=f.gated, INTERLEAVED=interleaved, TRANSPOSED=layout.transposed,
        CLAMPED=clamped,
        ACT=f.function, BIAS=bias is not None, SORTED=routing.table is not None,
        TAILS=blocks.block_m >= _TAILS,
        TMA=descriptor is not None, EVEN_K=size_k % tile.block_k == 0,
        EVEN_N=size_n % tile.block_n == 0,
        PAIRS=triton.next_power_of_2(T * K) if routing.table is None else 0,
        BLOCK_M=blocks.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _takes_bulk_copies(weight: torch.Tensor) -> bool:
    fits = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    fits = fits and weight.stride(1) * weight.element_size() % 16 == 0
    if not weight.is_cuda:
        return fits  # Triton's interpreter
    return fits and torch.cuda.get_device_capability(weight.device) >= (9, 0)


def launch_select(
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    valid_T: torch.Tensor | None,
    params: torch.Tensor,
    *,
    num_experts: int,
    rule: str,
    score: str,
    bias_on: str,
    base: int,
    num_pools: int,
    renormalise: bool,
    renormalise_over: int,
    stand_in: bool = False,
    padding_T: torch.Tensor | None = None,
    activity: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's choice with what the rule drops set to `num_experts`, and the weights.

    params: the layer's budget and threshold in float64. `select` lists the rules and scores.
    padding_T: instead of `valid_T`, the opposite, or integers that padding has below zero.
    stand_in: a dropped pair is its token's first expert with weight 0.
    activity: two int64 on the device, to which kept pairs and tokens are added.
    """
    T, K = index_TK.shape
    index, weights, logits = (t.contiguous() for t in (index_TK, weights_TK, logits_TE))
    out_index = torch.empty_like(index, dtype=torch.int32)
    out_weights = torch.empty_like(weights)
    if T == 0:
        return out_index, out_weights
    KP = triton.next_power_of_2(K)
    EP = triton.next_power_of_2(num_experts)
    marks, kind = valid_T, 0 if valid_T is None else 1
    if padding_T is not None:
        marks, kind = padding_T, 2 if padding_T.dtype == torch.bool else 3
    if marks is not None and marks.dtype == torch.bool:
        marks = marks.view(torch.uint8)
    inputs = (index, weights, logits, bias_E, marks)
    shape: dict[str, Any] = dict(
        K=K, KP=KP, EP=EP, SCORE=score, BIAS_ON=bias_on, MARKS=kind,
    )  # fmt: skip
    # a tile of logits that registers hold
    tile = max(1, min(32, 4096 // EP, triton.next_power_of_2(T)))
    tokens = T // num_pools if rule == "pool" else T
    keys = histogram = None
    chunk = 256
    programs = triton.cdiv(tokens, tile)
    if rule == "pool":
        whole = triton.next_power_of_2(tokens)
        if whole * KP <= _POOL and whole * EP <= 8192:
            tile, programs = whole, num_pools
        else:
            rule = "standing" if tokens * KP <= _STANDING else "cut"
            # a program counts for few pairs, so that there are many programs
            tile = min(tile, 8 if rule == "standing" else 16)
            chunk = 256 if rule == "standing" else 1024
            programs = num_pools * triton.cdiv(tokens, tile)
            keys = torch.empty(T * K, dtype=torch.int32, device=index.device)
            if rule == "cut":
                histogram = keys.new_zeros(num_pools, DIGITS, BINS)
    with _on_device_of(index):
        if keys is not None:
            keys_kernel[(programs,)](
                *inputs, keys, histogram, tokens, num_experts, base,
                TOKENS=tile, COUNT=histogram is not None, **shape, num_warps=4,
            )  # fmt: skip
        for level in range(1, 0 if histogram is None else DIGITS):
            digit_kernel[(num_pools * triton.cdiv(tokens * K, chunk),)](
                keys, histogram, marks, params, tokens, base, K, CHUNK=chunk,
                MARKS=kind, LEVEL=level, num_warps=4,
            )  # fmt: skip
        select_kernel[(programs,)](
            *inputs, params, histogram, keys, out_index, out_weights, activity, tokens, num_experts,
            base, renormalise_over, TOKENS=tile, CHUNK=chunk, RULE=rule, RENORMALISE=renormalise,
            STAND_IN=stand_in, COUNTED=activity is not None, **shape,
            num_warps=8 if rule == "pool" and tile * KP > 128 else 4,
        )  # fmt: skip
    return out_index, out_weights
