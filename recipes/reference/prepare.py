"""Text folder to token shards: decontamination, tokenizer, tokens as uint16 on disk.

    python recipes/reference/prepare.py TEXT_FOLDER -o prepared

TEXT_FOLDER holds .txt or .txt.xz files with documents separated by a line `<|doc|>`, and may hold a
`val.txt` to measure on. Documents that share 13 words in a row with text that will later be used to
calibrate or to measure are dropped: Python's language reference, and whatever --exclude names.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEPARATOR = "\n<|doc|>\n"
END = "<|endoftext|>"
OVERLAP_WORDS = 13
# long texts are cut into blocks for the workers, each a little into the next
BLOCK, EDGE = 1_000_000, 1_000
MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a word's hash is lost

# what the forked workers inherit
_forbidden = np.empty(0, dtype=np.uint64)
_tokenizer: Tokenizer | None = None


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=2048, help="at most 65536")
    parser.add_argument(
        "--exclude",
        type=Path,
        nargs="*",
        default=[],
        metavar="PATH",
        help="what will be measured on: files of any textual format, also .xz, or folders of them",
    )
    parser.add_argument(
        "--apart", action="store_true", help="drop what overlaps with the val.txt of the folder too"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args(words)
    if not 256 < args.vocabulary <= 1 << 16:
        parser.error("--vocabulary is 257 to 65536: every byte, the end, and tokens as uint16")
    return args


def read(path: Path) -> str:
    try:
        if path.suffix == ".xz":
            with lzma.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SystemExit(f"{path} is not text in UTF-8: {error}") from None


def documents(path: Path) -> Iterator[str]:
    yield from (d.strip() for d in read(path).split(SEPARATOR) if d.strip())


def word_runs(text: str) -> np.ndarray:
    """A 64-bit hash of every 13 words in a row: sum of hash(word_j) * MIX^(12 - j), mod 2^64."""
    words = re.findall(r"\w+", text.lower())
    count = len(words) - OVERLAP_WORDS + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    hashes = np.fromiter(map(hash, words), dtype=np.int64, count=len(words)).view(np.uint64)
    runs = np.zeros(count, dtype=np.uint64)
    for j in range(OVERLAP_WORDS):
        runs = runs * MIX + hashes[j : j + count]
    return runs


def unescape(text: str) -> str:
    r"""JSON's \n and \u2019 as what they stand for: else they would stick to the next word."""
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text)
    return re.sub(r"\\[bfnrt]", " ", text)


def files_under(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        else:
            yield path


def blocks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), BLOCK):
            yield text[start : start + BLOCK + EDGE]


def block_runs(block: str) -> np.ndarray:
    """Word runs of a text as it stands and unescaped."""
    texts = (block, unescape(block)) if "\\" in block else (block,)
    return np.unique(np.concatenate([word_runs(text) for text in texts]))


def builtin_text() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def clean(document: str) -> str | None:
    runs = word_runs(document)
    places = np.searchsorted(_forbidden, runs).clip(max=_forbidden.size - 1)
    return None if (_forbidden[places] == runs).any() else document


def encode(document: str) -> np.ndarray:
    assert _tokenizer is not None
    ids = _tokenizer.encode(document).ids
    return np.array([*ids, 0], dtype=np.uint16)  # 0 is the end of a text


def train_tokenizer(sample: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def cleaned(pool: Pool, paths: list[Path]) -> tuple[list[str], int]:
    """The documents that share nothing with what is kept out, and how many do."""
    kept: list[str] = []
    total = 0
    for path in paths:
        texts = list(documents(path))
        total += len(texts)
        kept += [text for text in pool.imap(clean, texts, chunksize=64) if text is not None]
    return kept, total - len(kept)


def write_tokens(pool: Pool, texts: list[str], path: Path) -> dict[str, int]:
    tokens = np.concatenate(list(pool.imap(encode, texts, chunksize=64)))
    tokens.tofile(path)
    size = sum(len(text.encode()) for text in texts)
    return {f"{path.stem}_tokens": int(tokens.size), f"{path.stem}_bytes": size}


def main() -> None:
    global _forbidden, _tokenizer
    args = parse()
    args.output.mkdir(parents=True, exist_ok=True)
    files = sorted(p for p in args.folder.iterdir() if p.name.endswith((".txt", ".txt.xz")))
    train = [path for path in files if path.name != "val.txt"]
    excluded = list(files_under(args.exclude))
    texts = [builtin_text(), *map(read, excluded)]
    # forked, so that all workers hash a word alike and inherit what was found before
    fork = multiprocessing.get_context("fork")
    with fork.Pool(args.processes) as pool:
        _forbidden = np.unique(np.concatenate(list(pool.imap(block_runs, blocks(texts)))))
    print(f"{_forbidden.size} word runs to keep out, from {len(excluded)} files", flush=True)

    with fork.Pool(args.processes) as pool:
        held_out, _ = cleaned(pool, [path for path in files if path not in train])
        if args.apart:
            found = list(pool.imap(block_runs, blocks(held_out)))
            _forbidden = np.unique(np.concatenate([_forbidden, *found]))
    with fork.Pool(args.processes) as pool:
        kept, dropped = cleaned(pool, train)
    print(f"{len(kept)} documents kept, {dropped} overlap", flush=True)

    _tokenizer = train_tokenizer(kept[:: max(1, len(kept) // 20000)], args.vocabulary)
    PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer, eos_token=END, pad_token=END, model_max_length=1 << 20
    ).save_pretrained(args.output / "tokenizer")
    facts = {
        "files": [path.name for path in train],
        "vocabulary": _tokenizer.get_vocab_size(),
        "excluded_files": len(excluded),
        "excluded_word_runs": int(_forbidden.size),
        "documents": len(kept),
        "dropped_documents": dropped,
    }
    with fork.Pool(args.processes) as pool:
        facts |= write_tokens(pool, kept, args.output / "train.bin")
        if held_out:
            facts |= write_tokens(pool, held_out, args.output / "val.bin")
    (args.output / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
