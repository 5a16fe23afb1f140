"""Triton: from a router's choice to the pairs that run, for every token rule.

    s[t, k]     the score of the k-th chosen expert, before any renormalisation
    rank[t, k]  its place in the model's order of preference (score plus bias; ties by column)
    keep[t, k]  what the rule says; `routing` defines each rule
    out         index[t, k] where kept, else num_experts (or the token's first expert, STAND_IN);
                weight[t, k], renormalised where asked, else 0

Columns stay where the router put them. A small pool of Alloc-T takes one launch of one program
(`pool`). A larger one takes two: the keys of all pairs, then each program counts how many stand
before its own (`standing`). The largest find the pool's cut by radix selection (`cut`): the keys
and how often each first digit occurs, one launch for each further digit, then the pairs: kept is
what lies above the cut, and of what lies on it the first ones.

`marks_ptr` tells tokens from padding, by MARKS: 0 none, all are tokens; 1 a mask of the tokens; 2 a
mask of the padding; 3 the tokens' slots in a cache, where padding has a negative one.

Shape legend: T tokens, K columns, E experts, P pools.
"""

from __future__ import annotations

import triton
import triton.language as tl

# below every score, -inf included; what is not in the pool has this key
_LOWEST = tl.constexpr(-2147483648)
# a key has four digits of eight bits; a pool's histograms lie one after the other
DIGITS = 4
BINS = 256
_DIGITS = tl.constexpr(DIGITS)
_BINS = tl.constexpr(BINS)


@triton.jit
def _scores(
    index_ptr,
    weight_ptr,
    logits_ptr,
    bias_ptr,
    marks_ptr,
    tokens,
    token_mask,
    E,
    K: tl.constexpr,
    KP: tl.constexpr,
    EP: tl.constexpr,
    SCORE: tl.constexpr,
    BIAS_ON: tl.constexpr,
    MARKS: tl.constexpr,
):
    """index, weight, score and rank of a tile of tokens, `[T, KP]`, and who is no padding `[T]`."""
    k = tl.arange(0, KP)
    pair = tokens[:, None] * K + k[None, :]
    mask = token_mask[:, None] & (k < K)[None, :]
    index = tl.load(index_ptr + pair, mask=mask, other=0).to(tl.int32)
    weight = tl.load(weight_ptr + pair, mask=mask, other=0.0).to(tl.float32)
    at = tokens.to(tl.int64)[:, None] * E
    # padding may come with the expert -1
    inside = mask & (index >= 0)
    chosen = tl.load(logits_ptr + at + index, mask=inside, other=0.0).to(tl.float32)
    if SCORE == "softmax":
        e = tl.arange(0, EP)
        row_mask = token_mask[:, None] & (e < E)[None, :]
        row = tl.load(logits_ptr + at + e[None, :], mask=row_mask, other=float("-inf"))
        row = tl.where(token_mask[:, None], row.to(tl.float32), 0.0)
        top = tl.max(row, 1)
        mass = tl.sum(tl.exp(row - top[:, None]), 1)
        score = tl.exp(chosen - top[:, None] - tl.log(mass)[:, None])
    elif SCORE == "sigmoid":
        score = tl.sigmoid(chosen)
    else:
        score = chosen
    choice = score
    if BIAS_ON != "none":
        on = score if BIAS_ON == "score" else chosen
        choice = on + tl.load(bias_ptr + index, mask=inside, other=0.0).to(tl.float32)
    order = tl.where((k < K)[None, :], _sortable(choice), _LOWEST)
    ahead = (order[:, None, :] > order[:, :, None]) | (
        (order[:, None, :] == order[:, :, None]) & (k[None, None, :] < k[None, :, None])
    )
    rank = tl.sum(ahead.to(tl.int32), 2)
    rank = tl.where((k < K)[None, :], rank, KP)
    valid = _are_tokens(marks_ptr, tokens, token_mask, MARKS)
    return index, weight, score, rank, valid


@triton.jit
def _are_tokens(marks_ptr, at, mask, MARKS: tl.constexpr):
    if MARKS == 1:
        mask = tl.load(marks_ptr + at, mask=mask, other=0) != 0
    elif MARKS == 2:
        mask = tl.load(marks_ptr + at, mask=mask, other=1) == 0
    elif MARKS == 3:
        mask = tl.load(marks_ptr + at, mask=mask, other=-1) >= 0
    return mask


