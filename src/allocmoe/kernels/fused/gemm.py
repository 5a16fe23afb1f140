"""Triton: the two products of the routed experts, and the sum over a token's experts.

    a[r] = act(x[token(r)] @ W_up[e])          r runs over the kept pairs, e is the pair's expert
    y[s] = a[r] @ W_down[e]                    s = token * K + column, the pair's slot
    out[t] = sum_k w[t, k] * y[t * K + k]      over the kept columns k, in float32

A block is up to BLOCK_M pairs of one expert. Where the pairs come sorted, `table_ptr` lists the
blocks as (expert, first row, end row) and a row of `a` is a place in the sorted list. With few
tokens nothing is sorted: block e is expert e, each program picks its expert's pairs out of the
routing itself, and a row of `a` is the pair's slot. Either way a row's result does not depend on
its neighbours, so the order of the pairs within an expert does not show in the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

# what is not a number stays so, as in torch
_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _activate(x, alpha, ACT: tl.constexpr):
    if ACT == "silu":
        x = x * tl.sigmoid(alpha * x)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) = sigmoid(2u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "relu":
        x = tl.maximum(x, 0.0, _NAN)
    elif ACT == "relu2":
        x = tl.maximum(x, 0.0, _NAN) * tl.maximum(x, 0.0, _NAN)
    return x


@triton.jit
def _weights(
    w_ptr,
    w_desc,
    row,
    k,
    n,
    size_k,
    stride_n,
    stride_k,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """A [BLOCK_K, BLOCK_N] tile of an expert's weights; `row` is its first row in `w_desc`."""
    if TMA:
        w = w_desc.load([row, k]).T
    else:
        ks = k + tl.arange(0, BLOCK_K)
        pointers = w_ptr + ks[:, None] * stride_k + n[None, :] * stride_n
        mask = None if EVEN_K else ks[:, None] < size_k
        w = tl.load(pointers, mask=mask, other=None if EVEN_K else 0.0)
    return w


