"""The data sets of the experiment: their published files, and what the hub makes of them.

Each one has a row in `DATA_SETS`: names of files, a reader that takes a file apart into items, and
a function that turns an item into the row that the hub has for it, as far as lm-eval reads it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from allocmoe.errors import AllocMoEError, first_line

Row = dict[str, Any]
# where in its file an item is, and the item
Items = Iterator[tuple[str, Any]]

# -- files to items


def _text(path: Path) -> str:
    try:
        # not as text: that would make line ends of characters that are none
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise AllocMoEError(f"{path}: cannot be read: {first_line(error)}") from None


def _json(path: Path, text: str, first_line_number: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line_number + error.lineno - 1
        raise AllocMoEError(f"{path}: line {line}: not JSON, or cut off: {error.msg}") from None


def _items(path: Path) -> Items:
    """Of a table with headings, a JSON list or JSON lines."""
    if path.suffix in (".csv", ".tsv"):
        yield from _under_headings(path)
        return
    text = _text(path)
    if text.lstrip().startswith("["):
        yield from _numbered(_json(path, text))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _json(path, line, number)


def _under_headings(path: Path) -> Items:
    rows = _cells(path)
    _, headings = next(rows, ("", []))
    for where, cells in rows:
        if len(cells) != len(headings):
            count = f"{len(cells)} cells under {len(headings)} headings"
            raise AllocMoEError(f"{path}: {where}: {count}")
        yield where, dict(zip(headings, cells, strict=True))


def _numbered(items: Sequence[Any]) -> Items:
    return ((f"item {number}", item) for number, item in enumerate(items, 1))


def _cells(path: Path) -> Items:
    text, tabs = _text(path), path.suffix == ".tsv"
    # GLUE's own tables know no quotes; those with a column `idx` were exported from the hub
    if tabs and "idx" not in text.partition("\n")[0].split("\t"):
        for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
            yield f"line {number}", line.split("\t")
        return
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if tabs else ",", strict=True)
    try:
        for cells in reader:
            if cells:
                yield f"line {reader.line_num}", cells
    except csv.Error as error:
        raise AllocMoEError(f"{path}: line {reader.line_num}: {error}") from None


def _blocks(path: Path) -> Items:
    """The lines of each block between empty lines."""
    return _numbered([block.split("\n") for block in _text(path).strip().split("\n\n")])


def _problems(path: Path) -> Items:
    try:
        root = ElementTree.fromstring(_text(path))
    except ElementTree.ParseError as error:
        raise AllocMoEError(f"{path}: {error}") from None
    return _numbered([{field.tag: field.text or "" for field in p} for p in root.iter("Problem")])


def _with_labels(path: Path) -> Items:
    """PIQA has its labels in a file of their own."""
    file = path.with_name(f"{path.stem}-labels.lst")
    items, labels = list(_items(path)), _text(file).split()
    if len(items) != len(labels):
        raise AllocMoEError(f"{file}: {len(labels)} labels for {len(items)} items of {path.name}")
    for (where, item), label in zip(items, labels, strict=True):
        yield where, item | {"label": label}


def _list_at(key: str) -> Callable[[Path], Items]:
    def read(path: Path) -> Items:
        found = _json(path, _text(path))
        if not isinstance(found, dict) or not isinstance(found.get(key), list):
            raise AllocMoEError(f"{path}: no list {key!r} in it")
        return _numbered(found[key])

    return read


# -- items to rows of the hub


def _label(value: Any, *known: str) -> int:
    """Its place among the known ones, which it may also be given as."""
    names = [*known, *map(str, range(len(known)))]
    if str(value) not in names:
        raise ValueError(f"the label {value!r} is none of {', '.join(known)}")
    return names.index(str(value)) % len(known)


def _field(item: Row, *names: str) -> Any:
    """By the first of its names that there is."""
    return item[next((name for name in names if name in item), names[0])]


def _keys(*names: str) -> Callable[[Row], Row]:
    return lambda item: {name: item[name] for name in names}


def _boolq(item: Row) -> Row:
    if "query" in item:
        found = re.fullmatch(r"Passage: (.*)\nQuestion: (.*)\?", item["query"], re.DOTALL)
        if found is None:
            raise ValueError("the query has no passage and question")
        # whoever made these queries put every " question" on a line of its own
        passage, label = found[1].replace("\nQuestion", " question"), int(item["gold"])
        return {"passage": passage, "question": found[2], "label": label}
    # the hub has BoolQ as in SuperGLUE, where the title became part of the passage
    passage = f"{item['title']} -- {item['passage']}"
    return {"passage": passage, "question": item["question"], "label": int(item["answer"])}


def _race(item: Row) -> Row:
    asked = zip(item["questions"], item["answers"], item["options"], strict=True)
    problems = [{"question": q, "answer": a, "options": o} for q, a, o in asked]
    return {"article": item["article"], "problems": repr(problems)}


def _sciq(item: Row) -> Row:
    numbers = (1, 2, 3)
    wrong = item.get("distractors") or [item[f"distractor{n}"] for n in numbers]
    row = {f"distractor{n}": text for n, text in zip(numbers, wrong, strict=True)}
    return row | _keys("question", "correct_answer", "support")(item)


def _mnli(item: Row) -> Row:
    return {
        "premise": _field(item, "premise", "sentence1"),
        "hypothesis": _field(item, "hypothesis", "sentence2"),
        "label": _label(
            _field(item, "label", "gold_label"), "entailment", "neutral", "contradiction"
        ),
    }


def _entails(*names: str) -> Callable[[Row], Row]:
    def convert(item: Row) -> Row:
        return _keys(*names)(item) | {
            "label": _label(item["label"], "entailment", "not_entailment")
        }

    return convert


def _arc(item: Row) -> Row:
    choices = item["question"]["choices"]
    return {
        "question": item["question"]["stem"],
        "choices": {key: [choice[key] for choice in choices] for key in ("text", "label")},
        "answerKey": item["answerKey"],
    }


def _hellaswag(item: Row) -> Row:
    if "ctx_a" not in item:
        item = _before_preprocessing(item)
    row = _keys("activity_label", "ctx_a", "ctx_b", "endings")(item)
    return row | {"label": str(item["label"])}


def _before_preprocessing(item: Row) -> Row:
    """Fields of which lm-eval makes the text again that a preprocessed file has.

    llama.cpp's text is lm-eval's, but without the capital that it gives to ctx_b, the beginning of
    a sentence which the endings complete. That is what follows the last full sentence; a context
    that ends with a full stop, WikiHow's, has none.
    """
    activity, _, context = item["ctx"].partition(": ")
    found = re.fullmatch(r'(.*[.!?]"?) (.*[^.])', context, re.DOTALL)
    ctx_a, ctx_b = found.groups() if found else (context, "")
    return {
        "activity_label": activity,
        "ctx_a": ctx_a,
        "ctx_b": ctx_b,
        # lm-eval makes two spaces one, and did so before
        "endings": [ending.replace("  ", "   ") for ending in item["endings"]],
        "label": item["label"],
    }


def _logiqa(lines: Sequence[str]) -> Row:
    label, context, question, *options = lines
    if len(options) != 4:
        raise ValueError(f"{len(options)} options instead of 4")

    def spaced(text: str) -> str:  # as on the hub
        return text.replace(".", ". ").strip()

    return {
        "label": "abcd"[_label(label.strip(), *"abcd")],
        "context": spaced(context),
        "question": spaced(question),
        "options": [spaced(option[2:]) for option in options],
    }


def _mmlu(cells: Sequence[str]) -> Row:
    question, *choices, answer = cells
    if len(choices) != 4:
        raise ValueError(f"{len(cells)} cells instead of 6")
    return {"question": question, "choices": choices, "answer": _label(answer, *"ABCD")}


def _piqa(item: Row) -> Row:
    return _keys("goal", "sol1", "sol2")(item) | {"label": _label(item["label"], "0", "1")}


def _truthfulqa(item: Row) -> Row:
    row = {"question": item["question"]}
    for key in ("mc1_targets", "mc2_targets"):
        row[key] = {"choices": list(item[key]), "labels": list(item[key].values())}
    return row


def _acp(item: Row) -> Row:
    row = _keys("context", "question", "answer")(item)
    # a filter of lm-eval's reads them
    return row | ({"choices": item["choices"]} if "choices" in item else {})


def _groundcocoa(item: Row) -> Row:
    options = {f"Option {letter}": str(item[f"Option {letter}"]) for letter in "ABCDE"}
    return options | {"query": item["query"], "Answer": "ABCDE"[_label(item["Answer"], *"ABCDE")]}


def _swag(item: Row) -> Row:
    endings = item.get("choices") or [item[f"ending{n}"] for n in range(4)]
    row = {f"ending{n}": ending for n, ending in zip(range(4), endings, strict=True)}
    label = _label(_field(item, "label", "answer"), *"0123")
    return row | {"startphrase": item["startphrase"], "label": label}


def _asdiv(item: Row) -> Row:
    return {key.lower(): item[key] for key in ("Body", "Question", "Answer")}


def _mathqa(item: Row) -> Row:
    row = _keys("options", "correct")(item)
    return row | {"Problem": _field(item, "Problem", "problem")}


# -- the data sets


@dataclass(frozen=True)
class DataSet:
    """Where a data set is, and how its items become rows of the hub.

    folder: in the data. tasks: in lm-eval. size: items that lm-eval evaluates. files: names by
    split of the hub, the best first; `{config}` is the hub's configuration, `{words}` its words.
    remarks: on files that are not all that the hub has. answer_filter: one name for the filters of
    all parts, so that they can be scored as one.
    """

    folder: str
    tasks: str
    size: int
    files: dict[str, tuple[str, ...]]
    convert: Callable[[Any], Row]
    read: Callable[[Path], Items] = _items
    remarks: dict[str, str] = field(default_factory=dict)
    answer_filter: str | None = None

    def names(self, config: str, split: str) -> list[str]:
        """Of the files that may hold a split of one of the hub's configurations."""
        words = config.split("_")
        return [name.format(config=config, words=words) for name in self.files.get(split, ())]

    def find(self, folder: Path, config: str, split: str) -> Path | None:
        paths = (folder / name for name in self.names(config, split))
        return next((path for path in paths if path.is_file()), None)

    def rows(self, path: Path) -> list[Row]:
        rows = []
        for where, item in self.read(path):
            try:
                rows.append(self.convert(item))
            except KeyError as error:
                raise AllocMoEError(f"{path}: {where}: there is no {error}") from None
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                raise AllocMoEError(f"{path}: {where}: {first_line(error)}") from None
        if not rows:
            raise AllocMoEError(f"{path}: no items")
        return rows


