from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allocmoe.artifacts import (
    KINDS,
    Artifact,
    Benchmark,
    Context,
    Evaluation,
    LayerActivity,
    ModelInfo,
    Plan,
    Protocol,
    Quality,
    Score,
    Sensitivity,
    TaskEvaluation,
    TaskResult,
    TextInfo,
    Timing,
    TokenRule,
    best_quality,
    load_artifact,
)
from allocmoe.errors import AllocMoEError

GOLDEN = Path(__file__).parent.parent / "golden" / "v1"
GOLDEN_FILES = sorted(GOLDEN.glob("*.json"))

MODEL = ModelInfo("zoë/tiny-moe", None, "olmoe", (4, 3), (16, 8), None)
TEXT = TextInfo("builtin", "ab" * 32, 3, 17)
DELETE = object()


def plan(**changes: Any) -> Plan:
    keys: dict[str, Any] = dict(
        model=MODEL,
        text=None,
        method="uniform",
        layer_budgets=(2.0, 1.0),
        token=TokenRule(),
        budget_asked="3",
        budget=3,
        budget_used=3.0,
        predicted_loss=None,
        normalisation=None,
        context=None,
    )
    return Plan(**keys | changes)


def sensitivity(**changes: Any) -> Sensitivity:
    keys: dict[str, Any] = dict(
        model=MODEL,
        text=TEXT,
        context=Context("paper", (4.0, 3.0), (1.0, 1.0)),
        token=TokenRule("alloc-t", "batch", k_base=0),
        ks=((1.0, 4.0), (1.0, 2.0, 3.0)),
        perplexity=((8.0, 4.0), (4.0, 3.0, 2.0)),
        base_perplexity=2.0,
        seconds=0.1 + 0.2,
    )
    return Sensitivity(**keys | changes)


def evaluation() -> Evaluation:
    row = Quality("a", "naee", "naee", 3.5, 9.1, 0.1, 1e-7, 0.9, 3.4, (2.4, 1.0), (6.5, 3.0))
    return Evaluation(model=MODEL, text=TEXT, batch_size=2, rows=(row, replace(row, name="ß")))


ARTIFACTS = {
    "plan": plan(),
    "plan with thresholds": plan(
        text=TEXT,
        method="alloc-t",
        layer_budgets=(1 / 3, 2.5),
        token=TokenRule("alloc-t", "threshold", 1, (0.1, -1.0), 2),
        budget_used=1 / 3 + 2.5,
        predicted_loss=-1e-9,
        normalisation="relative",
        context="around",
    ),
    "sensitivity": sensitivity(),
    "evaluation": evaluation(),
    "task evaluation": replace(TaskEvaluation.load(GOLDEN / "task-evaluation.json"), limit=None),
    "benchmark": replace(Benchmark.load(GOLDEN / "benchmark.json"), command=None, text=None),
}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_round_trip_gives_an_equal_object(name: str, tmp_path: Path) -> None:
    artifact, path = ARTIFACTS[name], tmp_path / "new folder" / "artifact.json"
    artifact.save(path)
    assert type(artifact).load(path) == artifact
    assert load_artifact(path) == artifact
    assert [file.name for file in path.parent.iterdir()] == ["artifact.json"]


def test_golden_files_cover_every_kind() -> None:
    kinds = [json.loads(path.read_text())["kind"] for path in GOLDEN_FILES]
    assert sorted(kinds) == sorted(KINDS)


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_golden_file_loads_and_encodes_to_the_same_data(path: Path) -> None:
    data = json.loads(path.read_text())
    artifact = load_artifact(path)
    assert type(artifact) is KINDS[data["kind"]]
    later = {Sensitivity: {"dtype": None, "batch_size": None}, Plan: {"threshold_text": None}}
    assert artifact.to_json() == later.get(type(artifact), {}) | data


# --- what is refused ---------------------------------------------------------------------------


def changed(name: str, place: tuple[str | int, ...], value: Any) -> Any:
    """The golden file's data with `value` at `place`, or without that key."""
    data = json.loads((GOLDEN / f"{name}.json").read_text())
    target = data
    for step in place[:-1]:
        target = target[step]
    if value is DELETE:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    return data