@triton.jit
def _product(
    x_ptr,
    w_ptr,
    w_desc,
    bias_ptr,
    out_ptr,
    rows,
    slot,
    row_mask,
    expert,
    tile,
    num_columns,
    size_n,
    size_k,
    stride_e,
    stride_n,
    stride_k,
    alpha,
    limit,
    shift,
    UP: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of up to BLOCK_M pairs of one expert."""
    rows = rows.to(tl.int64)
    slot = slot.to(tl.int64)
    expert64 = expert.to(tl.int64)

    x_rows = slot // num_columns if UP else rows
    ks = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_rows[:, None] * size_k + ks[None, :]
    w_ptr += expert64 * stride_e

    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < size_n
    if GATED and INTERLEAVED:
        n2 = tile * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
        n2 = tl.where(n2 < 2 * size_n, n2, 0)
        acc2 = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
    else:
        n_safe = tl.where(n_mask, n, 0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        row = expert * (2 * size_n if GATED else size_n) + tile * BLOCK_N
        if GATED:
            up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    for k in range(0, size_k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + k, mask=row_mask[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs + k, mask=row_mask[:, None] & (ks[None, :] + k < size_k), other=0.0)
        if GATED and INTERLEAVED:
            w = _weights(
                w_ptr, w_desc, 0, k, n2, size_k, stride_n, stride_k, BLOCK_K, EVEN_K, False
            )
            acc2 = tl.dot(x, w, acc2)
        else:
            w = _weights(
                w_ptr, w_desc, row, k, n_safe, size_k, stride_n, stride_k, BLOCK_K, EVEN_K, TMA
            )
            acc = tl.dot(x, w, acc)
            if GATED:
                w = _weights(
                    w_ptr + size_n.to(tl.int64) * stride_n,
                    w_desc,
                    row + size_n,
                    k,
                    n_safe,
                    size_k,
                    stride_n,
                    stride_k,
                    BLOCK_K,
                    EVEN_K,
                    TMA,
                )
                up = tl.dot(x, w, up)

    if GATED and INTERLEAVED:
        if BIAS:
            acc2 += tl.load(bias_ptr + expert64 * 2 * size_n + n2).to(tl.float32)[None, :]
        acc, up = tl.split(tl.reshape(acc2, (BLOCK_M, BLOCK_N, 2)))
    elif BIAS:
        bias_ptr += expert64 * (2 * size_n if GATED else size_n)
        acc += tl.load(bias_ptr + n_safe).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + size_n + n_safe).to(tl.float32)[None, :]
    if CLAMPED:
        acc = tl.minimum(acc, limit, _NAN)
        up = tl.minimum(tl.maximum(up, -limit, _NAN), limit, _NAN)
    acc = _activate(acc, alpha, ACT)
    if GATED:
        acc *= up + shift

    out_rows = rows if UP else slot
    out_ptrs = out_ptr + out_rows[:, None] * size_n + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "num_columns"])
def linear_kernel(
    x_ptr,
    w_ptr,
    w_desc,
    bias_ptr,
    out_ptr,
    index_ptr,
    slot_ptr,
    table_ptr,
    num_pairs,
    num_blocks,
    num_columns,
    size_n,
    size_k,
    stride_e,
    stride_n,
    stride_k,
    alpha,
    limit,
    shift,
    UP: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    SORTED: tl.constexpr,
    TAILS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One of the two products; `size_n` is what comes out, so half the rows of a gated weight.

    UP reads the rows of the tokens and writes the pairs' rows, otherwise it reads the pairs' rows
    and writes their slots.
    """
    pid = tl.program_id(0)
    num_tiles = tl.cdiv(size_n, BLOCK_N)
    # GROUP_M blocks go over the tiles together, so that they share the weights in the cache
    per_group = GROUP_M * num_tiles
    first = pid // per_group * GROUP_M
    group = tl.minimum(num_blocks - first, GROUP_M)
    block = first + pid % per_group % group
    tile = pid % per_group // group

    if SORTED:
        expert = tl.load(table_ptr + block * 3)
        if expert < 0:
            return
        start = tl.load(table_ptr + block * 3 + 1)
        end = tl.load(table_ptr + block * 3 + 2)
        # an expert's last block is often less than half full: then half the arithmetic does
        if TAILS and end - start <= BLOCK_M // 2:
            rows = start + tl.arange(0, BLOCK_M // 2)
            slot = tl.load(slot_ptr + rows, mask=rows < end, other=0)
            _product(
                x_ptr, w_ptr, w_desc, bias_ptr, out_ptr, rows, slot, rows < end, expert, tile,
                num_columns, size_n, size_k, stride_e, stride_n, stride_k, alpha, limit, shift,
                UP, GATED, INTERLEAVED, CLAMPED, ACT, BIAS, TMA, EVEN_K,
                BLOCK_M // 2, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            return
        rows = start + tl.arange(0, BLOCK_M)
        row_mask = rows < end
        slot = tl.load(slot_ptr + rows, mask=row_mask, other=0)
    else:
        expert = block
        i = tl.arange(0, PAIRS)
        mine = (tl.load(index_ptr + i, mask=i < num_pairs, other=-1) == expert).to(tl.int32)
        count = tl.sum(mine, 0)
        if count == 0:
            return
        m = tl.arange(0, BLOCK_M)
        place = tl.where(mine == 1, tl.cumsum(mine, 0) - 1, -1)
        slot = tl.sum(tl.where(place[None, :] == m[:, None], i[None, :], 0), 1)
        rows = slot
        row_mask = m < count
    _product(
        x_ptr, w_ptr, w_desc, bias_ptr, out_ptr, rows, slot, row_mask, expert, tile,
        num_columns, size_n, size_k, stride_e, stride_n, stride_k, alpha, limit, shift,
        UP, GATED, INTERLEAVED, CLAMPED, ACT, BIAS, TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def sum_kernel(
    y_ptr,
    index_ptr,
    weight_ptr,
    out_ptr,
    num_experts,
    H,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[t] = sum of the kept w[t, k] * y[t * K + k], in the order of the columns."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    h_mask = h < H
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(index_ptr + token * K + k)
        kept = (expert >= 0) & (expert < num_experts)
        weight = tl.load(weight_ptr + token * K + k).to(tl.float32)
        # the row of a dropped pair was never written, and its weight may be anything
        read = h < tl.where(kept, H, 0)
        y = tl.load(y_ptr + (token * K + k) * H + h, mask=read, other=0.0)
        total += tl.where(kept, weight, 0.0) * y.to(tl.float32)
    tl.store(out_ptr + token * H + h, total.to(out_ptr.dtype.element_ty), mask=h_mask)
