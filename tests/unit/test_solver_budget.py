from __future__ import annotations

import re

import pytest

from allocmoe.errors import AllocMoEError
from allocmoe.solver import parse_budget

DEEPSEEK = [6] * 26


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (78, 78),
        (78.0, 78),
        (78.9, 78),
        ("78", 78),
        (" 78 ", 78),
        ("78.9", 78),
        ("7.8e1", 78),
        ("50%", 78),
        ("50 %", 78),
        ("33.4%", 52),
        ("100%", 156),
        ("3/layer", 78),
        ("3.5/layer", 91),
        ("3.5 / layer", 91),
        ("1/layer", 26),
        (26, 26),
        (156, 156),
    ],
)
def test_reads_every_form(text: str | float, expected: int) -> None:
    result = parse_budget(text, DEEPSEEK)
    assert result == expected
    assert type(result) is int


def test_float_noise_does_not_lose_an_activation() -> None:
    assert 29 / 100 * 100 < 29
    assert parse_budget("29%", [4] * 25) == 29


def test_share_refers_to_each_layers_own_top_k() -> None:
    assert parse_budget("50%", [2, 4, 8]) == 7
    assert parse_budget("2/layer", [2, 4, 8]) == 6


@pytest.mark.parametrize("text", [25, 157, 156.5, -78, "25", "-78", "10%", "101%", "0.9/layer"])
def test_out_of_range_states_the_range_in_all_forms(text: str | float) -> None:
    with pytest.raises(AllocMoEError) as error:
        parse_budget(text, DEEPSEEK)
    message = str(error.value)
    assert str(text) in message
    assert "26..156 in total, 16.67%..100%, 1/layer..6/layer" in message
    assert "\n" not in message


@pytest.mark.parametrize("k_orig", [[6] * 26, [3] * 7, [7] * 9, [2, 4, 8], [1, 1], [5, 5, 6]])
def test_the_stated_range_is_itself_feasible(k_orig: list[int]) -> None:
    with pytest.raises(AllocMoEError) as error:
        parse_budget(0, k_orig)
    stated = str(error.value).split("feasible are")[1]
    ends = re.findall(r"\d+(?:\.\d+)?(?:%|/layer)?", stated)
    assert len(ends) == 6
    for end in ends:
        assert len(k_orig) <= parse_budget(end, k_orig) <= sum(k_orig)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "1e999"])
def test_not_finite(value: str | float) -> None:
    with pytest.raises(AllocMoEError, match="out of range"):
        parse_budget(value, DEEPSEEK)


@pytest.mark.parametrize("text", ["", "half", "nan", "50%%", "3/0", "3 per layer", "1,5", "78\n9"])
def test_garbage_names_the_forms(text: str) -> None:
    with pytest.raises(AllocMoEError) as error:
        parse_budget(text, DEEPSEEK)
    assert all(form in str(error.value) for form in (repr(text), '"78"', '"50%"', '"3.5/layer"'))


@pytest.mark.parametrize("k_orig", [[], [4, 0]])
def test_bad_k_orig(k_orig: list[int]) -> None:
    with pytest.raises(AllocMoEError, match="k_orig"):
        parse_budget(4, k_orig)