def refusal(cls: type[Artifact], path: Path) -> str:
    """The message with which both ways to load refuse the file: one line that names the file."""
    with pytest.raises(AllocMoEError) as caught:
        cls.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    with pytest.raises(AllocMoEError):
        load_artifact(path)
    return message.removeprefix(f"{path}: ")


NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[str, tuple[str | int, ...], Any, str]] = [
    # unknown and missing keys
    ("plan", ("budgets",), 1, "unknown key 'budgets'"),
    ("plan", ("token", "top_p"), 0.5, "token: unknown key 'top_p'"),
    ("plan", ("model", "dtype"), "bf16", "model: unknown key 'dtype'"),
    ("evaluation", ("rows", 1, "score"), 1.0, "rows[1]: unknown key 'score'"),
    ("plan", ("layer_budgets",), DELETE, "the key 'layer_budgets' is missing"),
    ("plan", ("token", "scope"), DELETE, "token: the key 'scope' is missing"),
    ("sensitivity", ("context", "after"), DELETE, "context: the key 'after' is missing"),
    ("sensitivity", ("created",), DELETE, "the key 'created' is missing"),
    ("evaluation", ("rows", 0, "kl"), DELETE, "rows[0]: the key 'kl' is missing"),
    ("benchmark", ("rows", 0, "decode", "energy"), 1.0, "rows[0]: decode: unknown key 'energy'"),
    ("benchmark", ("random_weights",), DELETE, "the key 'random_weights' is missing"),
    ("task-evaluation", ("rows", 0, "tasks", 1, "seconds"), 1.0, "rows[0]: tasks[1]: unknown key"),
    ("task-evaluation", ("limit",), DELETE, "the key 'limit' is missing"),
    # wrong types
    ("task-evaluation", ("rows", 1, "tasks", 0, "shots"), "0", "rows[1]: tasks[0]: shots: expec"),
    (
        "task-evaluation",
        ("rows", 0, "tasks", 0, "scores", "acc", "value"),
        "high",
        "rows[0]: tasks[0]: scores.acc: value: expected float",
    ),
    ("benchmark", ("random_weights",), 1, "random_weights: expected bool"),
    ("benchmark", ("machine", "gpu"), 1, "machine: gpu: expected str"),
    ("benchmark", ("protocol", "prompt_lengths"), 32, "protocol: prompt_lengths: expected a list"),
    ("plan", ("budget",), "4", "budget: expected int"),
    ("plan", ("budget",), True, "budget: expected int"),
    ("plan", ("budget",), 4.0, "budget: expected int"),
    ("plan", ("budget_used",), "3.5", "budget_used: expected float"),
    ("plan", ("budget_used",), True, "budget_used: expected float"),
    ("plan", ("layer_budgets", 1), None, "layer_budgets[1]: expected float"),
    ("plan", ("layer_budgets",), 2.5, "layer_budgets: expected a list"),
    ("plan", ("layer_budgets",), {"0": 2.5}, "layer_budgets: expected a list"),
    ("plan", ("model",), None, "model: expected an object"),
    ("plan", ("model", "k_orig", 0), False, "model: k_orig[0]: expected int"),
    ("plan", ("model", "id"), 7, "model: id: expected str"),
    ("plan", ("versions",), ["torch"], "versions: expected an object"),
    ("plan", ("versions", "torch"), 2.10, "versions.torch: expected str"),
    ("plan", ("token", "rule"), "top-p", "token: rule: 'top-p' is not one of"),
    ("plan", ("token", "rule"), [], "token: rule: [] is not one of"),
    ("plan", ("method",), None, "method: None is not one of"),
    ("sensitivity", ("perplexity", 1, 2), "10", "perplexity[1][2]: expected float"),
    ("evaluation", ("rows",), {}, "rows: expected a list"),
    ("evaluation", ("rows", 0), 1, "rows[0]: expected an object"),
    ("evaluation", ("batch_size",), False, "batch_size: expected int"),
    # numbers that are none
    ("plan", ("predicted_loss",), NAN, "predicted_loss: nan is not a finite number"),
    ("plan", ("token", "thresholds", 1), -INF, "token: thresholds[1]: -inf is not a finite"),
    ("sensitivity", ("perplexity", 0, 1), INF, "perplexity[0][1]: inf is not a finite number"),
    ("evaluation", ("rows", 0, "kl"), NAN, "rows[0]: kl: nan is not a finite number"),
    ("plan", ("budget",), NAN, "budget: expected int"),
    # another kind, another version
    ("plan", ("kind",), "allocmoe.recipe", "kind is 'allocmoe.recipe', expected 'allocmoe.plan'"),
    ("plan", ("kind",), DELETE, "kind is None, expected 'allocmoe.plan'"),
    ("plan", ("schema_version",), 2, "schema_version is 2"),
    ("evaluation", ("schema_version",), 0, "schema_version is 0"),
    ("sensitivity", ("schema_version",), "1", "schema_version is '1'"),
    ("sensitivity", ("schema_version",), DELETE, "schema_version is None"),
    # benchmarks that cannot be
    ("benchmark", ("rows",), [], "rows is empty"),
    ("benchmark", ("rows", 2, "prefill"), [], "alloc-t@4 was prefilled at [], not at [32]"),
    ("benchmark", ("protocol", "runs"), 0, "protocol: runs must be 1 or more, not 0"),
    # task evaluations that cannot be
    ("task-evaluation", ("rows",), [], "rows is empty"),
    ("task-evaluation", ("rows", 1, "tasks"), [], "plan and unmodified ran different tasks"),
    ("task-evaluation", ("rows", 0, "tasks", 0, "scores"), {}, "rows[0]: tasks[0]: the task arc_"),
    # plans that cannot be
    ("plan", ("layer_budgets",), [3.5], "layer_budgets has 1 entries for 2 MoE layers"),
    ("plan", ("layer_budgets",), [2.5, 0.5, 0.5], "layer_budgets has 3 entries for 2 MoE layers"),
    ("plan", ("layer_budgets", 0), 4.25, "layer_budgets[0] is 4.25, outside 0..4"),
    ("plan", ("layer_budgets", 1), 0, "layer_budgets[1] is 0.0, outside 0..3"),
    ("plan", ("layer_budgets", 1), -1.0, "layer_budgets[1] is -1.0, outside 0..3"),
    ("plan", ("token", "thresholds"), [0.5], "token.thresholds has 1 entries for 2 MoE layers"),
    ("plan", ("token", "thresholds"), None, "token: the rule alloc-t/threshold needs thresholds"),
    ("plan", ("token", "scope"), "batch", "token: the rule alloc-t/batch takes no thresholds"),
    ("plan", ("token", "scope"), None, "token: the rule alloc-t and the scope None do not go"),
    ("plan", ("token", "rule"), "naee", "token: the rule naee and the scope threshold do not go"),
    ("plan", ("token", "rule"), "none", "token: the rule none and the scope threshold do not go"),
    ("plan", ("token", "k_base"), -1, "token: k_base must be 0 or more, not -1"),
    ("plan", ("token", "renormalise_over"), 0, "token: renormalise_over must be 1 or more"),
    ("plan", ("budget",), 3, "budget_used 3.5 exceeds the budget 3"),
    ("plan", ("budget_used",), 3.75, "budget_used is not the sum of layer_budgets"),
    # sensitivities that cannot be
    ("sensitivity", ("ks",), [[4.0]], "ks has 1 rows for 2 MoE layers"),
    ("sensitivity", ("perplexity",), [], "perplexity has 0 rows for 2 MoE layers"),
    ("sensitivity", ("ks", 1), [1.0, 3.0], "ks and perplexity differ in length in MoE layer 1"),
    ("sensitivity", ("ks", 0), [2.0, 1.0, 4.0], "ks of MoE layer 0 must rise to its k_orig"),
    ("sensitivity", ("ks", 0), [2.0, 2.0, 4.0], "ks of MoE layer 0 must rise to its k_orig"),
    ("sensitivity", ("ks", 1), [1.0, 2.0, 4.0], "ks of MoE layer 1 must rise to its k_orig"),
    ("sensitivity", ("perplexity", 1, 0), 0, "a perplexity of MoE layer 1 is not positive"),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), REFUSED)
