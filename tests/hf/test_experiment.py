"""Experiments: which cells there are, and that a stop loses at most the one at hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from allocmoe.artifacts import ModelInfo
from allocmoe.errors import AllocMoEError
from allocmoe.experiment.grid import Cell, Grid, PlanName, make_grid, own_budgets, plans_of
from allocmoe.experiment.run import Agenda, _gpus_each, run_grid
from allocmoe.experiment.settings import Settings, load_settings
from allocmoe.experiment.store import Store
from allocmoe.experiment.worker import Job, Worker
from allocmoe.models import inspect_model
from allocmoe.models.load import load_model, load_tokenizer
from tiny_experiment import write_experiment

MODELS = {"deepseek-v2-lite": (26, 6, 64), "qwen1.5-moe": (24, 4, 60), "olmoe": (16, 8, 64)}


def info_of(layers: int, k: int, experts: int) -> ModelInfo:
    return ModelInfo("m", None, "olmoe", (k,) * layers, (experts,) * layers, None)


@pytest.fixture(scope="module")
def reference() -> ModelInfo:
    return inspect_model(load_model("reference")).info


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(str(write_experiment(tmp_path)))


@pytest.fixture
def start(tmp_path: Path, settings: Settings, reference: ModelInfo) -> Callable[..., Any]:
    """A job, its grid without tasks, and its store."""

    def make(
        name: str = "out", weights: str = "reference", **changes: Any
    ) -> tuple[Job, Grid, Store]:
        job = Job(settings, "one", weights, threads=1, **changes)
        grid = make_grid(settings, settings.model("one"), reference, [])
        return job, grid, Store.open(tmp_path / name, job)

    return make


def results(store: Store, grid: Grid) -> dict[str, Any]:
    """What was measured, without when and how long."""
    found = json.loads(json.dumps(Agenda(grid, store).results))
    for result in found.values():
        for key in ("created", "seconds"):
            result.pop(key, None)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_settings_are_the_papers(name: str) -> None:
    settings = load_settings("paper")
    model, (layers, k, _) = settings.model(name), MODELS[name]
    assert model.full == layers * k
    assert model.half == model.full // 2
    assert [len(group) for group in settings.tasks.groups.values()] == [7, 11, 3]
    for rows in (model.published.ablation, model.published.k_base, model.published.calibration):
        assert all(len(row) == len(model.budgets) for row in rows.values())
    assert len(model.published.k_base) == k
    exact = {task.task for task in settings.tasks.all() if task.metric == "exact_match"}
    assert len(exact) == 3
    assert any(name.startswith("acp") for name in exact)
    assert {"bbh", "gsm8k"} <= exact


def test_budgets_are_the_same_share_of_any_model() -> None:
    model = load_settings("paper").model("deepseek-v2-lite")
    assert [*own_budgets(model, info_of(26, 6, 64)).values()] == [130, 104, 78, 52]
    assert [*own_budgets(model, info_of(8, 6, 24)).values()] == [40, 32, 24, 16]
    with pytest.raises(AllocMoEError, match="too few activations"):
        own_budgets(model, info_of(1, 2, 4))
    with pytest.raises(AllocMoEError, match=r"52 of 156 is 13 of m's 40 .* 20 MoE layers need one"):
        own_budgets(model, info_of(20, 2, 4))


def test_every_cell_comes_after_what_it_needs() -> None:
    settings = replace(load_settings("paper"), seeds=3)
    tasks = [task.task for task in settings.tasks.all()]
    grid = make_grid(settings, settings.model("olmoe"), info_of(16, 8, 64), tasks)
    seen: set[str] = set()
    for cell in grid.cells:
        assert cell.id not in seen
        assert seen.issuperset(cell.needs)
        seen.add(cell.id)
    counts = grid.counts()
    # three texts of seed 0, and the main one of the other seeds
    assert counts["profile"] == 5
    # 9 methods, of which 4 depend on the text; 7 more k_base; 2 more texts
    assert counts["plan"] == 4 * (9 + 2 * 4 + 7 + 2)
    assert counts["text"] == 3 * 2 * 4
    assert counts["task"] == 21 * (1 + 4 * (9 + 7 + 2))
    assert counts["analysis"] == 3
    assert counts["speed"] == 1
    assert {plan.method for plan in plans_of(grid.plans, 2)} == {*settings.methods}
    both = replace(settings.calibration, contexts=("paper", "single"))
    wider = make_grid(
        replace(settings, calibration=both), settings.model("olmoe"), info_of(16, 8, 64), tasks
    ).counts()
    # the two methods that need a profile, for every seed
    assert wider["profile"] == counts["profile"] + 3
    assert wider["plan"] == counts["plan"] + 4 * 3 * 2
    # tasks are run under seed 0 alone
    assert wider["task"] == counts["task"] + 21 * 4 * 2
    small = grid.only(["profile"])
    assert {cell.kind for cell in small.cells} == {"profile"}
    assert {cell.kind for cell in grid.only(["text"]).cells} == {"profile", "plan", "text"}


def test_all_cells_run_and_are_kept(start: Callable[..., Any], monkeypatch: Any) -> None:
    job, grid, store = start()
    assert run_grid(job, grid, store) == {}
    assert {*Agenda(grid, store).results} == {cell.id for cell in grid.cells}
    kept = json.loads((store.folder / "cells" / "plan-alloc-l@24.json").read_text())
    assert kept["versions"]["torch"] == torch.__version__
    assert {"seconds", "created", "command", "machine"} <= {*kept}
    assert kept["result"]["model"]["fingerprint"]
    # a second run has nothing to do and loads no model
    monkeypatch.setattr(Worker, "run", None)
    assert run_grid(job, grid, store) == {}


class Stop(BaseException):
    """As an interrupt is, none of the errors that a cell is left out for."""


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stop_loses_only_the_cell_at_hand(
    after: int, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, grid, whole = start("whole")
    run_grid(job, grid, whole)
    job, grid, store = start("stopped")
    done: list[str] = []
    original = Worker.run

    def run(worker: Worker, cell: Cell, inputs: Any) -> Any:
        if len(done) == after:
            raise Stop
        done.append(cell.id)
        return original(worker, cell, inputs)

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "run", run)
        with pytest.raises(Stop):
            run_grid(job, grid, store)
    assert {*Agenda(grid, store).results} == {*done}
    run_grid(job, grid, store)
    assert results(store, grid) == results(whole, grid)


def test_what_cannot_be_had_is_left_out_with_what_needs_it(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, grid, store = start()
    original, tried = Worker.run, []

    def run(worker: Worker, cell: Cell, inputs: Any) -> Any:
        tried.append(cell.id)
        if cell.id == "profile-t0-s0":
            raise AllocMoEError("no such text")
        return original(worker, cell, inputs)

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "run", run)
        left_out = run_grid(job, grid, store)
        assert left_out["profile-t0-s0"] == "no such text"
        assert left_out["plan-alloc-l@24"] == "profile-t0-s0 is missing"
        # it compares plans, and goes on with the others
        names = [row["name"] for row in Agenda(grid, store).results["text-24-t0-s0"]["rows"]]
        assert "alloc-l@24" not in names
        assert {"uniform@24", "alloc-l@24-t1"} <= {*names}
        tried.clear()
        assert run_grid(job, grid, store) == left_out
        assert tried == []
    store.retry(grid.cells)
    assert run_grid(job, grid, store) == {}
    names = [row["name"] for row in Agenda(grid, store).results["text-24-t0-s0"]["rows"]]
    assert "alloc-l@24" in names


def test_a_folder_holds_one_experiment(start: Callable[..., Any]) -> None:
    start()
    start(device="cpu")  # where it runs does not matter
    with pytest.raises(AllocMoEError, match=r"another experiment \(dtype: auto, here float32\)"):
        start(dtype="float32")


@pytest.mark.parametrize("workers", [1, 2])
def test_other_weights_in_the_same_folder_are_refused(
    workers: int, start: Callable[..., Any], tmp_path: Path
) -> None:
    if workers > 1:
        pytest.importorskip("ray", reason="Ray is not installed")
    model = load_model("reference")
    model.save_pretrained(tmp_path / "model")
    load_tokenizer("reference").save_pretrained(tmp_path / "model")
    job, grid, store = start(weights=str(tmp_path / "model"))
    run_grid(job, grid.only(["profile"]), store)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(AllocMoEError, match="other weights than those"):
        run_grid(job, grid, store, workers=workers)
    assert Agenda(grid, store).left_out == {}


@pytest.mark.parametrize(("text", "kind"), [("one", "profile"), ("other", "text")])
def test_another_text_in_the_same_folder_is_refused(
    text: str, kind: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("people in town read many books. " * 60)
    job, grid, store = start(texts={text: str(file)})
    run_grid(job, grid.only([kind]), store)
    first = next(cell.id for cell in grid.cells if cell.kind == kind)
    # what is left reads the text again
    (store.folder / "cells" / "text-24-t0-s0.json").unlink(missing_ok=True)
    file.write_text("many books were read by people. " * 60)
    with pytest.raises(AllocMoEError, match=f"has other text than what {first} was measured on"):
        run_grid(job, grid, store)
    assert Agenda(grid, store).left_out == {}


def scored(data: str) -> dict[str, Any]:
    score = {"value": 0.5, "stderr": None, "higher_is_better": True}
    return {
        "plan": "unmodified",
        "task": "sciq",
        "num_items": 2,
        "shots": 0,
        "scores": {"acc,none": score},
        "realised": 48.0,
        "realised_per_layer": [6.0] * 8,
        "data": data,
    }


def test_other_items_of_a_task_are_refused(
    start: Callable[..., Any], settings: Settings, reference: ModelInfo
) -> None:
    _, _, store = start()
    grid = make_grid(settings, settings.model("one"), reference, ["sciq"])
    one, other = [cell for cell in grid.cells if cell.kind == "task"][:2]
    store.save(one, {"result": scored("aa")})
    with pytest.raises(AllocMoEError, match="not measured on the same content"):
        Agenda(grid, store).finish(other, {"result": scored("bb")})
    assert store.load(other) is None
    Agenda(grid, store).finish(other, {"result": scored("aa")})


def test_a_task_that_cannot_be_loaded_is_tried_once(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def load(names: list[str], *_: Any, **__: Any) -> Any:
        tried.append(names)
        raise AllocMoEError("the hub is out of reach")

    monkeypatch.setattr("allocmoe.experiment.worker.load_tasks", load)
    worker = Worker(start()[0])
    for _ in range(2):
        with pytest.raises(AllocMoEError, match="the hub is out of reach"):
            worker.run(Cell("task", task="sciq"), {})
    assert tried == [["sciq"]]


def test_a_folder_is_the_same_with_a_slash(start: Callable[..., Any]) -> None:
    _, _, store = start(data="sets/", weights="./model/", texts={"one": "./a.txt"})
    for data in ("sets", "./sets//"):
        assert start(data=data, weights="model", texts={"one": "a.txt"})[2] == store
    # as it was written before paths were made plain: its cells stay valid
    file = store.folder / "experiment.json"
    file.write_text(file.read_text().replace('"sets"', '"sets/"'))
    old = start(data="sets/", weights="model", texts={"one": "a.txt"})[2]
    assert old.experiment != store.experiment
    assert start(data="sets", weights="model", texts={"one": "a.txt"})[2] == old


def test_only_what_begins_must_be_writable(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _, store = start()

    def refuse(path: Path) -> None:
        raise AllocMoEError(f"{path}: cannot be written")

    monkeypatch.setattr("allocmoe.experiment.store.check_writable", refuse)
    assert Store.open(store.folder, job, begin=False) == store
    with pytest.raises(AllocMoEError, match="cannot be written"):
        Store.open(store.folder, job)


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        (Cell("task", task="sciq"), r"task-sciq-unmodified.json: result: the key .* is missing"),
        (Cell("plan", plan=PlanName("uniform", 24)), r"plan-uniform@24.json: result: kind is None"),
    ],
)
def test_a_damaged_cell_is_named(cell: Cell, line: str, start: Callable[..., Any]) -> None:
    store = start()[2]
    store.save(cell, {"result": {}})
    with pytest.raises(AllocMoEError, match=f"{line}.*; delete it to run it again"):
        store.load(cell)


def test_a_foreign_cell_is_refused(start: Callable[..., Any]) -> None:
    job, grid, store = start()
    cell = Cell("plan", plan=PlanName("uniform", 24))
    store.save(cell, {"result": {}})
    path = store.folder / "cells" / f"{cell.id}.json"
    path.write_text(path.read_text().replace(store.experiment, "0" * 16))
    with pytest.raises(AllocMoEError, match="of another experiment"):
        run_grid(job, grid, store)
    path.write_text("{")
    with pytest.raises(AllocMoEError, match="not JSON, or cut off"):
        run_grid(job, grid, store)


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AllocMoEError, match=r"no experiment 'papre'; known: paper, small"):
        load_settings("papre")
    path = write_experiment(tmp_path, scope='"bath"')
    with pytest.raises(AllocMoEError, match=r"tiny.toml: scope: 'bath' is not one of"):
        load_settings(str(path))
    for contexts, line in (
        ("[]", "one or more, each once"),
        ('["around"]', "take paper or single"),
    ):
        with pytest.raises(AllocMoEError, match=line):
            load_settings(str(write_experiment(tmp_path, contexts=contexts)))
    path.write_text("title = ")
    with pytest.raises(AllocMoEError, match=r"tiny\.toml: "):
        load_settings(str(path))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("seeds", "0", "seeds must be 1 or more, not 0"),
        ("sequences", "0", "calibration: sequences must be 1 or more, not 0"),
        ("length", "1", "calibration: length must be 2 or more, not 1"),
        ("limit", "-1", "tasks: limit must be 0 or more, not -1"),
        ("batch_size", "0", "batch_size must be 1 or more, not 0"),
        ("full", "0", "models.one: full must be 1 or more, not 0"),
        ("budgets", "[49, 24]", r"a budget must be 1 to 48 \(full\), not 49"),
        ("budgets", "[24, 0]", r"a budget must be 1 to 48 \(full\), not 0"),
        ("budgets", "[24, 24]", "a budget is named twice"),
        ("methods", '["uniform", "uniform"]', "methods: a method is named twice"),
        ("published.speedup", "{ prefill = 1.1 }", "must have prefill and decode, or nothing"),
        (
            "published.ablation",
            "{ Uniform = [50.0] }",
            "published: ablation.Uniform has 1 numbers for 2 budgets",
        ),
    ],
)
def test_a_wrong_setting_is_refused(key: str, value: str, line: str, tmp_path: Path) -> None:
    path = write_experiment(tmp_path)
    old = next(row for row in path.read_text().splitlines() if row.startswith(f"{key} ="))
    path.write_text(path.read_text().replace(old, f"{key} = {value}"))
    with pytest.raises(AllocMoEError, match=f"tiny.toml: .*{line}"):
        load_settings(str(path))


def test_workers_that_find_no_room_are_refused() -> None:
    assert _gpus_each({"CPU": 2.0}, 2, None) == 0.0
    assert _gpus_each({"CPU": 8.0, "GPU": 2.0}, 2, None) == 1.0
    assert _gpus_each({"CPU": 8.0, "GPU": 1.0}, 2, 0.5) == 0.5
    with pytest.raises(AllocMoEError, match="2 workers with 1 GPUs each need 2, Ray has 1"):
        _gpus_each({"CPU": 8.0, "GPU": 1.0}, 2, None)
    with pytest.raises(AllocMoEError, match="Ray has 4 processors for 5 workers"):
        _gpus_each({"CPU": 4.0}, 5, None)


def test_two_workers_measure_what_one_does(start: Callable[..., Any]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    job, grid, one = start("one")
    run_grid(job, grid, one)
    job, grid, two = start("two")
    assert run_grid(job, grid, two, workers=2) == {}
    assert results(two, grid) == results(one, grid)
