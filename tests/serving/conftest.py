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
from vllm_runner import FAMILIES, model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each tiny model."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        model(family).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}