def test_an_invalid_file_is_refused_by_name_and_place(
    name: str, place: tuple[str | int, ...], value: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(changed(name, place, value)))
    cls = KINDS[f"allocmoe.{name}"]
    assert refusal(cls, path).startswith(message)


@pytest.mark.parametrize("rule", ["naee", "dynamic-moe"])
def test_a_rule_without_scope_needs_thresholds(rule: Any) -> None:
    TokenRule(rule, thresholds=(0.5, 0.5))
    with pytest.raises(AllocMoEError, match=f"the rule {rule} needs thresholds"):
        TokenRule(rule)
    with pytest.raises(AllocMoEError, match="do not go together"):
        TokenRule(rule, "sequence", thresholds=(0.5, 0.5))


def test_a_fractional_layer_budget_needs_a_token_rule() -> None:
    fractions = dict(layer_budgets=(1.5, 1.5), budget_used=3.0)
    plan(**fractions, token=TokenRule("alloc-t", "sequence"))
    with pytest.raises(AllocMoEError, match=r"layer_budgets\[0\] is 1.5: without a token rule"):
        plan(**fractions)
    with pytest.raises(AllocMoEError, match="the rule none takes no thresholds"):
        TokenRule(thresholds=(0.5, 0.5))


def test_a_kind_is_not_loaded_as_another(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    with pytest.raises(AllocMoEError, match=r"kind is 'allocmoe\.plan', expected 'allocmoe\.sens"):
        Sensitivity.load(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    whole = path.read_bytes()
    assert "ë".encode() in whole  # a cut inside a character, too
    for size in range(len(whole) - 1):  # the last byte is a newline
        path.write_bytes(whole[:size])
        refusal(Plan, path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04\xff\xfe", b"[]", b"null", b"3", b"{} {}"])
def test_a_file_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(content)
    refusal(Plan, path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(Plan, tmp_path / "none.json") == "no such file"
    assert refusal(Plan, tmp_path).startswith("cannot be read")


# --- plans and models --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (dict(family="mixtral"), "family olmoe, here mixtral"),
        (dict(k_orig=(4,), num_experts=(16,)), "2 MoE layers, here 1"),
        (dict(k_orig=(4, 2)), "k_orig 3 in MoE layer 1, here 2"),
        (dict(num_experts=(32, 8)), "num_experts 16 in MoE layer 0, here 32"),
    ],
)
def test_a_plan_names_what_does_not_fit(changes: dict[str, Any], difference: str) -> None:
    other = replace(MODEL, id="other/model", **changes)
    assert MODEL.difference(other) == difference
    with pytest.raises(AllocMoEError) as caught:
        plan().check_fits(other)
    for word in (MODEL.id, other.id, difference):
        assert word in str(caught.value)


def test_a_plan_fits_the_same_architecture_with_other_weights() -> None:
    other = replace(MODEL, id="elsewhere", revision="1", fingerprint="f")
    assert MODEL.difference(other) is None
    plan().check_fits(other)


# --- saving is atomic --------------------------------------------------------------------------


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_in_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def fdopen(handle: int, *args: Any, **kwargs: Any) -> FullDisk:
        os.close(handle)
        return FullDisk()

    monkeypatch.setattr(os, "fdopen", fdopen)


def fail_in_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", no_space)


@pytest.mark.parametrize("fail", [fail_in_write, fail_in_replace])
def test_a_failed_save_leaves_the_old_file_whole(
    fail: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    before = path.read_bytes()
    fail(monkeypatch)
    with pytest.raises(AllocMoEError, match=r"plan\.json: cannot be written: No space left"):
        plan(budget=7).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_saving_under_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AllocMoEError, match=r"plan\.json: cannot be written"):
        plan().save(tmp_path / "file" / "plan.json")


# --- numbers -----------------------------------------------------------------------------------


def test_the_three_normalisations_on_hand_numbers() -> None:
    s = sensitivity()
    assert s.cost("raw") == [[4, 0], [2, 1, 0]]
    assert s.cost("relative") == [[1, 0], [1, 0.5, 0]]
    log = [[math.log(2), 0], [math.log(2), math.log(1.5), 0]]
    for row, expected in zip(s.cost("log"), log, strict=True):
        assert row == pytest.approx(expected, abs=1e-15)
    assert s.cost() == s.cost("log")


def test_the_log_cost_of_ones_telescopes_in_the_papers_context() -> None:
    # S[l, k_orig] == S[l+1, 1], so the column k=1 adds up to all-ones against the original
    edges = [97.0, 31.0, 29.5, 30.5, 11.0]
    s = sensitivity(
        model=replace(MODEL, k_orig=(4,) * 4, num_experts=(8,) * 4),
        context=Context("paper", (4.0,) * 4, (1.0,) * 4),
        ks=((1.0, 2.0, 4.0),) * 4,
        perplexity=tuple((a, 50.0, b) for a, b in itertools.pairwise(edges)),
    )
    ones = sum(row[0] for row in s.cost("log"))
    assert ones == pytest.approx(math.log(97) - math.log(11), rel=1e-12)


def test_a_timing_tells_the_spread_of_its_runs() -> None:
    assert Timing.of([3.0, 1.0, 2.0, 9.0]) == Timing(2.5, 1.0, 9.0, (3.0, 1.0, 2.0, 9.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(batch_size=0), "batch_size must be 1 or more, not 0"),
        (dict(prompt_lengths=()), "prompt_lengths must be 2 or more, not 0"),
        (dict(prompt_lengths=(32, 1)), "prompt_lengths must be 2 or more, not 1"),
        (dict(prompt_lengths=(8, 8)), "given twice"),
        (dict(decode_tokens=0), "decode_tokens must be 1 or more, not 0"),
        (dict(warmups=-1), "warmups must be 0 or more, not -1"),
    ],
)
def test_a_protocol_that_measures_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    assert Protocol() == Protocol(8, (32,), 128, 5, 10, 0)
    with pytest.raises(AllocMoEError, match=words):
        Protocol(**changes)


def test_activities_add_up_and_give_means() -> None:
    one = LayerActivity(10, 25, 3, 12, 2, 40, 8)
    both = one + LayerActivity(30, 55, 0, 8, 2, 20, 4)
    assert both == LayerActivity(40, 80, 3, 20, 4, 60, 12)
    assert (both.mean, both.distinct_per_forward, both.distinct_per_step) == (2, 5, 5)
    idle = LayerActivity(0, 0, 0, 0, 0, 0, 0)
    assert (idle.mean, idle.distinct_per_forward, idle.distinct_per_step) == (0, 0, 0)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": [], "schema_version": 1}',
        '{"kind": "allocmoe.plan", "kind": "allocmoe.plan"}',
        '{"kind": "allocmoe.plan", "schema_version": true}',
        "[" * 200_000,
        "1" * 5000,
    ],
)
def test_odd_files_are_refused_too(tmp_path: Path, text: str) -> None:
    file = tmp_path / "odd.json"
    file.write_text(text)
    with pytest.raises(AllocMoEError, match=r"odd\.json"):
        load_artifact(file)