def _splits(**files: str) -> dict[str, tuple[str, ...]]:
    return {split: tuple(names.split()) for split, names in files.items()}


_TRUTHFULQA = DataSet(
    "truthfulqa", "truthfulqa", 817, _splits(validation="mc_task.json"), _truthfulqa
)
# not llm-foundry's files: where choices are called 1 to 4, they have the next one as the answer
_ARC = _splits(
    train="{config}-Train.jsonl", validation="{config}-Dev.jsonl", test="{config}-Test.jsonl"
)

DATA_SETS: dict[str, DataSet] = {
    "boolq": DataSet(
        "boolq",
        "super_glue/boolq",
        3270,
        _splits(train="train.jsonl", validation="dev.jsonl llmfoundry_boolq.jsonl"),
        _boolq,
        remarks={"llmfoundry_boolq.jsonl": "passages without the titles that they have on the hub"},
    ),
    "lambada_openai": DataSet(
        "lambada", "lambada", 5153, _splits(test="lambada_openai_test.jsonl"), _keys("text")
    ),
    # the harder half of RACE, an item for each passage: the last question, after the others
    "race": DataSet("race", "race", 1045, _splits(test="test_high.jsonl"), _race),
    "sciq": DataSet(
        "sciq",
        "sciq",
        1000,
        _splits(
            train="train.jsonl train.json",
            validation="valid.jsonl valid.json",
            test="test.jsonl test.json",
        ),
        _sciq,
    ),
    "mnli": DataSet(
        "mnli",
        "glue/mnli",
        9815,
        _splits(
            train="train.jsonl train.tsv", validation_matched="dev_matched.jsonl dev_matched.tsv"
        ),
        _mnli,
    ),
    "qnli": DataSet(
        "qnli",
        "glue/qnli",
        5463,
        _splits(train="train.tsv", validation="dev.tsv"),
        _entails("question", "sentence"),
    ),
    "rte": DataSet(
        "rte",
        "glue/rte",
        277,
        _splits(train="train.tsv", validation="dev.tsv"),
        _entails("sentence1", "sentence2"),
    ),
    "arc_easy": DataSet("arc", "arc", 2376, _ARC, _arc),
    "arc_challenge": DataSet("arc", "arc", 1172, _ARC, _arc),
    "hellaswag": DataSet(
        "hellaswag",
        "hellaswag",
        10042,
        _splits(train="hellaswag_train.jsonl", validation="hellaswag_val.jsonl"),
        _hellaswag,
    ),
    "logiqa": DataSet(
        "logiqa",
        "logiqa",
        651,
        _splits(train="Train.txt", validation="Eval.txt", test="Test.txt"),
        _logiqa,
        _blocks,
    ),
    "mmlu": DataSet(
        "mmlu",
        "mmlu/default",
        14042,
        _splits(dev="dev/{config}_dev.csv", test="test/{config}_test.csv"),
        _mmlu,
        _cells,
    ),
    "piqa": DataSet(
        "piqa",
        "piqa",
        1838,
        _splits(train="train.jsonl", validation="valid.jsonl"),
        _piqa,
        _with_labels,
    ),
    # lm-eval calls both accuracy: mc1 is how often the one true answer is the likeliest, mc2 the
    # probability of all true ones, which is what is usually reported for TruthfulQA
    "truthfulqa_mc1": _TRUTHFULQA,
    "truthfulqa_mc2": _TRUTHFULQA,
    # for lm-eval a tag; here a group, so that yes-or-no and multiple choice make one score
    "acp_bench": DataSet(
        "acpbench",
        "acpbench",
        1800,
        _splits(test="{words[1]}/test.{words[2]}.json"),
        _acp,
        answer_filter="get-answer",
    ),
    "bbh": DataSet(
        "bbh",
        "bbh/cot_fewshot",
        6511,
        _splits(test="bbh/{config}.json"),
        _keys("input", "target"),
        _list_at("examples"),
    ),
    "groundcocoa": DataSet(
        "groundcocoa",
        "groundcocoa",
        4849,
        _splits(test="groundcocoa.json"),
        _groundcocoa,
        _list_at("test_set"),
    ),
    "swag": DataSet(
        "swag",
        "swag",
        20006,
        _splits(train="train.csv", validation="val.csv swag_500.jsonl"),
        _swag,
    ),
    "gsm8k": DataSet(
        "gsm8k",
        "gsm8k",
        1319,
        _splits(train="train.jsonl", test="test.jsonl"),
        _keys("question", "answer"),
    ),
    "asdiv": DataSet("asdiv", "asdiv", 2305, _splits(validation="ASDiv.xml"), _asdiv, _problems),
    # not llm-foundry's file: it has four of the five options of each problem
    "mathqa": DataSet(
        "mathqa",
        "mathqa",
        2985,
        _splits(
            train="train.json",
            validation="dev.json",
            test="test.json mathqa_orig_fields_1000.jsonl",
        ),
        _mathqa,
    ),
}
