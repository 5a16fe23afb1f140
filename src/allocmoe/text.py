"""Calibration and evaluation text: token sequences of one length, and where they came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from allocmoe.artifacts import TextInfo
from allocmoe.errors import AllocMoEError, first_line
from allocmoe.progress import Progress

# name -> (data set, its configuration, the field with the text, default split, a data file)
_DATASETS: dict[str, tuple[str, str | None, str, str, str | None]] = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "text", "train", None),
    "c4": ("allenai/c4", None, "text", "train", "en/c4-train.00000-of-01024.json.gz"),
    "pile": ("monology/pile-uncopyrighted", None, "text", "train", None),
}
_BUILTIN = ("builtin", "builtin:heldout")

SOURCES = f"{', '.join(_BUILTIN)}, {', '.join(_DATASETS)} (NAME:SPLIT picks a split), or a file"


@dataclass(frozen=True)
class Text:
    """`num_sequences` sequences of one length, as token ids `[N, S]`."""

    ids: torch.Tensor
    info: TextInfo


def load_text(
    source: str, tokenizer: Any, *, sequences: int = 32, length: int = 512, skip: int = 0
) -> Text:
    """The first `sequences` sequences of `length` tokens after `skip` of them.

    Documents are joined and cut. Each sequence starts with the tokens, such as BOS, that the
    tokenizer itself puts before a text.
    """
    if sequences < 1 or length < 2 or skip < 0:
        raise AllocMoEError("text needs at least 1 sequence of at least 2 tokens, and no skip < 0")
    prefix = _prefix(tokenizer)
    body = length - len(prefix)
    if body < 2:
        raise AllocMoEError(f"a sequence of {length} tokens is too short for this tokenizer")
    needed = (skip + sequences) * body
    tokens: list[int] = []
    for piece in _pieces(source):
        tokens.extend(tokenizer(piece, add_special_tokens=False, verbose=False).input_ids)
        if len(tokens) >= needed:
            break
    available = len(tokens) // body
    if available <= skip:
        raise AllocMoEError(
            f"{source} has {len(tokens)} tokens, too few for "
            + (f"one sequence of {length}" if skip == 0 else f"{skip + 1} sequences of {length}")
            + "; take a longer text or a smaller --length"
        )
    rows = [
        prefix + tokens[i * body : (i + 1) * body]
        for i in range(skip, min(available, skip + sequences))
    ]
    return text_from_ids(torch.tensor(rows), source)


def text_from_ids(ids_NS: torch.Tensor, source: str = "token ids") -> Text:
    """A `Text` of token ids that the caller has made."""
    if ids_NS.dim() != 2 or ids_NS.shape[0] < 1 or ids_NS.shape[1] < 2:
        raise AllocMoEError(f"token ids must be [sequences, length >= 2], not {[*ids_NS.shape]}")
    ids = ids_NS.long().cpu()
    sha256 = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    return Text(ids, TextInfo(source, sha256, ids.shape[0], ids.shape[1]))


def check_disjoint(text: Text, other: Text) -> None:
    """Text to measure on must not share a sequence with the text calibrated on."""
    seen = {tuple(row) for row in text.ids.tolist()}
    shared = sum(tuple(row) in seen for row in other.ids.tolist())
    if shared:
        raise AllocMoEError(
            f"{shared} sequences of {other.info.source} are also in the text profiled on, "
            f"{text.info.source}: measure on other text"
        )


def check_ids(model: Any, ids: torch.Tensor) -> None:
    """Before the first forward: an id beyond the embedding is an IndexError deep inside."""
    rows, largest = model.get_input_embeddings().weight.shape[0], int(ids.max())
    if largest >= rows:
        raise AllocMoEError(
            f"the text has the token id {largest}, but the model's embedding has {rows} rows: "
            "take the tokenizer that belongs to the model"
        )


def note_length(model: Any, text: Text, progress: Progress) -> None:
    length = text.info.sequence_length
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and length > most:
        progress.note(
            f"note: sequences of {length} tokens are longer than the {most} positions of the "
            "model, whose perplexity may explode there; take a smaller --length"
        )


def same_source(source: str, other: str) -> bool:
    """Whether two names mean the same text."""

    def plain(name: str) -> str:
        head, _, split = name.partition(":")
        if head in _DATASETS and not Path(name).exists():
            return f"{head}:{split or _DATASETS[head][3]}"
        return name if name in _BUILTIN else str(Path(name).resolve())

    return plain(source) == plain(other)


def _prefix(tokenizer: Any) -> list[int]:
    plain = tokenizer("a", add_special_tokens=False).input_ids
    dressed = tokenizer("a").input_ids
    for start in range(len(dressed)):
        if dressed[start : start + len(plain)] == plain:
            return list(dressed[:start])
    return []


def _pieces(source: str) -> Iterator[str]:
    """The text in pieces, so that no more is read and tokenised than is needed."""
    if source in _BUILTIN:
        yield from _builtin(heldout=source != "builtin")
        return
    name, _, split = source.partition(":")
    if name in _DATASETS and not Path(source).exists():
        yield from _dataset(name, split)
        return
    yield from _file(Path(source))


def _builtin(heldout: bool) -> Iterator[str]:
    """Python's own language reference, which every Python carries, in two parts.

    Topics repeat each other's paragraphs. Those that share one stay together; the largest such
    group is for calibration, and of the others those are held out whose first name says so.
    """
    from pydoc_data.topics import topics

    groups: list[set[str]] = []
    paragraphs: dict[str, set[str]] = {
        name: {p.strip() for p in text.split("\n\n") if len(p) > 60}
        for name, text in topics.items()
    }
    for name in sorted(topics):
        related = [g for g in groups if any(paragraphs[name] & paragraphs[other] for other in g)]
        groups = [g for g in groups if g not in related] + [{name}.union(*related)]
    largest = max(groups, key=lambda group: sum(len(topics[name]) for name in group))
    for group in sorted(groups, key=min):
        apart = hashlib.sha256(min(group).encode()).digest()[0] % 2 == 0
        if (apart and group is not largest) == heldout:
            for name in sorted(group):
                yield topics[name] + "\n"


def _dataset(name: str, split: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise AllocMoEError(
            f"the text {name} needs the datasets library: pip install 'allocmoe[datasets]'"
        ) from None
    path, configuration, field, default_split, file = _DATASETS[name]
    try:
        rows = datasets.load_dataset(
            path, configuration, split=split or default_split, data_files=file, streaming=True
        )
        for row in rows:
            yield row[field]
    except AllocMoEError:
        raise
    except Exception as error:
        raise AllocMoEError(f"the data set {path} cannot be loaded: {first_line(error)}") from error


def _file(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise AllocMoEError(f"no text named {str(path)!r}: it is no file; known names: {SOURCES}")
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix in (".jsonl", ".ndjson"):
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _json_text(path, number, line) + "\n"
            else:
                while piece := file.read(1 << 20):
                    # end at a line, so that no word is cut in two
                    yield piece + file.readline()
    except UnicodeDecodeError as error:
        raise AllocMoEError(f"{path} is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise AllocMoEError(f"{path} cannot be read: {error.strerror}") from None


def _json_text(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise AllocMoEError(f"{path}:{number}: not JSON: {error.msg}") from None
    text = row.get("text") if isinstance(row, dict) else row
    if not isinstance(text, str):
        raise AllocMoEError(f'{path}:{number}: expected {{"text": "..."}} or a string')
    return text
