from __future__ import annotations

from typing import Any

import pytest
import torch

from allocmoe.errors import AllocMoEError
from allocmoe.runtime.step import Step, read_step

# two sequences of five tokens, the first with two tokens of padding on the left
PADDED = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
VALID = [False, False, True, True, True] + [True] * 5
IDS = torch.arange(10).view(2, 5)

# the causal mask of the padded sequence, query by query; padding sees nothing and is not seen
FIRST = [
    [0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [0, 0, 1, 0, 0],
    [0, 0, 1, 1, 0],
    [0, 0, 1, 1, 1],
]
SECOND = [
    [1, 0, 0, 0, 0],
    [1, 1, 0, 0, 0],
    [1, 1, 1, 0, 0],
    [1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1],
]
CAUSAL = torch.tensor([[FIRST], [SECOND]], dtype=torch.bool)  # [2, 1, 5, 5]
UNUSED = torch.zeros(2, 1, 5, 3, dtype=torch.bool)  # columns of a static cache, not written yet


class Cache:
    """As much of a cache as is asked of it; a static one counts on the device."""

    def __init__(self, length: int | torch.Tensor) -> None:
        self.length = length

    def get_seq_length(self) -> int | torch.Tensor:
        return self.length


def additive(mask: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def check(step: Step, num_sequences: int, valid: list[bool]) -> None:
    assert step.num_sequences == num_sequences
    assert step.valid_T is not None
    assert step.valid_T.dtype == torch.bool
    assert step.valid_T.tolist() == valid
    assert step.num_valid == sum(valid)


@pytest.mark.parametrize("mask", [{}, {"attention_mask": None}, {"attention_mask": {"full": None}}])
def test_without_a_mask_every_token_counts(mask: dict[str, Any]) -> None:
    assert read_step((), {"input_ids": IDS, **mask}) == Step(2, None)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_a_2d_mask(dtype: torch.dtype) -> None:
    mask = torch.tensor(PADDED).to(dtype)
    check(read_step((), {"input_ids": IDS, "attention_mask": mask}), 2, VALID)


def test_a_2d_mask_ends_with_the_columns_of_this_forward() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    one = {"input_ids": torch.tensor([[7], [8]]), "attention_mask": mask}
    check(read_step((), one | {"past_key_values": Cache(4)}), 2, [False, True])
    two = {"input_ids": torch.tensor([[6, 7], [7, 8]]), "attention_mask": mask}
    check(read_step((), two | {"past_key_values": Cache(3)}), 2, [True, False, True, True])


MASKS_4D = {
    "bool": CAUSAL,
    "float32": additive(CAUSAL),
    "bfloat16": additive(CAUSAL, torch.bfloat16),
    "minus infinity": torch.zeros(CAUSAL.shape).masked_fill(~CAUSAL, float("-inf")),
    "two heads": CAUSAL.expand(2, 2, 5, 5),
}


@pytest.mark.parametrize("name", MASKS_4D)
def test_a_4d_mask(name: str) -> None:
    check(read_step((), {"input_ids": IDS, "attention_mask": MASKS_4D[name]}), 2, VALID)


@pytest.mark.parametrize("form", [lambda mask: mask, additive])
@pytest.mark.parametrize("length", [int, torch.tensor])
def test_a_4d_mask_over_a_static_cache(form: Any, length: Any) -> None:
    # the prompt: five tokens, eight columns
    mask = form(torch.cat([CAUSAL, UNUSED], dim=3))
    prompt = {"input_ids": IDS, "attention_mask": mask, "past_key_values": Cache(length(0))}
    check(read_step((), prompt), 2, VALID)
    # then one token, written to column 5; the second sequence has ended
    sees = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    decode = {"input_ids": torch.tensor([[7], [0]]), "attention_mask": form(sees[:, None, None])}
    check(read_step((), decode | {"past_key_values": Cache(length(5))}), 2, [True, False])


def test_a_4d_mask_of_a_sliding_window() -> None:
    window = torch.ones(5, 5, dtype=torch.bool).triu(-1)  # a query sees itself and one before
    check(read_step((), {"input_ids": IDS, "attention_mask": CAUSAL & window}), 2, VALID)


@pytest.mark.parametrize(
    "masks",
    [
        {"full_attention": CAUSAL, "sliding_attention": torch.ones(2, 1, 5, 5, dtype=torch.bool)},
        {"sliding_attention": torch.ones(2, 1, 5, 5, dtype=torch.bool), "full_attention": CAUSAL},
        {"sliding_attention": additive(CAUSAL)},
        {"full_attention": None, "sliding_attention": CAUSAL},
        {"linear_attention": None, "full_attention": torch.tensor(PADDED)},
    ],
)
def test_masks_for_several_kinds_of_attention(masks: dict[str, Any]) -> None:
    check(read_step((), {"input_ids": IDS, "attention_mask": masks}), 2, VALID)


def test_one_mask_for_all_sequences() -> None:
    check(read_step((), {"input_ids": IDS, "attention_mask": CAUSAL[:1]}), 2, VALID[:5] * 2)


def test_embeddings_instead_of_ids() -> None:
    embeds = torch.zeros(2, 5, 8)
    mask = torch.tensor(PADDED)
    for kwargs in ({}, {"input_ids": None}):
        check(read_step((), kwargs | {"inputs_embeds": embeds, "attention_mask": mask}), 2, VALID)
    assert read_step((), {"inputs_embeds": embeds}) == Step(2)


def test_positional_arguments() -> None:
    mask = torch.tensor(PADDED)
    check(read_step((IDS, mask), {}), 2, VALID)
    check(read_step((IDS,), {"attention_mask": mask}), 2, VALID)
    check(read_step((None, mask), {"inputs_embeds": torch.zeros(2, 5, 8)}), 2, VALID)
    assert read_step((IDS,), {}) == Step(2)
    assert read_step((IDS, None), {}) == Step(2)


def test_all_padding() -> None:
    check(read_step((), {"input_ids": IDS, "attention_mask": torch.zeros(2, 5)}), 2, [False] * 10)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(AllocMoEError, match="without input_ids and without inputs_embeds"):
        read_step((), {"attention_mask": torch.tensor(PADDED)})

    class BlockMask:
        pass

    for mask in (BlockMask(), {"full_attention": BlockMask()}):
        with pytest.raises(AllocMoEError, match=r"type BlockMask; .* attn_implementation"):
            read_step((), {"input_ids": IDS, "attention_mask": mask})


def test_a_full_static_sliding_window_keeps_the_newest_column() -> None:
    class Cache:
        def get_seq_length(self) -> int:
            return 9

    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    kwargs = {"input_ids": torch.ones(2, 1), "attention_mask": mask, "past_key_values": Cache()}
    assert read_step((), kwargs).num_valid == 2
