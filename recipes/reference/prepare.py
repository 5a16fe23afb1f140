"""Text folder to token shards: tokenizer, decontamination, tokens as uint16 on disk.

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
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEPARATOR = "\n<|doc|>\n"
END = "<|endoftext|>"
OVERLAP_WORDS = 13

_forbidden: set[int] = set()
_tokenizer: Tokenizer | None = None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="text files")
    return parser.parse_args()


def read(path: Path) -> str:
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    return path.read_text(encoding="utf-8")


def documents(path: Path) -> Iterator[str]:
    yield from (d.strip() for d in read(path).split(SEPARATOR) if d.strip())


def word_runs(text: str) -> Iterator[int]:
    words = re.findall(r"\w+", text.lower())
    for i in range(len(words) - OVERLAP_WORDS + 1):
        yield hash(tuple(words[i : i + OVERLAP_WORDS]))


def builtin_text() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def clean(document: str) -> str | None:
    return None if any(run in _forbidden for run in word_runs(document)) else document


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


def main() -> None:
    global _forbidden, _tokenizer
    args = parse()
    args.output.mkdir(parents=True, exist_ok=True)
    for text in (builtin_text(), *(read(path) for path in args.exclude)):
        _forbidden.update(word_runs(text))
    files = sorted(p for p in args.folder.iterdir() if p.name.endswith((".txt", ".txt.xz")))
    train = [path for path in files if path.name != "val.txt"]
    # forked workers inherit the forbidden runs, and later the tokenizer
    fork = multiprocessing.get_context("fork")
    kept: list[str] = []
    total = 0
    with fork.Pool() as pool:
        for path in train:
            found = list(documents(path))
            total += len(found)
            kept += [d for d in pool.imap(clean, found, chunksize=64) if d is not None]
    print(f"{len(kept)} of {total} documents kept, {total - len(kept)} overlap", flush=True)

    _tokenizer = train_tokenizer(kept[:: max(1, len(kept) // 20000)], args.vocabulary)
    PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer, eos_token=END, pad_token=END, model_max_length=1 << 20
    ).save_pretrained(args.output / "tokenizer")
    with fork.Pool() as pool:
        tokens = np.concatenate(list(pool.imap(encode, kept, chunksize=64)))
        tokens.tofile(args.output / "train.bin")
        facts = {
            "files": [path.name for path in train],
            "documents": len(kept),
            "dropped_documents": total - len(kept),
            "train_tokens": int(tokens.size),
            "train_bytes": sum(len(d.encode()) for d in kept),
        }
        if (args.folder / "val.txt").exists():
            held_out = [d for d in map(clean, documents(args.folder / "val.txt")) if d is not None]
            held = np.concatenate(list(pool.imap(encode, held_out)))
            held.tofile(args.output / "val.bin")
            facts["val_tokens"] = int(held.size)
            facts["val_bytes"] = sum(len(d.encode()) for d in held_out)
    (args.output / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
