"""Tasks on published files: the same as lm-eval's own on the rows that the hub has."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval import tasks as lm_eval_tasks
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.dummy import DummyLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.manager import TaskManager

import allocmoe
from allocmoe.artifacts import TaskResult
from allocmoe.errors import AllocMoEError
from allocmoe.evaluation.tasks import Tasks, run_task
from allocmoe.experiment.data_sets import DATA_SETS
from allocmoe.experiment.task_files import PreparedTasks, prepare_tasks
from allocmoe.models.load import load_model, load_tokenizer
from hub_rows import HUB, load_rows

SAMPLE = Path(__file__).parents[2] / "experiments" / "sample"
NAMES = tuple(DATA_SETS)
# the bundled model takes 1024 tokens, as many as some tasks may generate
ANSWER_TOKENS = 3

# a score that each task has, and its examples
SCORES = {
    "boolq": ("acc", 0),
    "lambada_openai": ("acc", 0),
    "race": ("acc", 0),
    "sciq": ("acc", 0),
    "mnli": ("acc", 0),
    "qnli": ("acc", 0),
    "rte": ("acc", 0),
    "arc_easy": ("acc", 0),
    "arc_challenge": ("acc", 0),
    "hellaswag": ("acc", 0),
    "logiqa": ("acc", 0),
    "mmlu": ("acc", 0),
    "piqa": ("acc", 0),
    "truthfulqa_mc1": ("acc", 0),
    "truthfulqa_mc2": ("acc", 0),
    "acp_bench": ("exact_match,get-answer", 2),
    "bbh": ("exact_match,get-answer", 3),
    "groundcocoa": ("acc", 0),
    "swag": ("acc", 0),
    "gsm8k": ("exact_match,strict-match", 5),
    "asdiv": ("acc", 0),
    "mathqa": ("acc", 0),
}

Bundled = tuple[Any, Any]


@pytest.fixture(scope="module")
def bundled() -> Bundled:
    return load_model("reference", dtype="float32"), load_tokenizer("reference")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedTasks:
    folder = tmp_path_factory.mktemp("prepared")
    return prepare_tasks(NAMES, SAMPLE, folder)


@pytest.fixture(scope="module")
def tasks(prepared: PreparedTasks) -> Tasks:
    return allocmoe.load_tasks(NAMES, prepared.folder, answer_tokens=ANSWER_TOKENS)


@pytest.fixture(scope="module")
def stock() -> Iterator[TaskManager]:
    """lm-eval's own tasks, on the rows of the hub."""
    home = Path(lm_eval_tasks.__file__).parent
    folders = {data_set.tasks for data_set in DATA_SETS.values()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load_rows)
        yield TaskManager(include_path=[home / f for f in folders], include_defaults=False)


@pytest.fixture(scope="module")
def results(bundled: Bundled, tasks: Tasks) -> dict[str, TaskResult]:
    row = allocmoe.evaluate_tasks(*bundled, {}, tasks, batch_size=1).rows[0]
    return {result.task: result for result in row.tasks}


def parts(tasks: Tasks) -> dict[str, Any]:
    return {name: part for task in tasks.values() for name, part in task["tasks"].items()}


def requests(task: Any) -> list[Any]:
    """What the model is asked, and what would be right."""
    task.set_fewshot_seed(seed=1)
    task.build_all_requests(rank=0, world_size=1)
    found = []
    for instance in task.instances:
        prompt, *rest = instance.args
        if instance.request_type == "generate_until":
            rest = [rest[0]["until"]]
        target = task.doc_to_target(instance.doc)
        found.append((instance.request_type, instance.doc_id, prompt, rest, target))
    return found


def test_every_task_has_a_sample(prepared: PreparedTasks) -> None:
    assert prepared.names == NAMES == tuple(SCORES)
    assert prepared.missing == {}
    assert prepared.counts["mmlu"] == 6
    assert "boolq: 3 items of 3270" in prepared.notes
    assert "mmlu: 6 items of 14042, 3 of 57 parts" in prepared.notes
    assert "acp_bench: 6 items of 1800, 3 of 14 parts" in prepared.notes