def test_a_model_needs_as_many_experts_counts_as_layers() -> None:
    with pytest.raises(AllocMoEError, match="num_experts 1"):
        replace(MODEL, num_experts=(8,))
    with pytest.raises(AllocMoEError, match="k_orig 9 of 8"):
        replace(MODEL, k_orig=(9,) * len(MODEL.k_orig), num_experts=(8,) * len(MODEL.k_orig))


@pytest.mark.parametrize(
    ("names", "main"),
    [
        (["acc", "acc_norm"], "acc_norm"),
        (["perplexity", "acc"], "acc"),
        (["f1", "exact_match,strict-match", "exact_match,flexible"], "exact_match,strict-match"),
        (["word_perplexity", "byte_perplexity"], "word_perplexity"),
    ],
)
def test_the_main_metric_of_a_task(names: list[str], main: str) -> None:
    scores = {name: Score(1.0, None, None) for name in names}
    assert TaskResult("task", 1, 0, scores, 2.0, (1.0, 1.0)).main == main


def test_the_best_quality_keeps_the_budget() -> None:
    def row(name: str, perplexity: float, realised: float) -> Quality:
        return Quality(name, "naee", "naee", 24, perplexity, 0.1, 0.1, 0.9, realised, (), ())

    over, keeps, worse = row("over", 9.0, 30.2), row("keeps", 9.5, 24.05), row("worse", 9.9, 23.0)
    assert best_quality([over, keeps, worse]) is keeps
    assert best_quality([over, row("least", 9.8, 24.3)]).name == "least"
