from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from allocmoe import text as text_module
from allocmoe.errors import AllocMoEError
from allocmoe.text import load_text, text_from_ids

WORDS = [f"word number {n} of a text that never repeats itself, {n * n}.\n" for n in range(500)]
ESSAY = "".join(WORDS)


def byte_level_bpe(template: str | None = None) -> PreTrainedTokenizerFast:
    """300 tokens: <s>, </s>, bytes and merges; `template` is what it puts around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    if template is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    return byte_level_bpe()


@pytest.fixture(scope="module")
def with_bos() -> PreTrainedTokenizerFast:
    return byte_level_bpe("<s> $A")


class Bytes:
    """A tokenizer whose tokens are bytes, and that remembers the texts it was given."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, text: str, **kwargs: Any) -> SimpleNamespace:
        self.seen.append(text)
        return SimpleNamespace(input_ids=list(text.encode()))


@pytest.fixture
def essay(tmp_path: Path) -> Path:
    path = tmp_path / "essay.txt"
    path.write_text(ESSAY)
    return path


# --- shapes and contents -------------------------------------------------------------------------


def test_a_text_file_is_cut_into_sequences(essay: Path, plain: PreTrainedTokenizerFast) -> None:
    text = load_text(str(essay), plain, sequences=3, length=17)
    assert text.ids.shape == (3, 17)
    assert text.ids.dtype == torch.long
    info = text.info
    assert (info.source, info.num_sequences, info.sequence_length) == (str(essay), 3, 17)
    assert text.ids.flatten().tolist() == plain(ESSAY).input_ids[: 3 * 17]
    assert ESSAY.startswith(plain.decode(text.ids.flatten()))


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson"])
def test_jsonl_lines_are_joined(
    suffix: str, tmp_path: Path, plain: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / f"lines.{suffix}"
    path.write_text('{"text": "first é", "id": 1}\n\n"second"\n{"text": "third"}\n')
    text = load_text(str(path), plain, sequences=1, length=10)
    assert plain.decode(text.ids[0]) == "first é\nsecond\nthird\n"[: len(plain.decode(text.ids[0]))]
    everything = load_text(str(path), Bytes(), sequences=99, length=2).ids.flatten()
    assert bytes(everything.tolist()).decode() == "first é\nsecond\nthird\n"


def test_a_long_file_is_read_in_whole_lines(tmp_path: Path) -> None:
    lines = "".join(f"{n:08d}\n" for n in range(130_000))  # 1.2 MB: several pieces
    path = tmp_path / "long.txt"
    path.write_text(lines)
    tokenizer = Bytes()
    load_text(str(path), tokenizer, sequences=10**9, length=2)
    pieces = [piece for piece in tokenizer.seen if piece != "a"]  # "a" asks for the prefix
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces)
    assert "".join(pieces) == lines


@pytest.mark.parametrize("fixture", ["plain", "with_bos"])
def test_skip_gives_the_following_sequences(
    fixture: str, essay: Path, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(fixture)
    whole = load_text(str(essay), tokenizer, sequences=7, length=33).ids
    first = load_text(str(essay), tokenizer, sequences=4, length=33).ids
    rest = load_text(str(essay), tokenizer, sequences=3, length=33, skip=4).ids
    assert torch.equal(torch.cat([first, rest]), whole)
    assert len({tuple(row) for row in whole.tolist()}) == 7


def test_a_text_may_end_before_the_sequences_do(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 59)
    text = load_text(str(path), Bytes(), sequences=32, length=20)
    assert text.ids.shape == (2, 20)
    assert text.info.num_sequences == 2
    assert load_text(str(path), Bytes(), sequences=32, length=20, skip=1).ids.shape == (1, 20)


def test_bos_starts_each_sequence_only_if_the_tokenizer_adds_one(
    essay: Path, plain: PreTrainedTokenizerFast, with_bos: PreTrainedTokenizerFast
) -> None:
    body = plain(ESSAY).input_ids
    bos = load_text(str(essay), with_bos, sequences=3, length=17).ids
    assert bos[:, 0].tolist() == [0, 0, 0]
    assert bos[:, 1:].flatten().tolist() == body[: 3 * 16]
    for template in (None, "$A </s>"):
        ids = load_text(str(essay), byte_level_bpe(template), sequences=3, length=17).ids
        assert ids.flatten().tolist() == body[: 3 * 17]
    both = load_text(str(essay), byte_level_bpe("<s> $A </s>"), sequences=3, length=17).ids
    assert torch.equal(both, bos)


def test_the_hash_is_of_the_tokens(essay: Path, plain: PreTrainedTokenizerFast) -> None:
    def sha(source: str, **kwargs: Any) -> str:
        return load_text(source, plain, **{"sequences": 3, "length": 17} | kwargs).info.sha256

    first = sha(str(essay))
    assert first == sha(str(essay))
    copy = essay.with_name("copy.txt")
    copy.write_text(ESSAY)
    assert sha(str(copy)) == first
    assert sha(str(essay), skip=1) != first
    copy.write_text("W" + ESSAY[1:])
    assert sha(str(copy)) != first
    # the same on every machine and in every version: artefacts carry it
    ids = torch.arange(6, dtype=torch.int32).view(2, 3)
    little_endian = b"".join(n.to_bytes(8, "little") for n in range(6))
    assert text_from_ids(ids).info.sha256 == hashlib.sha256(little_endian).hexdigest()


# --- the built-in text ---------------------------------------------------------------------------


def test_builtin_parts_are_large_enough_and_differ(plain: PreTrainedTokenizerFast) -> None:
    parts = [load_text(source, plain) for source in ("builtin", "builtin:heldout")]
    assert [part.ids.shape for part in parts] == [(32, 512)] * 2
    assert parts[0].info.sha256 != parts[1].info.sha256


def test_each_builtin_topic_is_in_one_part_and_both_are_large() -> None:
    seen = []
    for source in ("builtin", "builtin:heldout"):
        tokenizer = Bytes()
        load_text(source, tokenizer, sequences=10**9, length=2)
        seen.append([piece for piece in tokenizer.seen if piece != "a"])
        # enough for 32 sequences of 512 tokens of five bytes each
        assert sum(len(piece.encode()) for piece in seen[-1]) >= 32 * 512 * 5
    assert sorted(seen[0] + seen[1]) == sorted(text + "\n" for text in topics.topics.values())


# --- what is refused -----------------------------------------------------------------------------


def refusal(source: str | Path, **kwargs: Any) -> str:
    with pytest.raises(AllocMoEError) as caught:
        load_text(str(source), Bytes(), **{"sequences": 2, "length": 20} | kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_text_that_is_too_short_is_refused(
    tmp_path: Path, with_bos: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 39)
    assert "has 39 tokens, too few for 2 sequences of 20" in refusal(path, skip=1)
    assert "has 39 tokens, too few for one sequence of 40" in refusal(path, length=40)
    path.write_text("")
    assert "has 0 tokens" in refusal(path)
    assert "at least 2 tokens" in refusal(path, length=1)
    assert "at least 1 sequence" in refusal(path, sequences=0)
    with pytest.raises(AllocMoEError, match="2 tokens is too short for this tokenizer"):
        load_text(str(path), with_bos, length=2)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for source in (tmp_path / "none.txt", tmp_path, "wikitext-2", "builtin:test"):
        message = refusal(source)
        assert repr(str(source)) in message
        assert "wikitext2" in message  # the known names


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut o', "not JSON"),
        ('{"content": "x"}', "expected"),
        ('{"text": null}', "expected"),
        ("[1, 2]", "expected"),
        ("7", "expected"),
    ],
)
def test_a_bad_jsonl_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(f"{json.dumps({'text': 'good'})}\n\n{line}\n")
    assert refusal(path).startswith(f"{path}:3: {reason}")


