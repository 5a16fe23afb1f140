"""Finds the MoE layers of a loaded model and tells what they are."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allocmoe.artifacts import ModelInfo
from allocmoe.errors import AllocMoEError
from allocmoe.models.families import FAMILIES, REFUSED, Family, family_of

_ROUTER_NAMES = ("gate", "router")


@dataclass(frozen=True)
class MoELayer:
    """One decoder layer with routed experts. `index` counts MoE layers, `decoder_index` all."""

    index: int
    decoder_index: int
    name: str
    experts: Any
    block: nn.Module
    router: nn.Module
    k_orig: int
    num_experts: int

    @property
    def top_k_owner(self) -> nn.Module:
        """The module whose `top_k` the routing reads."""
        return self.router if hasattr(self.router, "top_k") else self.block


@dataclass(frozen=True)
class MoEModel:
    """A model with its MoE layers. `decoder` is the module that runs the stack `decoder_layers`."""

    model: nn.Module
    family: Family
    layers: tuple[MoELayer, ...]
    decoder: nn.Module
    decoder_layers: nn.ModuleList
    info: ModelInfo

    @property
    def k_orig(self) -> tuple[int, ...]:
        return self.info.k_orig


def inspect_model(model: nn.Module) -> MoEModel:
    """The MoE layers of `model`; refuses models without, and families that cannot be supported."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "has_gate") and hasattr(module, "num_experts")
    ]
    name = _family_name(model, found)
    if not found and name not in REFUSED:
        if name in FAMILIES:
            raise AllocMoEError(
                f"this {name} model has no MoE layer that goes through the common experts call: "
                "it is dense, or its transformers version is too old (5.17 or newer is needed)"
            )
        raise AllocMoEError(f"{_id(model)} ({name}) is not a Mixture-of-Experts model")
    family = family_of(name)

    stack_name = _stack_name(found[0][0])
    layers = tuple(_moe_layer(model, i, n, m, stack_name) for i, (n, m) in enumerate(found))
    info = ModelInfo(
        id=_id(model),
        revision=getattr(model.config, "_commit_hash", None),
        family=name,
        k_orig=tuple(layer.k_orig for layer in layers),
        num_experts=tuple(layer.num_experts for layer in layers),
        fingerprint=fingerprint(model),
    )
    stack = model.get_submodule(stack_name)
    assert isinstance(stack, nn.ModuleList)
    decoder = model.get_submodule(stack_name.rpartition(".")[0])
    return MoEModel(model, family, layers, decoder, stack, info)


def _family_name(model: nn.Module, found: list[tuple[str, nn.Module]]) -> str:
    """The folder in `transformers.models` that the experts, or else the model, come from."""
    source = found[0][1] if found else model
    parts = type(source).__module__.split(".")
    if parts[:2] == ["transformers", "models"]:
        return parts[2]
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _stack_name(experts_name: str) -> str:
    match = re.match(r"(.*?\blayers)\.\d+\.", experts_name)
    if match is None:
        raise AllocMoEError(f"the experts {experts_name} are not inside a stack of decoder layers")
    return match.group(1)


def _moe_layer(model: nn.Module, index: int, name: str, experts: Any, stack_name: str) -> MoELayer:
    if not name.startswith(stack_name + "."):
        raise AllocMoEError(f"the experts {name} are outside the decoder stack {stack_name}")
    block = model.get_submodule(name.rpartition(".")[0])
    router = next((getattr(block, n) for n in _ROUTER_NAMES if hasattr(block, n)), None)
    if router is None:
        raise AllocMoEError(f"no router was found beside {name}")
    k_orig = getattr(router, "top_k", None) or getattr(block, "top_k", None)
    if k_orig is None:
        k_orig = experts.config.top_k_experts
    decoder_index = int(name[len(stack_name) + 1 :].split(".")[0])
    return MoELayer(
        index, decoder_index, name, experts, block, router, int(k_orig), int(experts.num_experts)
    )


def _id(model: nn.Module) -> str:
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


def fingerprint(model: nn.Module) -> str | None:
    """A hash over names, shapes and a few values of all parameters; None for weights elsewhere.

    Sixteen values of each parameter tell two trainings of one architecture apart at no cost.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.device.type == "meta":
            return None
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // 16)
        # rounded, so that the same weights loaded in another precision are the same weights
        values = flat[::step][:16].to("cpu", torch.bfloat16)
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
