"""Loads models and tokenizers from a hub id or a folder, and says plainly what is wrong."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allocmoe.errors import AllocMoEError, first_line
from allocmoe.models.families import REFUSED

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

# the small model that comes with the package
REFERENCE = "reference"


def place(name: str) -> str:
    """Where `name` is loaded from: itself, but for the model that comes with the package."""
    if name == REFERENCE and not Path(name).exists():
        return str(Path(__file__).parent.parent / "reference")
    return name


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A causal language model, ready for inference.

    device: `auto` is the first CUDA device or else the CPU; `spread` lets accelerate place the
    layers over all devices; anything else is a torch device.
    """
    from transformers import AutoModelForCausalLM

    wanted_dtype, wanted_device = to_dtype(dtype), to_device(device)
    config = _load_config(name, revision, trust_remote_code)
    try:
        load: Any = AutoModelForCausalLM.from_pretrained
        model, report = load(
            place(name),
            config=config,
            dtype=wanted_dtype,
            device_map="auto" if wanted_device is None else None,
            revision=revision,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # whatever a broken checkpoint makes the libraries raise
        raise AllocMoEError(f"{name} cannot be loaded: {first_line(error)}") from error
    # transformers fills what is missing with random numbers
    lacking = sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"]))
    if lacking:
        raise AllocMoEError(f"{name} lacks weights: {len(lacking)} tensors, such as {lacking[0]}")
    if wanted_device is not None:
        model.to(wanted_device)
    model.config._name_or_path = name
    loaded: nn.Module = model.eval()
    return loaded


def load_skeleton(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """The model without its weights: enough to know its layers, free of cost."""
    from transformers import AutoModelForCausalLM

    config = _load_config(name, revision, trust_remote_code)
    try:
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config
            model: nn.Module = build(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever sizes that do not fit make the libraries raise
        raise AllocMoEError(f"{name} cannot be built: {first_line(error)}") from error
    model.config._name_or_path = name  # type: ignore[union-attr]
    return model.eval()


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    from transformers import AutoTokenizer

    _check_name(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            place(name), revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise AllocMoEError(f"{name} has no usable tokenizer: {first_line(error)}") from error
    # without tokenizer files transformers makes one up that knows nothing
    if not tokenizer("The quick brown fox").input_ids or len(tokenizer) < 16:
        raise AllocMoEError(
            f"{name} has no tokenizer: put its tokenizer files (tokenizer.json, "
            "tokenizer_config.json) beside the weights"
        )
    return tokenizer


def _load_config(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    _check_name(name)
    try:
        config = AutoConfig.from_pretrained(
            place(name), revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever a broken config makes the libraries raise
        if not Path(place(name)).is_dir():
            raise AllocMoEError(
                f"there is no folder {name}, and the hub did not give it: {first_line(error)}"
            ) from error
        reason = first_line(error).rstrip(":")
        raise AllocMoEError(f"{name} is no model: {reason}") from error
    # before gigabytes of weights are read
    family = str(config.model_type).removesuffix("_text")
    if family in REFUSED:
        raise AllocMoEError(f"the family {family} is not supported: {REFUSED[family]}")
    return config


def _check_name(name: str) -> None:
    path = Path(place(name))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise AllocMoEError(f"{name} is no model folder: it has no config.json")
    elif path.exists():
        raise AllocMoEError(f"{name} is a file, not a model folder")
    elif not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise AllocMoEError(f"there is no folder {name}")


def to_dtype(name: str) -> Any:
    if name not in ("auto", "float32", "bfloat16", "float16", "float64"):
        raise AllocMoEError(f"unknown dtype {name!r}: take auto, float32, bfloat16 or float16")
    return "auto" if name == "auto" else getattr(torch, name)


def to_device(name: str) -> torch.device | None:
    """The device, or None to let accelerate spread the model."""
    if name == "spread":
        if importlib.util.find_spec("accelerate") is None:
            raise AllocMoEError(
                "spreading a model over devices needs accelerate: "
                "pip install 'allocmoe[device-map]'"
            )
        return None
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise AllocMoEError(f"unknown device {name!r}: take auto, spread, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise AllocMoEError(
            f"the device {name} was asked for, but there are {torch.cuda.device_count()} CUDA "
            "devices here"
        )
    return device
