"""lm-eval's tasks on data sets that lie in a folder, in the formats they were published in.

lm-eval takes its data from the hub. `prepare_tasks` writes the rows that the hub would give, and
for each task a YAML of the same name that includes lm-eval's own and says where the rows are.
Prompts, examples, filters and metrics stay lm-eval's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from allocmoe.codec import write_text
from allocmoe.errors import AllocMoEError
from allocmoe.evaluation.tasks import require_lm_eval
from allocmoe.experiment.data_sets import DATA_SETS, DataSet

# of a task, as lm-eval's YAML has it
Config = dict[str, Any]

# in the order in which lm-eval looks for examples
_SPLITS = ("fewshot_split", "training_split", "validation_split", "test_split")


@dataclass(frozen=True)
class PreparedTasks:
    """Tasks for `load_tasks(names, folder)`.

    missing: the others, with the reason. notes: how what is there differs from the hub's data.
    counts: items that are evaluated, by task.
    """

    folder: Path
    names: tuple[str, ...]
    missing: dict[str, str]
    notes: tuple[str, ...]
    counts: dict[str, int]


def prepare_tasks(names: Sequence[str], data: Path | None, folder: Path) -> PreparedTasks:
    """Writes lm-eval's tasks `names` and their rows to `folder`.

    data: has a folder for each data set; None leaves the data to the hub. A group is made of those
    of its parts that are there.
    """
    if data is not None and not data.is_dir():
        raise AllocMoEError(f"{data}: no such folder of data sets")
    prepared, missing = {}, {}
    for name in names:
        if name not in DATA_SETS:
            missing[name] = f"no data set is known for it; known: {', '.join(DATA_SETS)}"
            continue
        task = _Task(name, DATA_SETS[name], data, folder.absolute())
        reason = task.prepare()
        if reason is None:
            prepared[name] = task
        else:
            missing[name] = reason
    notes = [f"{name}: {note}" for name, task in prepared.items() for note in task.notes]
    lent = [name for name, task in prepared.items() if task.lent]
    if lent:
        notes.append(f"only evaluated items to take examples from: {', '.join(lent)}")
    return PreparedTasks(
        folder=folder,
        names=tuple(prepared),
        missing=missing,
        notes=tuple(notes),
        counts={} if data is None else {name: task.count for name, task in prepared.items()},
    )


@dataclass
class _Task:
    """A task, or a group with its parts. lent: whether its examples are evaluated items."""

    name: str
    data_set: DataSet
    data: Path | None
    folder: Path
    count: int = 0
    lent: bool = False
    notes: list[str] = field(default_factory=list)

    @cached_property
    def _index(self) -> Mapping[str, Any]:
        return _entries(self.data_set.tasks)

    def prepare(self) -> str | None:
        """The reason if it cannot be had."""
        parts = self._parts(self.name)
        there = [part for part in parts if self._write_part(part)]
        if not there:
            return self._reason(parts)
        if there != [self.name]:
            self._write_group(self.name, there)
        if self.data is not None and self.count != self.data_set.size:
            some = f", {len(there)} of {len(parts)} parts" if len(there) < len(parts) else ""
            self.notes.append(f"{self.count} items of {self.data_set.size}{some}")
        return None

    def _members(self, name: str) -> list[str]:
        """The tasks and groups directly in a group or tag; none of a task."""
        entry = self._index[name]
        if entry.cfg is None:
            return sorted(entry.tags)
        members: list[str] = []
        for member in entry.cfg["task"] if "group" in entry.cfg else ():
            members += self._members(member) if self._index[member].cfg is None else [member]
        return members

    def _parts(self, name: str) -> list[str]:
        members = self._members(name)
        return [part for member in members for part in self._parts(member)] or [name]

    def _reason(self, parts: Sequence[str]) -> str:
        assert self.data is not None
        if not (self.data / self.data_set.folder).is_dir():
            return f"no folder {self.data_set.folder} in {self.data}"
        config = self._index[parts[0]].cfg
        file = self.data_set.names(config.get("dataset_name") or "", _evaluated(config))[0]
        like = " or the like" if len(parts) > 1 else ""
        return f"no {file}{like} in {self.data / self.data_set.folder}"

    def _write_part(self, part: str) -> bool:
        """Whether it is there."""
        entry, yaml = self._index[part], self.folder / f"{part}.yaml"
        # no tags: they would gather parts of an earlier time
        config: Config = {"include": str(entry.yaml_path), "task": part, "tag": None}
        if self.data is not None:
            files = self._find(self.data / self.data_set.folder, entry.cfg)
            if _evaluated(entry.cfg) not in files:
                yaml.unlink(missing_ok=True)
                return False
            config |= self._write_rows(part, entry.cfg, files)
        if self.data_set.answer_filter is not None:
            filters = entry.cfg["filter_list"]
            config["filter_list"] = [f | {"name": self.data_set.answer_filter} for f in filters]
        _write_json(yaml, config)
        return True

    def _find(self, folder: Path, config: Config) -> dict[str, Path]:
        """The files by the splits that a task reads, if they are there."""
        splits = dict.fromkeys(config[key] for key in _SPLITS if config.get(key))
        files = {s: self.data_set.find(folder, config.get("dataset_name") or "", s) for s in splits}
        return {split: file for split, file in files.items() if file is not None}

    def _write_rows(self, part: str, config: Config, files: Mapping[str, Path]) -> Config:
        """What tells lm-eval where the rows are."""
        written = {}
        for split, file in files.items():
            rows = self.data_set.rows(file)
            path = self.folder / f"{part}-{split}.jsonl"
            _write(path, "".join(json.dumps(row) + "\n" for row in rows))
            written[split] = str(path)
            if split == _evaluated(config):
                self.count += len(rows)
            remark = self.data_set.remarks.get(file.name)
            if remark is not None:
                self.notes.append(remark)
        where: Config = {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": written},
            **{key: None for key in _SPLITS if config.get(key) not in (None, *files)},
        }
        if _examples(config, files) == _evaluated(config) != _examples(config):
            self.lent = True
            # said outright, so that lm-eval leaves an item out of its own examples
            where["fewshot_split"] = config.get("test_split")
        return where

    def _write_group(self, name: str, there: Sequence[str]) -> None:
        entry = self._index[name]
        members = [m for m in self._members(name) if {*self._parts(m)} & {*there}]
        config: Config = {"group": name, "task": members}
        if entry.cfg is None:  # a tag, which lm-eval would take apart
            config["aggregate_metric_list"] = [{"metric": "exact_match", "weight_by_size": True}]
        else:
            config["include"] = str(entry.yaml_path)
        _write_json(self.folder / f"{name}.yaml", config)
        for member in members:
            if self._members(member):
                self._write_group(member, there)


def _entries(folder: str) -> Mapping[str, Any]:
    """lm-eval's entries for the tasks, groups and tags in one of its folders."""
    require_lm_eval()
    from lm_eval.tasks import manager

    path = Path(manager.__file__).parent / folder
    found = manager.TaskManager(include_path=str(path), include_defaults=False)
    index: Mapping[str, Any] = found.task_index
    return index


def _evaluated(config: Config) -> str:
    split: str = config.get("test_split") or config["validation_split"]
    return split


def _examples(config: Config, there: Mapping[str, Path] | None = None) -> str | None:
    """The split that examples come from, by lm-eval's rule; None if its YAML has them."""
    if "samples" in config.get("fewshot_config", {}):
        return None
    splits: list[str] = [config[key] for key in _SPLITS if config.get(key)]
    return next(split for split in splits if there is None or split in there)


def _write(path: Path, text: str) -> None:
    # what was cached for a file stays valid while it is untouched
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)


def _write_json(path: Path, data: Config) -> None:
    """JSON is YAML too."""
    _write(path, json.dumps(data, indent=2) + "\n")