@triton.jit
def _sortable(x):
    """Integers in the order of the numbers. NaN is the largest, as for torch: without a place for
    it, pairs would share one."""
    # adding zero makes one zero of the two
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)


@triton.jit
def _keys(score, rank, valid, base, K: tl.constexpr):
    """Integers in the order of the scores, for what is in the pool."""
    return tl.where((rank >= base) & (rank < K) & valid[:, None], _sortable(score), _LOWEST)


@triton.jit
def _extra(params_ptr, num_valid, base):
    """round(budget * num_valid) - base * num_valid, halves to even, as on the host."""
    pairs = tl.load(params_ptr) * num_valid.to(tl.float64)
    whole = tl.floor(pairs)
    rest = pairs - whole
    odd = (whole.to(tl.int64) & 1) == 1
    up = (rest > 0.5) | ((rest == 0.5) & odd)
    return (whole.to(tl.int64) + up.to(tl.int64)).to(tl.int32) - base * num_valid


@triton.jit
def _write(
    out_index_ptr,
    out_weight_ptr,
    keep,
    index,
    weight,
    score,
    rank,
    tokens,
    token_mask,
    E,
    renormalise_over,
    K: tl.constexpr,
    KP: tl.constexpr,
    RENORMALISE: tl.constexpr,
    STAND_IN: tl.constexpr,
):
    k = tl.arange(0, KP)
    mask = token_mask[:, None] & (k < K)[None, :]
    if RENORMALISE:
        everything = tl.sum(tl.where((k < K)[None, :], score, 0.0), 1)
        counted = keep if renormalise_over == 0 else (rank < renormalise_over)
        mass = tl.maximum(tl.sum(tl.where(counted, score, 0.0), 1), 1.1754943508222875e-38)
        weight = weight * (everything / mass)[:, None]
    pair = tokens[:, None] * K + k[None, :]
    dropped = tl.zeros_like(index) + E
    if STAND_IN:
        first = tl.sum(tl.where(rank == 0, index, 0), 1)
        dropped += (first - E)[:, None]
    tl.store(out_index_ptr + pair, tl.where(keep, index, dropped), mask=mask)
    kept = tl.where(keep, weight, 0.0).to(out_weight_ptr.dtype.element_ty)
    tl.store(out_weight_ptr + pair, kept, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "base"])
