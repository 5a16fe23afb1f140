from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runner import SMALL, Ran, succeed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from allocmoe.artifacts import Sensitivity
from tiny import tiny

VOCABULARY = 300
PROSE = """A mixture of experts keeps many small networks in every layer and runs only a few of
them for each token. Which ones is decided by a router, a single matrix whose scores say how well
an expert suits a token. Some layers suffer when they lose an expert and others hardly notice.
"""

MakeFolder = Callable[[PreTrainedModel], Path]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = bytes_, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=bytes_.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([PROSE], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="session")
def make_folder(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> MakeFolder:
    """Saves a model and the tokenizer in a folder of their own."""

    def make(model: PreTrainedModel) -> Path:
        folder = tmp_path_factory.mktemp(str(model.config.model_type))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def model(make_folder: MakeFolder) -> Path:
    """Four MoE layers that run 4 of 8 experts: budgets from 4 to 16."""
    return make_folder(tiny("olmoe", vocab_size=VOCABULARY))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "prose.txt"
    file.write_text("".join(f"{number}: {PROSE}" for number in range(20)))
    return file


@pytest.fixture(scope="session")
def profiled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """A sensitivity, and the run that made it."""
    file = tmp_path_factory.mktemp("profiled") / "new" / "sensitivity.json"
    return file, succeed("profile", model, *SMALL, "-o", file, "--json")


@pytest.fixture(scope="session")
def sensitivity(profiled: tuple[Path, Ran]) -> Path:
    return profiled[0]


@pytest.fixture(scope="session")
def falling_sensitivity(sensitivity: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same model as if it were trained: every expert more lowers the perplexity."""
    measured = Sensitivity.load(sensitivity)
    rows = tuple(
        tuple(10.0 * (1 + (layer + 1) * (ks[-1] - k) ** 2 / 50) for k in ks)
        for layer, ks in enumerate(measured.ks)
    )
    file = tmp_path_factory.mktemp("falling") / "sensitivity.json"
    dataclasses.replace(measured, perplexity=rows).save(file)
    return file


@pytest.fixture(scope="session")
def plan(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uniform at half the budget."""
    file = tmp_path_factory.mktemp("plan") / "uniform.json"
    succeed("plan", "--method", "uniform", "--budget", "8", "--model", model, "-o", file)
    return file