@pytest.mark.parametrize("name", ["latin.txt", "latin.jsonl"])
def test_text_that_is_not_utf8_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes('"caf\xe9"\n'.encode("latin-1"))
    assert refusal(path).startswith(f"{path} is not UTF-8 text")


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 1), (1, 2, 3)])
def test_token_ids_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(AllocMoEError, match="token ids must be"):
        text_from_ids(torch.zeros(shape, dtype=torch.long))


# --- data sets by name ---------------------------------------------------------------------------


class FakeHub:
    """Stands for `datasets.load_dataset`: takes what the real one takes, counts the rows."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        self.rows_read = 0
        self.call: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[dict[str, str]]:
        self.call = self.signature.bind(*args, **kwargs).arguments
        return self._rows()

    def _rows(self) -> Iterator[dict[str, str]]:
        for n in range(1000):
            self.rows_read += 1
            yield {"text": f"row {n}"}


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


C4_FILE = "en/c4-train.00000-of-01024.json.gz"


@pytest.mark.parametrize(
    ("source", "path", "name", "split", "data_files"),
    [
        ("wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1", "train", None),
        ("wikitext2:test", "Salesforce/wikitext", "wikitext-2-raw-v1", "test", None),
        ("c4", "allenai/c4", None, "train", C4_FILE),
        ("pile", "monology/pile-uncopyrighted", None, "train", None),
        ("pile:validation", "monology/pile-uncopyrighted", None, "validation", None),
    ],
)
def test_a_data_set_is_streamed_as_far_as_needed(
    source: str,
    path: str,
    name: str | None,
    split: str,
    data_files: str | None,
    datasets: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # no file here has the name of a data set
    hub = FakeHub(inspect.signature(datasets.load_dataset))
    monkeypatch.setattr(datasets, "load_dataset", hub)
    text = load_text(source, Bytes(), sequences=2, length=20)
    expected = dict(path=path, name=name, split=split, data_files=data_files, streaming=True)
    assert hub.call == expected
    assert hub.rows_read <= 2 * 20
    assert bytes(text.ids[0].tolist()).decode().startswith("row 0")
    assert text.info.source == source


def test_a_file_goes_before_a_data_set_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c4").write_text("plastic explosive")
    monkeypatch.chdir(tmp_path)
    text = load_text("c4", Bytes(), sequences=1, length=7)
    assert bytes(text.ids[0].tolist()) == b"plastic"


@pytest.mark.parametrize("late", [False, True])
def test_a_failing_data_set_gives_one_line(
    late: bool, datasets: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "row"}
        raise ConnectionError("the hub is away\nand a second line")

    def load_dataset(*args: Any, **kwargs: Any) -> Iterator[dict[str, str]]:
        if late:
            return rows()
        raise ConnectionError("the hub is away\nand a second line")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = refusal("wikitext2")
    assert message == "the data set Salesforce/wikitext cannot be loaded: the hub is away"


def test_a_missing_datasets_library_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'allocmoe[datasets]'" in refusal("c4")


def test_the_two_builtin_parts_share_no_paragraph() -> None:
    """Topics repeat each other's text, so a split by name alone would leak."""

    def paragraphs(heldout: bool) -> set[str]:
        pieces = text_module._builtin(heldout=heldout)
        return {p.strip() for piece in pieces for p in piece.split("\n\n") if len(p) > 60}

    assert paragraphs(False)
    assert not paragraphs(False) & paragraphs(True)
