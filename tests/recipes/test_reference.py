"""The training recipe, end to end on a few kilobytes."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import allocmoe
from allocmoe.models import inspect_model, load

RECIPE = Path(__file__).parents[2] / "recipes" / "reference"


def run(*words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_from_text_to_a_model_that_loads(tmp_path: Path) -> None:
    folder, prepared, model = tmp_path / "text", tmp_path / "prepared", tmp_path / "model"
    folder.mkdir()
    stories = [f"Story {i}. " + f"the cat number {i} sat on mat {i * 7}. " * 30 for i in range(40)]
    leak = topics["if"]
    with lzma.open(folder / "a.txt.xz", "wt") as file:
        file.write("\n<|doc|>\n".join([*stories[:30], leak]))
    (folder / "val.txt").write_text("\n<|doc|>\n".join(stories[30:]))
    run(RECIPE / "prepare.py", folder, "-o", prepared, "--vocabulary", "300")
    facts = json.loads((prepared / "facts.json").read_text())
    # the document from the language reference is dropped, the others stay
    assert (facts["documents"], facts["dropped_documents"]) == (30, 1)
    sizes = "--layers 2 --experts 4 --top-k 2 --hidden 32 --heads 2 --expert-width 16"
    steps = "--length 32 --batch 4 --max-steps 3"
    run(RECIPE / "train.py", prepared, "-o", model, *sizes.split(), *steps.split())
    training = json.loads((model / "training.json").read_text())
    assert training["steps"] == 3
    assert training["val_bits_per_byte"] > 0
    loaded, tokenizer = load.load_model(str(model)), load.load_tokenizer(str(model))
    assert inspect_model(loaded).k_orig == (2, 2)
    text = allocmoe.load_text(str(folder / "val.txt"), tokenizer, sequences=2, length=16)
    assert allocmoe.evaluate(loaded, {}, text).rows[0].perplexity > 1
