"""A vLLM on the CPU, in an environment of its own: `make test-vllm`."""

from __future__ import annotations

import os

# before vLLM is imported
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
)

from pathlib import Path

import pytest
import torch
from vllm_runner import FAMILIES, model

from allocmoe.models.load import load_model, load_tokenizer


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with its tokenizer, its output layer a copy of the embedding: vLLM's OLMoE
    has no tied ones."""
    folder = tmp_path_factory.mktemp("trained")
    loaded = load_model("reference")
    loaded.lm_head.weight = torch.nn.Parameter(loaded.lm_head.weight.detach().clone())
    loaded.config.tie_word_embeddings = False
    loaded.save_pretrained(folder)
    load_tokenizer("reference").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each tiny model."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        model(family).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}
