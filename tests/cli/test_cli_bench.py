"""`allocmoe bench`: which plans it times, on which model, and what it says about them."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from cli_runner import fail, succeed

from allocmoe.artifacts import Benchmark, Protocol
from allocmoe.models.shapes import SHAPES

QUICK = ("--batch-size", "2", "--prompt", "6", "--decode", "2", "--warmups", "0", "--runs", "1")


def names(ran: Any) -> list[str]:
    return [row["name"] for row in ran.json["rows"]]


def timed(*plans: str) -> list[str]:
    return ["unmodified", *plans]


def reads_weights(*args: object, **kwargs: object) -> None:
    raise AssertionError("weights are read although the command cannot succeed")


@pytest.fixture
def small_olmoe(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_attention_heads=2)
    family, settings = SHAPES["olmoe"]
    small = settings | cut | {"num_key_value_heads": 2}
    monkeypatch.setitem(SHAPES, "olmoe", (family, small))


def test_prints_what_it_writes(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "bench.json"
    words = ["bench", model, *QUICK, "--prompt", "6,9", "--seed", "3", "-o", file, "--json"]
    ran = succeed(*words)
    written = Benchmark.load(file)
    assert ran.json == json.loads(file.read_text()) == written.to_json()
    assert names(ran) == timed("uniform@8", "alloc-t@8")
    assert written.protocol == Protocol(2, (6, 9), 2, 0, 1, 3)
    assert written.command == shlex.join(["allocmoe", *map(str, words)])
    assert written.machine.processor
    assert not written.random_weights
    for row in written.rows:
        assert row.name in ran.err
    assert "routes less evenly" not in ran.err
    assert "experts: the routed experts of all layers alone; rest: all else" in ran.err
    assert "tokens/s" in succeed("inspect", file).err


def test_writes_nothing_unless_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert succeed("bench", model, *QUICK).out == ""
    assert list(tmp_path.iterdir()) == []


def test_plans_from_files_and_methods(model: Path, plan: Path, falling_sensitivity: Path) -> None:
    alone = succeed("bench", model, *QUICK, "--plan", plan, "--json")
    assert names(alone) == timed("uniform")
    source = ["--methods", "alloc-moe,naee", "--budgets", "75%,8"]
    source += ["--sensitivity", falling_sensitivity, "--plan", plan]
    both = succeed("bench", model, *QUICK, *source, "--json")
    made = [f"{method}@{budget}" for budget in (12, 8) for method in ("alloc-moe", "naee")]
    assert names(both) == timed("uniform", *made)
    budgets = succeed("bench", model, *QUICK, "--budget", "25%", "--json")
    assert names(budgets) == timed("uniform@4", "alloc-t@4")


def test_thresholds_are_calibrated_on_random_tokens(model: Path) -> None:
    rule = ["--methods", "alloc-t", "--scope", "threshold"]
    rows = succeed("bench", model, *QUICK, *rule, "--json").json["rows"]
    assert rows[1]["token"] == "alloc-t/threshold"
    assert all(0 < k < 4 for k in rows[1]["decode"]["realised_per_layer"])


def test_needs_no_tokenizer(model: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    succeed("bench", bare, *QUICK)


@pytest.mark.usefixtures("small_olmoe")
def test_a_shape_has_random_weights_and_says_so() -> None:
    ran = succeed("bench", "--shape", "olmoe", "--layers", "2", *QUICK, "--json")
    assert ran.json["random_weights"] is True
    assert ran.json["model"]["id"] == "olmoe, 2 layers"
    assert ran.json["dtype"] == "bfloat16"
    assert "The weights are random: a trained model routes less evenly." in " ".join(
        ran.err.split()
    )
    other = succeed("bench", "--shape", "olmoe", "--layers", "2", *QUICK, "--dtype", "float32")
    assert "float32" in other.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a MODEL or a --shape"),
        (["MODEL", "--shape", "olmoe"], "give a MODEL or a --shape"),
        (["MODEL", "--layers", "2"], "--layers goes with a --shape"),
        (["--shape", "gpt-9"], "unknown shape 'gpt-9'"),
        (["MODEL", "--methods", "magic"], "unknown method 'magic'"),
        (["MODEL", "--methods", "alloc-moe"], "alloc-moe needs a --sensitivity"),
        (["MODEL", "--budgets", "17"], "4..16 in total"),
        (["MODEL", "--batch-size", "0"], "batch_size must be 1 or more"),
        (["MODEL", "--prompt", "1"], "prompt_lengths must be 2 or more"),
        (["MODEL", "--prompt", "many"], "expected numbers"),
        (["MODEL", "--prompt", "8.5"], "expected whole numbers"),
        (["MODEL", "--decode", "0"], "decode_tokens must be 1 or more"),
        (["MODEL", "--runs", "0"], "runs must be 1 or more"),
        (["MODEL", "--experts", "magic"], "--experts"),
    ],
)
def test_one_line_before_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", reads_weights)
    asked = [model if word == "MODEL" else word for word in words]
    assert message in fail("bench", *asked)


def test_a_method_and_a_file_of_one_name(model: Path, plan: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copy(plan, tmp_path / "uniform@8.json"))
    options = ["--plan", twin, "--methods", "uniform"]
    assert "the same name uniform@8" in fail("bench", model, *QUICK, *options)


def test_tune_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA device" in fail("tune", "--shape", "olmoe", "--device", "cpu")
    assert "give a MODEL or a --shape" in fail("tune")
    shape = ("tune", "--shape", "olmoe", "--device", "cpu")
    assert "cannot be written" in fail(*shape, "-o", "/dev/null/blocks.json")
    assert "from 1 on" in fail(*shape, "--tokens=-4")
    assert "from 1 on" in fail("bench", "--shape", "olmoe", "--prompt", "1e300")
    assert "from 0 on" in fail("bench", "--shape", "olmoe", "--seed", "9" * 23)
    kept = tmp_path / "blocks.json"
    kept.write_text("{}")
    monkeypatch.setenv("ALLOCMOE_BLOCKS", str(kept))
    assert "tune again" in fail("tune", "--shape", "olmoe", "--device", "cpu")
