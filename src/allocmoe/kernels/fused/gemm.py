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
    expert,
    first,
    k,
    n,
    n_mask,
    size_k,
    outer,
    stride_n,
    stride_k,
    TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A [BLOCK_K, WIDTH] tile of the weights of `expert`, from their row `first` on, or from their
    column where transposed; an expert has `outer` of them."""
    if TMA and TRANSPOSED:
        w = w_desc.load([expert, k, first]).reshape(BLOCK_K, WIDTH)
    elif TMA:
        w = w_desc.load([expert * outer + first, k]).T
    else:
        ks = k + tl.arange(0, BLOCK_K)
        pointers = w_ptr + ks[:, None] * stride_k + n[None, :] * stride_n
        if TRANSPOSED and not EVEN_N:
            mask = n_mask[None, :] if EVEN_K else n_mask[None, :] & (ks[:, None] < size_k)
            w = tl.load(pointers, mask=mask, other=0.0)
        elif EVEN_K:
            w = tl.load(pointers)
        else:
            w = tl.load(pointers, mask=ks[:, None] < size_k, other=0.0)
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
    TRANSPOSED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
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

    # where gate and up take turns, one tile holds both
    WIDTH: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    outer = 2 * size_n if GATED else size_n
    first = tile * WIDTH
    w_n = first + tl.arange(0, WIDTH)
    w_mask = w_n < (outer if INTERLEAVED else size_n)
    w_safe = tl.where(w_mask, w_n, 0)
    # what lies side by side must stay so, or every number is fetched alone
    w_at = w_n if TRANSPOSED else w_safe
    acc = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    if GATED and not INTERLEAVED:
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    for k in range(0, size_k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + k, mask=row_mask[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs + k, mask=row_mask[:, None] & (ks[None, :] + k < size_k), other=0.0)
        w = _weights(
            w_ptr, w_desc, expert, first, k, w_at, w_mask, size_k, outer, stride_n, stride_k,
            TRANSPOSED, EVEN_K, EVEN_N, TMA, BLOCK_K, WIDTH,
        )  # fmt: skip
        acc = tl.dot(x, w, acc)
        if GATED and not INTERLEAVED:
            w = _weights(
                w_ptr + size_n.to(tl.int64) * stride_n, w_desc, expert, first + size_n, k, w_at,
                w_mask, size_k, outer, stride_n, stride_k,
                TRANSPOSED, EVEN_K, EVEN_N, TMA, BLOCK_K, WIDTH,
            )  # fmt: skip
            up = tl.dot(x, w, up)

    if BIAS:
        bias_ptr += expert64 * outer
        acc += tl.load(bias_ptr + w_safe).to(tl.float32)[None, :]
        if GATED and not INTERLEAVED:
            up += tl.load(bias_ptr + size_n + w_safe).to(tl.float32)[None, :]
    if INTERLEAVED:
        acc, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
    if CLAMPED:
        acc = tl.minimum(acc, limit, _NAN)
        up = tl.minimum(tl.maximum(up, -limit, _NAN), limit, _NAN)
    acc = _activate(acc, alpha, ACT)
    if GATED:
        acc *= up + shift

    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    out_rows = rows if UP else slot
    out_ptrs = out_ptr + out_rows[:, None] * size_n + n[None, :]
    mask = row_mask[:, None] & (n < size_n)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
    TRANSPOSED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    SORTED: tl.constexpr,
    TAILS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
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
                UP, GATED, INTERLEAVED, TRANSPOSED, CLAMPED, ACT, BIAS, TMA, EVEN_K, EVEN_N,
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
        UP, GATED, INTERLEAVED, TRANSPOSED, CLAMPED, ACT, BIAS, TMA, EVEN_K, EVEN_N,
        BLOCK_M, BLOCK_N, BLOCK_K,
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