def select_kernel(
    index_ptr,
    weight_ptr,
    logits_ptr,
    bias_ptr,
    marks_ptr,
    params_ptr,
    histogram_ptr,
    key_ptr,
    out_index_ptr,
    out_weight_ptr,
    activity_ptr,
    num_tokens,
    E,
    base,
    renormalise_over,
    K: tl.constexpr,
    KP: tl.constexpr,
    EP: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    RULE: tl.constexpr,
    SCORE: tl.constexpr,
    BIAS_ON: tl.constexpr,
    MARKS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    STAND_IN: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """A program decides on TOKENS tokens, which for `pool` are a whole pool.

    RULE: `top_k`, `threshold`, `naee`, `dynamic-moe`, or for Alloc-T `pool`, `standing` (reads
    `key_ptr`) or `cut` (reads `histogram_ptr` too). params: the layer's budget and threshold, in
    float64. activity (COUNTED): kept pairs and tokens are added.
    """
    program = tl.program_id(0)
    t = tl.arange(0, TOKENS)
    POOLED: tl.constexpr = RULE == "pool" or RULE == "standing" or RULE == "cut"
    if POOLED:
        # num_tokens are those of a pool; the programs of a pool follow one another
        per_pool = tl.cdiv(num_tokens, TOKENS)
        pool = program // per_pool
        in_pool = program % per_pool * TOKENS + t
        token_mask = in_pool < num_tokens
        tokens = pool * num_tokens + in_pool
    else:
        tokens = program * TOKENS + t
        token_mask = tokens < num_tokens
    index, weight, score, rank, valid = _scores(
        index_ptr, weight_ptr, logits_ptr, bias_ptr, marks_ptr, tokens, token_mask, E,
        K, KP, EP, SCORE, BIAS_ON, MARKS,
    )  # fmt: skip
    keep = rank < base
    if RULE == "threshold":
        keep = keep | (score.to(tl.float64) > tl.load(params_ptr + 1))
    elif RULE == "naee":
        first = tl.sum(tl.where(rank == 0, score, 0.0), 1).to(tl.float64)
        ratio = score.to(tl.float64) / first[:, None]
        keep = (rank == 0) | (ratio >= tl.load(params_ptr + 1))
    elif RULE == "dynamic-moe":
        before = (rank[:, None, :] < rank[:, :, None]).to(tl.float64)
        mass = tl.sum(before * score.to(tl.float64)[:, None, :], 2)
        keep = mass <= tl.load(params_ptr + 1)
    elif POOLED:
        key = _keys(score, rank, valid, base, K)
        place = in_pool[:, None] * K + rank
        N: tl.constexpr = TOKENS * KP
        own = tl.reshape(key, (N,))
        at = tl.reshape(place, (N,))
        size = num_tokens * K
        if RULE == "cut":
            num_valid = _count_valid(marks_ptr, pool, num_tokens, CHUNK, MARKS)
            need = _extra(params_ptr, num_valid, base)
            cut, need, ties = _descend(histogram_ptr + pool * _DIGITS * _BINS, need, _DIGITS)
            above = _ordered(own) > cut
            on = _ordered(own) == cut
            if ties > need:
                # those on the cut that other programs have before this one
                start = program % per_pool * TOKENS * K
                count = tl.zeros((CHUNK,), dtype=tl.int32)
                for first in range(0, start, CHUNK):
                    i = first + tl.arange(0, CHUNK)
                    keys = tl.load(key_ptr + pool * size + i, mask=i < start, other=_LOWEST)
                    count += ((_ordered(keys) == cut) & (i < start)).to(tl.int32)
                earlier = on[None, :] & (at[None, :] < at[:, None])
                on = on & (tl.sum(count, 0) + tl.sum(earlier.to(tl.int32), 1) < need)
            keep = keep | tl.reshape(above | on, (TOKENS, KP))
        else:
            if RULE == "pool":
                num_valid = tl.sum(valid.to(tl.int32), 0)
                before = _before(own, at, own, at)
            else:
                num_valid = _count_valid(marks_ptr, pool, num_tokens, CHUNK, MARKS)
                before = tl.zeros((N,), dtype=tl.int32)
                for start in range(0, size, CHUNK):
                    i = start + tl.arange(0, CHUNK)
                    keys = tl.load(key_ptr + pool * size + i, mask=i < size, other=_LOWEST)
                    before += _before(own, at, keys, i)
            extra = _extra(params_ptr, num_valid, base)
            keep = keep | tl.reshape(before < extra, (TOKENS, KP))
    keep = keep & valid[:, None] & (rank < K)
    _write(
        out_index_ptr, out_weight_ptr, keep, index, weight, score, rank, tokens, token_mask,
        E, renormalise_over, K, KP, RENORMALISE, STAND_IN,
    )  # fmt: skip
    if COUNTED:
        tl.atomic_add(activity_ptr, tl.sum(keep.to(tl.int64)), sem="relaxed")
        tl.atomic_add(activity_ptr + 1, tl.sum(valid.to(tl.int64)), sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens", "base"])
def keys_kernel(
    index_ptr,
    weight_ptr,
    logits_ptr,
    bias_ptr,
    marks_ptr,
    key_ptr,
    histogram_ptr,
    num_tokens,
    E,
    base,
    K: tl.constexpr,
    KP: tl.constexpr,
    EP: tl.constexpr,
    TOKENS: tl.constexpr,
    SCORE: tl.constexpr,
    BIAS_ON: tl.constexpr,
    MARKS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The keys of pools in the order of their places, and (COUNT) how often each first digit is."""
    per_pool = tl.cdiv(num_tokens, TOKENS)
    pool = tl.program_id(0) // per_pool
    in_pool = tl.program_id(0) % per_pool * TOKENS + tl.arange(0, TOKENS)
    token_mask = in_pool < num_tokens
    tokens = pool * num_tokens + in_pool
    _, _, score, rank, valid = _scores(
        index_ptr, weight_ptr, logits_ptr, bias_ptr, marks_ptr, tokens, token_mask, E,
        K, KP, EP, SCORE, BIAS_ON, MARKS,
    )  # fmt: skip
    key = _keys(score, rank, valid, base, K)
    tl.store(key_ptr + tokens[:, None] * K + rank, key, mask=token_mask[:, None] & (rank < K))
    if COUNT:
        key = tl.reshape(tl.where(token_mask[:, None] & (rank < K), key, _LOWEST), (TOKENS * KP,))
        _count_digits(histogram_ptr + pool * _DIGITS * _BINS, _ordered(key), 0, 0)


@triton.jit(do_not_specialize=["num_tokens", "base"])
def digit_kernel(
    key_ptr,
    histogram_ptr,
    marks_ptr,
    params_ptr,
    num_tokens,
    base,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    MARKS: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """How often each digit at LEVEL occurs among the keys that share the cut's digits before."""
    size = num_tokens * K
    per_pool = tl.cdiv(size, CHUNK)
    pool = tl.program_id(0) // per_pool
    i = tl.program_id(0) % per_pool * CHUNK + tl.arange(0, CHUNK)
    histogram_ptr += pool * _DIGITS * _BINS
    num_valid = _count_valid(marks_ptr, pool, num_tokens, CHUNK, MARKS)
    need = _extra(params_ptr, num_valid, base)
    prefix, _, _ = _descend(histogram_ptr, need, LEVEL)
    key = _ordered(tl.load(key_ptr + pool * size + i, mask=i < size, other=_LOWEST))
    _count_digits(histogram_ptr, key, prefix, LEVEL)


@triton.jit
def _ordered(key):
    """The key as an unsigned number of the same order."""
    return key.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _count_digits(histogram_ptr, ordered, prefix, LEVEL: tl.constexpr):
    """Add the digits at LEVEL of the keys that begin with `prefix`.

    What is in no pool has the lowest key and is counted too: it lies below whatever is needed.
    """
    digit = ((ordered >> (24 - 8 * LEVEL)) & 0xFF).to(tl.int32)
    if LEVEL == 0:
        counts = tl.histogram(digit, _BINS)
    else:
        counts = tl.histogram(digit, _BINS, mask=(ordered >> (32 - 8 * LEVEL)) == prefix)
    bins = tl.arange(0, _BINS)
    tl.atomic_add(histogram_ptr + LEVEL * _BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _descend(histogram_ptr, need, LEVELS: tl.constexpr):
    """The first LEVELS digits of the `need`-th largest key, how many with these digits are needed,
    and how many there are."""
    bins = tl.arange(0, _BINS)
    prefix = tl.full((), 0, tl.uint32)
    has = 0
    for level in tl.static_range(LEVELS):
        count = tl.load(histogram_ptr + level * _BINS + bins)
        reach = tl.cumsum(count, 0, reverse=True)
        digit = tl.maximum(tl.sum((reach >= need).to(tl.int32), 0) - 1, 0)
        has = tl.sum(tl.where(bins == digit, count, 0), 0)
        need -= tl.sum(tl.where(bins == digit, reach - count, 0), 0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    return prefix, need, has


@triton.jit
def _before(key, place, keys, places):
    """How many of `keys` stand before each key: higher, or the same at an earlier place."""
    higher = keys[None, :] > key[:, None]
    earlier = (keys[None, :] == key[:, None]) & (places[None, :] < place[:, None])
    return tl.sum((higher | earlier).to(tl.int32), 1)


@triton.jit
def _count_valid(marks_ptr, pool, num_tokens, CHUNK: tl.constexpr, MARKS: tl.constexpr):
    """The tokens of a pool that are not padding."""
    num_valid = num_tokens
    if MARKS != 0:
        counted = tl.zeros((CHUNK,), dtype=tl.int32)
        for start in range(0, num_tokens, CHUNK):
            i = start + tl.arange(0, CHUNK)
            at = pool * num_tokens + i
            counted += _are_tokens(marks_ptr, at, i < num_tokens, MARKS).to(tl.int32)
        num_valid = tl.sum(counted, 0)
    return num_valid
