"""The finished cells of an experiment, one JSON file each, and what they belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allocmoe.artifacts import (
    Analysis,
    Artifact,
    Benchmark,
    Evaluation,
    Plan,
    Sensitivity,
    TaskResult,
    now,
    package_versions,
)
from allocmoe.codec import check_writable, decode, read_json, write_json
from allocmoe.errors import AllocMoEError
from allocmoe.experiment.grid import Cell
from allocmoe.experiment.worker import Job, plain_paths

_ARTIFACTS: dict[str, type[Artifact]] = {
    "profile": Sensitivity,
    "plan": Plan,
    "text": Evaluation,
    "analysis": Analysis,
    "speed": Benchmark,
}


@dataclass(frozen=True)
class Store:
    """A folder. Files are written whole, so a kill loses at most the cells that were running."""

    folder: Path
    experiment: str

    @classmethod
    def open(cls, folder: Path, job: Job, *, begin: bool = True) -> Store:
        """The folder for this experiment; one that holds another is refused.

        Without `begin` nothing is written.
        """
        file = folder / "experiment.json"
        if begin:
            check_writable(file)
        described = job.identity()
        if file.exists():
            found = read_json(file)
            plain = plain_paths(found) if isinstance(found, dict) else found
            if plain != described:
                raise AllocMoEError(
                    f"{folder} holds another experiment ({_difference(plain, described)}): "
                    "choose another folder"
                )
            # cells are marked with the description as it was written
            described = found
        elif begin:
            write_json(file, described)
        text = json.dumps(described, sort_keys=True)
        return cls(folder, hashlib.sha256(text.encode()).hexdigest()[:16])

    def save(self, cell: Cell, found: dict[str, Any]) -> None:
        self._write(cell, {"needs": list(cell.needs), **found})

    def leave_out(self, cell: Cell, reason: str) -> None:
        """Remembers that the cell cannot be had; `retry` forgets it."""
        self._write(cell, {"left_out": reason, "created": now(), "versions": package_versions()})

    def load(self, cell: Cell) -> dict[str, Any] | None:
        """What the cell gave; None while it is not finished with all that it needs now."""
        found = self._read(cell)
        if found is None or "result" not in found or found.get("needs") != list(cell.needs):
            return None
        try:
            _check_result(cell, found["result"])
        except AllocMoEError as error:
            raise AllocMoEError(f"{self._path(cell)}: {error}; delete it to run it again") from None
        return found

    def left_out(self, cell: Cell) -> str | None:
        """Why the cell cannot be had; None if nobody said so."""
        found = self._read(cell)
        return None if found is None else found.get("left_out")

    def retry(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            if self.left_out(cell) is not None:
                self._path(cell).unlink()

    def _path(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.id}.json"

    def _write(self, cell: Cell, found: dict[str, Any]) -> None:
        write_json(self._path(cell), {"cell": cell.id, "experiment": self.experiment, **found})

    def _read(self, cell: Cell) -> dict[str, Any] | None:
        path = self._path(cell)
        if not path.exists():
            return None
        found = read_json(path)
        if not isinstance(found, dict) or found.get("cell") != cell.id:
            raise AllocMoEError(f"{path}: not the result of {cell.id}; delete it to run it again")
        if found.get("experiment") != self.experiment:
            raise AllocMoEError(f"{path}: of another experiment; delete it to run it again")
        return found


def _check_result(cell: Cell, result: Any) -> None:
    if cell.kind != "task":
        _ARTIFACTS[cell.kind].from_json(result, "result")
        return
    if not isinstance(result, dict):
        raise AllocMoEError("result: expected an object")
    more = ("plan", "hits", "data")
    decode(TaskResult, {key: value for key, value in result.items() if key not in more}, "result")


def _difference(found: Any, described: Any, where: str = "") -> str:
    """The first place in which two descriptions differ."""
    if isinstance(found, dict) and isinstance(described, dict):
        for key in [*described, *found]:
            if found.get(key) != described.get(key):
                return _difference(found.get(key), described.get(key), f"{where}{key}: ")
    return f"{where}{str(found)[:60]}, here {str(described)[:60]}"
