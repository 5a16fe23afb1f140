"""vLLM's MoE layer under a plan.

A layer budget is the layer's own smaller top-k, set before vLLM builds its kernels, so that every
backend runs it as it would run a smaller model. A token rule lets vLLM's router choose all of its
experts and decides which pairs run. A dropped pair becomes its token's first expert with weight 0:
shapes stay what they are, no backend has to know, and no expert is loaded that the token does not
use anyway. On a GPU the selection is one kernel, and where the weights are plain (not quantised,
all experts on one device) our experts kernel follows, in which a dropped pair costs no arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from allocmoe.artifacts import LayerActivity, Plan
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoELayer
from allocmoe.runtime.control import LayerControl
from allocmoe.runtime.step import CurrentStep, Step
from allocmoe.runtime.vllm import versions
from allocmoe.runtime.vllm.experts import own_kernel
from allocmoe.runtime.vllm.served import Served, read_settings, serve_plan

logger = init_logger("vllm.allocmoe")
SERVED = "_allocmoe_served"


class PlannedRouter:
    """vLLM's router of one layer, and after it what the plan says about the layer."""

    def __init__(
        self, served: Served, layer: MoELayer, moe_config: Any, router: Any, experts: Any
    ) -> None:
        self._served = served
        self._layer = layer
        # where transformers' router returns probabilities, vLLM's returns logits
        self._family = served.moe.family
        if self._family.score == "given":
            self._family = replace(self._family, score="softmax")
        self._moe_config, self._router, self._experts = moe_config, router, experts
        self._device = next(experts.parameters()).device
        if self._device.type == "meta":  # weights that are quantised while they are loaded
            self._device = torch.device(get_current_vllm_config().device_config.device)
        # the runner, once it is built
        self.owner: Any = None
        self._current = CurrentStep()
        self._control: LayerControl | None = None
        # whether dropped pairs get an expert id out of range, which our experts kernel leaves out
        self.skips = False
        # kept pairs and tokens, summed on the device; where nothing counts, the device may sleep
        counting = served.counts or served.plan.token.selects
        self._activity = torch.zeros(
            2, dtype=torch.int64, device=self._device if counting else "cpu"
        )
        self.follow(served.plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)

    def follow(self, plan: Plan) -> None:
        built = self.owner is not None and self._device.type == "cuda"
        if built and self.owner._quant_method.is_monolithic:
            raise AllocMoEError(
                "this MoE backend has its top-k inside its kernel, which cannot change while the "
                "engine runs: measure with another one, --engine-option moe_backend=triton"
            )
        budget = plan.layer_budgets[self._layer.index]
        thins = plan.token.selects
        k = self._layer.k_orig if thins else int(budget)
        # the three places where vLLM keeps a layer's top-k
        self._moe_config.experts_per_token = self._experts.top_k = self._router.top_k = k
        self._control = None
        if thins:
            _check_token_rule(plan, self._moe_config, self._experts)
            self._control = LayerControl(
                self._layer,
                self._family,
                plan.token,
                self._current,
                bias=getattr(self._experts, "e_score_correction_bias", None),
                device=self._device,
            )
            self._control.set_budget(budget)

    @property
    def thins(self) -> bool:
        return self._control is not None and self._control.masks

    def num_pairs(self, num_tokens: int) -> int:
        """About how many pairs run."""
        return round(self._served.plan.layer_budgets[self._layer.index] * num_tokens)

    def select_experts(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self._router.select_experts(*args, **kwargs)
        if self._control is not None and self._control.masks:
            logits = kwargs["router_logits"] if "router_logits" in kwargs else args[1]
            return self._thin(self._control, logits, weights, ids)
        if self._served.counts:
            self._count(ids, torch.ones_like(ids, dtype=torch.bool))
        return weights, ids

    def _thin(
        self,
        control: LayerControl,
        logits: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        control.see_router(logits)
        if ids.is_cuda:
            # nothing but this one launch
            self._current.step = Step(1)
            chosen, ranked = control.select_fused(
                ids,
                weights,
                padding_T=versions.padding_marks(len(ids)),
                stand_in=not self.skips,
                activity=self._activity,
            )
            return ranked, chosen.to(ids.dtype)
        valid = _valid_tokens(ids)
        self._current.step = Step(1, valid)
        # vLLM gives padding no expert, -1
        index, ranked, scores = control.rank(ids.long().clamp_min(0), weights)
        keep = control.select(scores)
        ranked = torch.where(keep, control.reweigh(ranked, scores, keep), 0.0)
        chosen = torch.where(keep, index, index[:, :1]).to(ids.dtype)
        if valid is not None:
            chosen = torch.where(valid[:, None], chosen, ids)
        self._count(index, keep)
        return ranked.to(weights.dtype), chosen

    def _count(self, ids: torch.Tensor, keep: torch.Tensor) -> None:
        valid = _valid_tokens(ids)
        tokens = ids.shape[0] if valid is None else valid.sum()
        self._activity[0] += (keep if valid is None else keep & valid[:, None]).sum()
        self._activity[1] += tokens

    def activity(self) -> LayerActivity:
        # which experts a step loads is not counted here: tokens of a step are of no one position
        pairs, tokens = self._activity.tolist()
        return LayerActivity(tokens, pairs, 0, 0, 0, 0, 0)

    def reset(self) -> None:
        self._activity.zero_()


def _valid_tokens(ids: torch.Tensor) -> torch.Tensor | None:
    marks = versions.padding_marks(len(ids))
    if marks is None:
        return None
    return ~marks if marks.dtype == torch.bool else marks >= 0


def _check_token_rule(plan: Plan, moe_config: Any, routed_experts: Any) -> None:
    parallel = moe_config.moe_parallel_config
    label = plan.token.label
    if getattr(parallel, "pcp_size", 1) > 1 or getattr(parallel, "is_sequence_parallel", False):
        raise AllocMoEError(
            f"{label} cannot run where a layer's tokens are split over ranks (prefill context or "
            "sequence parallelism), which leaves padding unmarked"
        )
    if getattr(parallel, "enable_eplb", False):
        raise AllocMoEError(
            f"{label} cannot run with expert load balancing: leave out --enable-eplb"
        )
    if plan.token.scope == "batch" and (parallel.dp_size > 1 or parallel.use_ep):
        raise AllocMoEError(
            f"{label} needs all tokens of a step in one place, which data or expert parallelism "
            "does not give: use tensor parallelism, or a plan with the scope threshold"
        )
    if getattr(routed_experts, "apply_router_weight_on_input", False):
        raise AllocMoEError(
            f"{label} cannot drop pairs where weights go on the experts' input: serve a plan "
            "without a token rule"
        )


class PlannedMoERunner(MoERunner):  # type: ignore[misc]
    """`MoERunner`, held to a plan where the engine was given one."""

    def __init__(
        self, layer_name: str, moe_config: Any, router: Any, routed_experts: Any, *args: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        served = served_by(get_current_vllm_config())
        layer = None if served is None else served.layer(layer_name)
        if served is not None and layer is not None:
            if layer.index in served.runners:
                raise AllocMoEError(
                    f"two MoE layers are called {layer_name}: a plan cannot run with a draft model "
                    "whose layers have the names of the model's own"
                )
            router = PlannedRouter(served, layer, moe_config, router, routed_experts)
            served.runners[layer.index] = router
        super().__init__(layer_name, moe_config, router, routed_experts, *args, **kwargs)
        if isinstance(router, PlannedRouter):
            router.owner = self

    def _apply_quant_method(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        router = self.router
        if not isinstance(router, PlannedRouter) or not router.thins:
            return super()._apply_quant_method(
                hidden_states, router_logits, shared_experts_input, *args, **kwargs
            )
        # known only after the weights are loaded; the engine's own trial run comes here first
        if self._quant_method.is_monolithic:
            raise AllocMoEError(
                "this MoE backend routes inside its kernel, so a token rule cannot act: start vLLM "
                "with another --moe-backend, or serve a plan without a token rule (alloc-l)"
            )
        if getattr(self, "do_naive_dispatch_combine", False):
            raise AllocMoEError(
                "this MoE backend gathers the tokens of other ranks before its router, where a "
                "token rule cannot tell them from padding: serve a plan without one (alloc-l)"
            )
        kernel = own_kernel(self)
        router.skips = kernel is not None
        if kernel is None:
            return super()._apply_quant_method(
                hidden_states, router_logits, shared_experts_input, *args, **kwargs
            )
        versions.begin_shared_experts(self, shared_experts_input)
        weights, ids = router.select_experts(
            hidden_states=hidden_states, router_logits=router_logits
        )
        out = kernel(hidden_states, ids, weights, router.num_pairs(len(ids)))
        return versions.end_shared_experts(self, shared_experts_input, kwargs), out


def served_by(vllm_config: Any) -> Served | None:
    """The plan of an engine, read once and kept where all of its layers find it."""
    if SERVED not in vllm_config.__dict__:
        plan, counts = read_settings(vllm_config.additional_config)
        served = None
        if plan is not None:
            parallel = vllm_config.parallel_config
            # a rank has slots for its own tokens only, so that others look like padding
            if plan.token.selects and parallel.decode_context_parallel_size > 1:
                raise AllocMoEError(
                    f"{plan.token.label} cannot run with context parallelism: leave out "
                    "--decode-context-parallel-size, or serve a plan without a token rule"
                )
            # what the selection reads would be gone after a sleep
            if plan.token.selects and vllm_config.model_config.enable_sleep_mode:
                raise AllocMoEError(
                    f"{plan.token.label} cannot run with --enable-sleep-mode: leave it out, or "
                    "serve a plan without a token rule"
                )
            served = serve_plan(plan, vllm_config.model_config.hf_text_config, counts)
            if parallel.rank == 0 and parallel.data_parallel_rank == 0:
                logger.info(served.summary())
            if plan.token.scope == "batch" and vllm_config.cache_config.enable_prefix_caching:
                logger.warning(
                    "allocmoe: in the batch scope an answer depends on what else is in the batch, "
                    "and the prefix cache keeps what came of it: --no-enable-prefix-caching, or "
                    "a plan with the scope threshold"
                )
        vllm_config.__dict__[SERVED] = served
    found: Served | None = vllm_config.__dict__[SERVED]
    return found


def register_runners() -> None:
    """vLLM looks its layers up by the name of their class."""
    other = op_registry_oot.get("MoERunner")
    if other is PlannedMoERunner:
        return
    if other is not None:
        raise AllocMoEError(
            f"another plugin has put {other.__module__}.{other.__name__} in the place of vLLM's "
            "MoE layer: name the plugins you want in VLLM_PLUGINS, one of the two left out"
        )
    PluggableLayer.register_oot(PlannedMoERunner, name="MoERunner")
    # the layer of vLLM's transformers backend for routers that vLLM does not know
    try:
        from vllm.model_executor.models.transformers.moe import TransformersMoERunner
    except ImportError:
        return

    class RefusedRunner(TransformersMoERunner):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if served_by(get_current_vllm_config()) is not None:
                raise AllocMoEError(
                    "vLLM runs this model through its transformers backend and leaves the routing "
                    "outside, where a plan cannot act"
                )
            super().__init__(*args, **kwargs)

    PluggableLayer.register_oot(RefusedRunner, name="TransformersMoERunner")
