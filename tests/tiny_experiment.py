"""An experiment of a few quick cells, as a file."""

from __future__ import annotations

from pathlib import Path

_TEXT = """
title = "tiny"
methods = ["uniform", "alloc-l", "alloc-t"]
timed = []
scope = "batch"
seeds = 1

[calibration]
texts = [
  { name = "one", source = "builtin", part = 0 },
  { name = "two", source = "builtin", part = 1 },
]
contexts = ["paper", "single"]
sequences = 2
length = 32
batch_size = 2

[measurement]
texts = [{ name = "other", source = "builtin:heldout", part = 0 }]
sequences = 2

[tasks]
batch_size = 4
limit = 2
answer_tokens = 0
seeds = 1
sweeps = false
groups.NLU = [{ name = "SciQ", task = "sciq", metric = "acc" }]

[speed]
batch_size = 1
prompt_lengths = [4]
decode_tokens = 1
warmups = 0
runs = 1
seed = 0

[models.one]
name = "One"
id = "reference"
full = 48
budgets = [36, 24]
half = 24
published.speedup = {}
published.ablation = { Uniform = [50.0, 40.0] }
published.k_base = {}
published.calibration = {}

[quick]
weights = "reference"
seeds = 1
limit = 1
answer_tokens = 8

[quick.calibration]
texts = [{ name = "one", source = "builtin", part = 0 }]
contexts = ["paper"]
sequences = 2
length = 32
batch_size = 2

[quick.measurement]
texts = [{ name = "other", source = "builtin:heldout", part = 0 }]
sequences = 2

[quick.speed]
batch_size = 1
prompt_lengths = [4]
decode_tokens = 1
warmups = 0
runs = 1
seed = 0
"""


def write_experiment(folder: Path, **changes: str) -> Path:
    """The file; `changes` replace whole lines by the key they begin with."""
    lines = []
    for line in _TEXT.splitlines():
        key = line.split(" = ")[0]
        lines.append(f"{key} = {changes.pop(key)}" if key in changes else line)
    assert not changes
    path = folder / "tiny.toml"
    path.write_text("\n".join(lines))
    return path