def test_every_task_runs(results: dict[str, TaskResult], prepared: PreparedTasks) -> None:
    assert tuple(results) == NAMES
    for name, (metric, shots) in SCORES.items():
        assert metric in results[name].scores, name
        assert results[name].shots == shots, name
        assert results[name].num_items == prepared.counts[name], name
        assert results[name].realised == 48


class Knowing(DummyLM):
    """Generates the right answers, with the words around them that the tasks ask for."""

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        answers = [request.doc.get("target") or request.doc["answer"] for request in requests]
        return [text if "####" in text else f"So the answer is {text}." for text in answers]


@pytest.mark.parametrize("name", ["gsm8k", "acp_bench", "bbh"])
def test_right_answers_count(name: str, tasks: Tasks) -> None:
    hits: dict[str, str] = {}
    found = run_task(
        Knowing(), name, tasks, reset=lambda: None, activity=lambda: (), on_hits=hits.update
    )
    assert {score.value for score in found.scores.values()} == {1.0}
    assert hits == dict.fromkeys(found.scores, "1" * found.num_items)


class TestTheSameAsOnTheHub:
    def test_requests(self, tasks: Tasks, stock: TaskManager) -> None:
        ours = parts(tasks)
        theirs = stock.load([*ours])["tasks"]
        assert len(ours) == len(NAMES) - 3 + 3 + 3 + 3
        for name, task in ours.items():
            own = theirs[name]
            own.set_config("num_fewshot", own.config.num_fewshot or 0)
            assert requests(task) == requests(own), name
            assert task.config.metric_list == own.config.metric_list
            assert task.config.num_fewshot == own.config.num_fewshot
            assert len(task._filters) == len(own._filters)
            for one, two in zip(task._filters, own._filters, strict=True):
                assert [type(f) for f in one.filters] == [type(f) for f in two.filters]

    def test_requests_with_examples(self, prepared: PreparedTasks, stock: TaskManager) -> None:
        names = ["boolq", "rte", "arc_easy", "mmlu_management"]
        ours = parts(allocmoe.load_tasks(names, prepared.folder, shots=1))
        theirs = stock.load(names)["tasks"]
        for name in names:
            theirs[name].set_config("num_fewshot", 1)
            assert requests(ours[name]) == requests(theirs[name]), name

    @pytest.mark.parametrize(
        "name",
        ["gsm8k", "lambada_openai", "asdiv", "hellaswag", "truthfulqa_mc2", "race"],
    )
    def test_scores(
        self,
        name: str,
        bundled: Bundled,
        stock: TaskManager,
        results: dict[str, TaskResult],
    ) -> None:
        own = scores_of_lm_eval(bundled, stock, [name])[name]
        ours = {metric: score.value for metric, score in results[name].scores.items()}
        assert ours == own

    def test_scores_of_groups(
        self,
        bundled: Bundled,
        tasks: Tasks,
        stock: TaskManager,
        results: dict[str, TaskResult],
    ) -> None:
        for group in ("mmlu", "acp_bench", "bbh"):
            metric, _ = SCORES[group]
            own = scores_of_lm_eval(bundled, stock, list(tasks[group]["tasks"]))
            # all parts of the sample have two items
            mean = sum(next(iter(scores.values())) for scores in own.values()) / len(own)
            assert results[group].scores[metric].value == pytest.approx(mean)
        (given,) = stock.task_index["mmlu_stem"].cfg["aggregate_metric_list"]
        for found in tasks["mmlu"]["groups"].values():
            (aggregated,) = found.aggregate_metric_list
            assert {key: getattr(aggregated, key) for key in given} == given
        assert [*tasks["mmlu"]["groups"]] == [
            "mmlu",
            "mmlu_stem",
            "mmlu_other",
            "mmlu_humanities",
        ]

    def test_without_data_it_is_the_hub(self, tmp_path: Path, stock: TaskManager) -> None:
        with pytest.MonkeyPatch.context() as patch:
            found = prepare_tasks(["rte", "acp_bench"], None, tmp_path)
            acp = {"test": HUB["ibm-research/acp_bench", "acp_app_bool"]["test"]}
            for part in stock.task_index["acp_bench"].tags:
                patch.setitem(HUB, ("ibm-research/acp_bench", part), acp)
            manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
            loaded = manager.load(["rte", "acp_bench"])
        assert (found.names, found.notes, found.counts) == (("rte", "acp_bench"), (), {})
        assert len(loaded["tasks"]) == 1 + 14
        assert loaded["groups"]["acp_bench"].has_aggregation
        assert requests(loaded["tasks"]["rte"]) == requests(stock.load(["rte"])["tasks"]["rte"])


