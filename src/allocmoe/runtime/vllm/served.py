"""The plan that an engine runs, and the layers it belongs to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from allocmoe.artifacts import LayerActivity, Plan
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoELayer, MoEModel, inspect_model

# the key in vLLM's --additional-config, and the variable for those who cannot set it
KEY = "allocmoe"
VARIABLE = "ALLOCMOE_PLAN"


class Runner(Protocol):
    """One MoE layer inside vLLM, as the plan sees it."""

    def follow(self, plan: Plan) -> None: ...
    def activity(self) -> LayerActivity: ...
    def reset(self) -> None: ...


@dataclass
class Served:
    """A plan in one engine process, with the runners of the MoE layers that live there."""

    plan: Plan
    moe: MoEModel
    # whether layers without a token rule count too; a token rule's selection always does
    counts: bool = False
    runners: dict[int, Runner] = field(default_factory=dict)

    def layer(self, layer_name: str) -> MoELayer | None:
        """The MoE layer of a name such as `model.layers.3.mlp.experts`.

        None for layers that draft tokens, which no plan is about: they call themselves mtp, or
        their numbers go on after those of the model.
        """
        numbers = [int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", layer_name)]
        if re.search(r"(^|\.)mtp", layer_name):
            return None
        if numbers and numbers[0] >= len(self.moe.decoder_layers):
            return None
        for layer in self.moe.layers:
            if numbers and layer.decoder_index == numbers[0]:
                return layer
        raise AllocMoEError(f"the plan knows no MoE layer {layer_name}")

    def follow(self, plan: Plan) -> None:
        """Another plan from here on; only for an engine without CUDA graphs and compiled code."""
        check_plan(plan, self.moe)
        self.plan = plan
        for runner in self.runners.values():
            runner.follow(plan)

    def summary(self) -> str:
        """One line: what every layer may run."""
        plan = self.plan
        budgets = ", ".join(f"{budget:g}" for budget in plan.layer_budgets)
        return (
            f"allocmoe: {plan.method} with token rule {plan.token.label}, {plan.budget} of "
            f"{sum(plan.model.k_orig)} activations a token; MoE layers {budgets}"
        )


def check_layers(plan: dict[str, Any], layers: Iterable[int]) -> None:
    """Fail where not all MoE layers of the plan are among those of all workers together."""
    missing = set(range(len(plan["layer_budgets"]))) - set(layers)
    if missing:
        raise AllocMoEError(
            f"MoE layers {sorted(missing)} do not run through the plan: vLLM runs them in a layer "
            "of another kind"
        )


def read_settings(additional_config: Any) -> tuple[Plan | None, bool]:
    """The plan an engine is to run (None for the unmodified model), and whether to count all.

    It comes inline or as the path of a file, in the engine's additional config or by a variable.
    """
    given = additional_config.get(KEY) if isinstance(additional_config, dict) else None
    if given is None:
        path = os.environ.get(VARIABLE)
        return (Plan.load(path) if path else None), False
    if not isinstance(given, dict) or "plan" not in given or set(given) - {"plan", "count"}:
        raise AllocMoEError(f'--additional-config: {KEY} must be {{"plan": a path or a plan}}')
    plan = given["plan"]
    if isinstance(plan, str):
        return Plan.load(plan), bool(given.get("count"))
    return Plan.from_json(plan, f"--additional-config, {KEY}.plan"), bool(given.get("count"))


def serve_plan(plan: Plan, hf_config: Any, counts: bool) -> Served:
    """Check that the plan fits the model that vLLM was given, and find its layers."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        moe = inspect_model(build(hf_config))
    check_plan(plan, moe)
    return Served(plan, moe, counts)


def check_plan(plan: Plan, moe: MoEModel) -> None:
    if plan.token.rule == "alloc-t" and plan.token.scope == "sequence":
        raise AllocMoEError(
            "vLLM mixes sequences in a step: a plan with the sequence scope cannot be served, make "
            "one with the scope threshold or batch"
        )
    plan.check_fits(moe.info)
