"""Finds the artefacts in a folder and makes sure that they belong together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from allocmoe.artifacts import Artifact, Evaluation, ModelInfo, Quality, TextInfo, load_artifact
from allocmoe.codec import read_json
from allocmoe.errors import AllocMoEError

A = TypeVar("A", bound=Artifact)

# also of a file that is cut off, and so is no JSON
_KIND = re.compile(r'"kind"\s*:\s*"allocmoe\.')


@dataclass(frozen=True)
class Measured:
    """A row of an evaluation and the file it comes from."""

    file: str
    quality: Quality


@dataclass(frozen=True)
class Bundle:
    """The artefacts of one model, by their path inside the folder."""

    artifacts: dict[str, Artifact]

    def of(self, kind: type[A]) -> list[tuple[str, A]]:
        return [(path, a) for path, a in self.artifacts.items() if isinstance(a, kind)]

    @property
    def model(self) -> ModelInfo:
        """The model under the id that most files use; weights that were read come first."""
        models = [artifact.model for artifact in self.artifacts.values()]
        ids = [model.id for model in models]
        return max(models, key=lambda m: (m.fingerprint is not None, ids.count(m.id)))

    @property
    def full_budget(self) -> int:
        return sum(self.model.k_orig)

    def measured(self) -> list[tuple[TextInfo | None, list[Measured]]]:
        """The rows of all evaluations, those on one text together, each row once."""
        groups: dict[TextInfo | None, list[Measured]] = {}
        for path, evaluation in self.of(Evaluation):
            rows = groups.setdefault(evaluation.text, [])
            seen = {row.quality for row in rows}
            rows += [Measured(path, q) for q in evaluation.rows if q not in seen]
        return sorted(groups.items(), key=lambda group: -len(group[1]))


def gather(directory: Path) -> Bundle:
    if not directory.is_dir():
        what = "not a folder" if directory.exists() else "no such folder"
        raise AllocMoEError(f"{directory}: {what}")
    artifacts: dict[str, Artifact] = {}
    for path in sorted(directory.rglob("*.json")):
        if path.is_file() and _is_artifact(path):
            artifacts[path.relative_to(directory).as_posix()] = load_artifact(path)
    if not artifacts:
        raise AllocMoEError(f"{directory}: no allocmoe artefact (*.json) in it")
    _check_one_model(artifacts)
    return Bundle(artifacts)


def _is_artifact(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise AllocMoEError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not _KIND.search(text):
        return False
    data = read_json(path)
    kind = data.get("kind") if isinstance(data, dict) else None
    return isinstance(kind, str) and kind.startswith("allocmoe.")


def _check_one_model(artifacts: dict[str, Artifact]) -> None:
    models = [(path, artifact.model) for path, artifact in artifacts.items()]
    first, model = models[0]
    for path, other in models[1:]:
        difference = model.difference(other)
        if difference is not None:
            raise AllocMoEError(
                f"{first} and {path} are of different models: {difference}; "
                "a report is of one model"
            )
    read = [(path, m.fingerprint) for path, m in models if m.fingerprint is not None]
    for path, fingerprint in read[1:]:
        if fingerprint != read[0][1]:
            raise AllocMoEError(
                f"{read[0][0]} and {path} are of different weights: fingerprint {read[0][1]}, "
                f"here {fingerprint}; a report is of one model"
            )


def text_label(text: TextInfo | None) -> str:
    if text is None:
        return "text not recorded"
    return f"{text.source}, {text.num_sequences} x {text.sequence_length} tokens"


def best_within_budget(rows: Sequence[Measured]) -> Measured | None:
    """The lowest rise among the rows that keep to their budget."""
    kept = [row for row in rows if row.quality.keeps_budget]
    return min(kept, key=lambda row: row.quality.log_rise, default=None)