def scores_of_lm_eval(
    bundled: Bundled, stock: TaskManager, names: list[str]
) -> dict[str, dict[str, float]]:
    model, tokenizer = bundled
    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1),
        tasks=names,
        task_manager=stock,
        bootstrap_iters=0,
        gen_kwargs={"max_gen_toks": ANSWER_TOKENS},
    )
    return {
        name: {
            key.removesuffix(",none"): value
            for key, value in scores.items()
            if "," in key and "_stderr" not in key
        }
        for name, scores in found["results"].items()
    }


def copied(tmp_path: Path, *names: str) -> Path:
    for name in names:
        shutil.copytree(SAMPLE / name, tmp_path / "data" / name)
    return tmp_path / "data"


def written(folder: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


class TestWhatIsThere:
    def test_missing_data_is_named(self, tmp_path: Path) -> None:
        data = copied(tmp_path, "rte", "arc", "mmlu")
        (data / "arc" / "ARC-Challenge-Test.jsonl").unlink()
        shutil.rmtree(data / "mmlu" / "test")
        (data / "bbh").mkdir()
        names = ["arc_challenge", "swag", "rte", "mmlu", "bbh", "arc_easy"]
        found = prepare_tasks(names, data, tmp_path / "tasks")
        assert found.names == ("rte", "arc_easy")
        assert found.missing == {
            "arc_challenge": f"no ARC-Challenge-Test.jsonl in {data / 'arc'}",
            "swag": f"no folder swag in {data}",
            "mmlu": "no test/abstract_algebra_test.csv or the like in " + str(data / "mmlu"),
            "bbh": "no bbh/boolean_expressions.json or the like in " + str(data / "bbh"),
        }
        assert found.counts == {"rte": 3, "arc_easy": 3}
        assert not (tmp_path / "tasks" / "mmlu.yaml").exists()

    def test_full_sets_have_no_note(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert prepare_tasks(["rte"], SAMPLE, tmp_path).notes == ("rte: 3 items of 277",)
        monkeypatch.setitem(DATA_SETS, "rte", replace(DATA_SETS["rte"], size=3))
        assert prepare_tasks(["rte"], SAMPLE, tmp_path).notes == ()

    def test_without_training_data(self, tmp_path: Path) -> None:
        data = copied(tmp_path, "rte", "gsm8k", "sciq")
        (data / "rte" / "train.tsv").unlink()
        (data / "gsm8k" / "train.jsonl").unlink()
        found = prepare_tasks(["rte", "gsm8k", "sciq"], data, tmp_path / "tasks")
        note = "only evaluated items to take examples from: rte, gsm8k, sciq"
        assert found.notes[-1] == note
        tasks = parts(allocmoe.load_tasks(["rte", "sciq", "gsm8k"], found.folder, shots=1))
        for task in tasks.values():
            for _, item, prompt, _, _ in requests(task):
                # no item is its own example
                assert prompt.count(task.doc_to_text(task.eval_docs[item])) == 1

    def test_once_more(self, tmp_path: Path) -> None:
        data = copied(tmp_path, "rte", "acpbench")
        names, folder = ["rte", "acp_bench"], tmp_path / "tasks"
        first = prepare_tasks(names, data, folder)
        times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        assert prepare_tasks(names, data, folder) == first
        assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
        # what has gone since is gone
        shutil.rmtree(data / "acpbench" / "val")
        assert prepare_tasks(names, data, folder).counts["acp_bench"] == 4
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        assert manager.all_subtasks == ["acp_app_bool", "acp_app_mcq", "rte"]

    def test_unknown_names_and_folders(self, tmp_path: Path) -> None:
        found = prepare_tasks(["rtf", "rte"], SAMPLE, tmp_path)
        assert found.names == ("rte",)
        assert found.missing["rtf"].startswith("no data set is known for it; known: boolq, ")
        with pytest.raises(AllocMoEError, match="nowhere: no such folder of data sets"):
            prepare_tasks(["rte"], tmp_path / "nowhere", tmp_path)

    @pytest.mark.parametrize(
        ("name", "file", "content", "message"),
        [
            (
                "gsm8k",
                "gsm8k/test.jsonl",
                '{"question": "a", "answer": "b"}\n{"qu',
                "line 2: not JS",
            ),
            ("gsm8k", "gsm8k/test.jsonl", '{"question": "a"}', "line 1: there is no 'answer'"),
            ("gsm8k", "gsm8k/test.jsonl", "\n", "no items"),
            ("gsm8k", "gsm8k/test.jsonl", "[1]", "item 1: "),
            ("rte", "rte/dev.tsv", "sentence1\tsentence2\tlabel\na\tb", "line 2: 2 cells under 3"),
            ("rte", "rte/dev.tsv", "sentence1\tsentence2\tlabel\na\tb\tc", "label 'c' is none of"),
            ("rte", "rte/dev.tsv", "", "no items"),
            ("swag", "swag/val.csv", "", "no items"),
            ("swag", "swag/val.csv", 'startphrase\n"a', "line 2: unexpected end of data"),
            ("mmlu", "mmlu/test/anatomy_test.csv", "a,b,c\n", "line 1: 3 cells instead of 6"),
            ("logiqa", "logiqa/Test.txt", "a\nb\nc\nA.d", "item 1: 1 options instead of 4"),
            ("logiqa", "logiqa/Test.txt", "a\nb", "item 1: not enough values"),
            ("piqa", "piqa/valid-labels.lst", "0", "1 labels for 3 items of valid.jsonl"),
            ("boolq", "boolq/dev.jsonl", '{"query": "?"}', "line 1: the query has no passage"),
            ("bbh", "bbh/bbh/snarks.json", "{}", "no list 'examples'"),
            ("groundcocoa", "groundcocoa/groundcocoa.json", "{", "line 1: not JSON, or cut off"),
            ("asdiv", "asdiv/ASDiv.xml", "<a>\n<b>", "line 2"),
            ("asdiv", "asdiv/ASDiv.xml", "<a><Problem/></a>", "item 1: there is no 'Body'"),
            ("race", "race/test_high.jsonl", b"\xff", "cannot be read: 'utf-8' codec"),
        ],
    )
    def test_broken_files_are_named(
        self, tmp_path: Path, name: str, file: str, content: str | bytes, message: str
    ) -> None:
        data = copied(tmp_path, file.split("/")[0])
        path = data / file
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(AllocMoEError) as error:
            prepare_tasks([name], data, tmp_path / "tasks")
        assert str(error.value).startswith(f"{path}: ")
        assert message in str(error.value)
        assert "\n" not in str(error.value)


class TestOtherFormats:
    @pytest.mark.parametrize(
        ("name", "file", "content", "row"),
        [
            (
                "boolq",
                "boolq/llmfoundry_boolq.jsonl",
                '{"query": "Passage: They ask\\nQuestions.\\nQuestion: do they?", "gold": 1}',
                {"passage": "They ask questions.", "question": "do they", "label": 1},
            ),
            (
                "rte",
                "rte/dev.tsv",
                'sentence1\tsentence2\tlabel\tidx\n"He said ""no""."\tHe spoke.\t0\t0\n',
                {"sentence1": 'He said "no".', "sentence2": "He spoke.", "label": 0},
            ),
            (
                "mnli",
                "mnli/dev_matched.tsv",
                'index\tsentence1\tsentence2\tgold_label\n0\t"a\tb\tneutral\r\n',
                {"premise": '"a', "hypothesis": "b", "label": 1},
            ),
            (
                "sciq",
                "sciq/test.json",
                '[{"question": "q", "distractor1": "a", "distractor2": "b", "distractor3": "c",'
                ' "correct_answer": "d", "support": ""}]',
                dict(question="q", correct_answer="d", support="")
                | dict(distractor1="a", distractor2="b", distractor3="c"),
            ),
            (
                "swag",
                "swag/swag_500.jsonl",
                '{"startphrase": "s", "answer": 2, "choices": ["a", "b", "c", "d"]}',
                dict(startphrase="s", ending0="a", ending1="b", ending2="c", ending3="d", label=2),
            ),
            (
                "mathqa",
                "mathqa/mathqa_orig_fields_1000.jsonl",
                '{"problem": "p", "options": "a ) 1 , b ) 2", "correct": "a", "type": "x"}',
                {"Problem": "p", "options": "a ) 1 , b ) 2", "correct": "a"},
            ),
        ],
    )
    def test_give_the_same_rows(
        self, tmp_path: Path, name: str, file: str, content: str, row: Mapping[str, Any]
    ) -> None:
        path = tmp_path / file
        path.parent.mkdir()
        path.write_bytes(content.encode())
        prepare_tasks([name], tmp_path, tmp_path / "tasks")
        (found,) = (tmp_path / "tasks").glob("*.jsonl")
        assert written(found.parent, found.name) == [row]

    def test_the_best_file_is_taken(self, tmp_path: Path) -> None:
        data = copied(tmp_path, "boolq")
        query = {"query": "Passage: p\nQuestion: q?", "gold": 0}
        (data / "boolq" / "llmfoundry_boolq.jsonl").write_text(json.dumps(query))
        assert prepare_tasks(["boolq"], data, tmp_path / "tasks").counts == {"boolq": 3}
        (data / "boolq" / "dev.jsonl").unlink()
        found = prepare_tasks(["boolq"], data, tmp_path / "tasks")
        assert found.counts == {"boolq": 1}
        assert "boolq: passages without the titles that they have on the hub" in found.notes

    def test_preprocessed_hellaswag(self, tmp_path: Path) -> None:
        """llama.cpp's file, with what lm-eval makes of the original in the end."""
        from lm_eval.tasks.hellaswag.utils import process_docs

        original = datasets.Dataset.from_list(HUB["Rowan/hellaswag", None]["validation"])
        expected = process_docs(original).to_list()
        file = tmp_path / "hellaswag" / "hellaswag_val.jsonl"
        file.parent.mkdir()
        contexts = [doc["query"] for doc in expected]
        # it leaves the beginning of a sentence in small letters
        contexts[0] = contexts[0].replace("She", "she")
        contexts[2] = contexts[2].replace("The older man", "the older Man")
        assert contexts != [doc["query"] for doc in expected]
        items = [
            {"ctx": ctx, "label": int(doc["label"]), "endings": doc["choices"]}
            for ctx, doc in zip(contexts, expected, strict=True)
        ]
        items[0]["endings"][1] = "waits.  And waits."
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
        prepare_tasks(["hellaswag"], tmp_path, tmp_path / "tasks")
        rows = written(tmp_path / "tasks", "hellaswag-validation.jsonl")
        found = process_docs(datasets.Dataset.from_list(rows)).to_list()
        for key in ("query", "choices", "gold"):
            assert [doc[key] for doc in found] == [doc[key] for doc in expected]


# of the evaluation sets, and of those parts of them that are also at hand without the hub
FULL = {
    **dict(boolq=3270, lambada_openai=5153, race=1045, sciq=1000, mnli=9815, qnli=5463, rte=277),
    **dict(arc_easy=2376, arc_challenge=1172, hellaswag=10042, logiqa=651, mmlu=14042, piqa=1838),
    **dict(truthfulqa_mc1=817, truthfulqa_mc2=817, acp_bench=1800, bbh=6511, groundcocoa=4849),
    **dict(swag=20006, gsm8k=1319, asdiv=2305, mathqa=2985),
}
SUBSETS = {"arc_challenge": 1170, "swag": 500, "mathqa": 1000}


@pytest.mark.skipif("ALLOCMOE_EVAL_DATA" not in os.environ, reason="no ALLOCMOE_EVAL_DATA")
def test_the_published_data(tmp_path: Path) -> None:
    found = prepare_tasks(NAMES, Path(os.environ["ALLOCMOE_EVAL_DATA"]), tmp_path)
    assert set(found.missing) <= {"groundcocoa"}
    assert tuple(FULL) == NAMES
    for name, count in found.counts.items():
        assert count in (FULL[name], SUBSETS.get(name))
        noted = f"{name}: {count} items of {FULL[name]}" in found.notes
        assert noted == (count != FULL[name])
