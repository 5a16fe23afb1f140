"""Runs a plan inside a transformers model, and takes it out again without a trace.

A layer budget lowers the router's own `top_k`, so the model itself routes less and the bits are
those of a smaller config. A token rule lets the router choose all of its `k_orig` experts, decides
on their scores which pairs run, and hands the kept pairs to an experts implementation registered
with transformers that never touches a dropped one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from allocmoe.artifacts import LayerActivity, Plan, TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.kernels import compact, run_experts
from allocmoe.models import MoEModel, inspect_model
from allocmoe.runtime.control import LayerControl, Observer
from allocmoe.runtime.kernel import KERNEL, Kernel, find_kernel
from allocmoe.runtime.step import CurrentStep, Step, read_step

IMPLEMENTATION = "allocmoe"
_MODELS = "transformers.models."
_ATTRIBUTE = "_allocmoe_control"
_F = TypeVar("_F", bound=Callable[..., Any])


def _uncompiled(function: _F) -> _F:
    """torch.compile leaves `function` as it is and compiles around it."""
    return cast(_F, torch.compiler.disable(function))


def apply(model: nn.Module, plan: Plan, *, count: bool = True) -> Controller:
    """Apply `plan` to `model`; use the result in a `with`, or call its `remove()`.

    `count=False` leaves out the counting, a few small operations a layer.
    """
    moe = inspect_model(model)
    plan.check_fits(moe.info)
    controller = Controller(moe, plan.token, count=count)
    controller.set_budgets(plan.layer_budgets)
    return controller


def use_kernel(model: nn.Module) -> bool:
    """Run all routed experts of `model` in our implementation, whether a plan is applied or not.

    False if there is no fused kernel for it here (no CUDA device, another dtype than bfloat16 or
    float16, experts that do something else between their products): then nothing is changed.
    `model.set_experts_implementation("grouped_mm")` goes back.
    """
    moe = inspect_model(model)
    if any(layer.experts.__dict__.get(_ATTRIBUTE) is not None for layer in moe.layers):
        raise AllocMoEError("a plan is applied to this model; remove it first")
    kernels = [] if _other_experts(moe) else [find_kernel(layer.experts) for layer in moe.layers]
    if not kernels or None in kernels:
        return False
    ExpertsInterface.register(IMPLEMENTATION, experts_forward)
    for layer, kernel in zip(moe.layers, kernels, strict=True):
        layer.experts.__dict__[KERNEL] = kernel
        layer.experts.config._experts_implementation_internal = IMPLEMENTATION
    return True


class Controller:
    """Holds a model to layer budgets and a token rule until it is removed.

    Budgets may be changed while it is in place; `activity` counts what really ran.
    """

    def __init__(
        self,
        moe: MoEModel,
        token: TokenRule,
        *,
        count: bool = True,
        observe: Observer | None = None,
    ) -> None:
        if _ATTRIBUTE in moe.decoder.__dict__:
            raise AllocMoEError("a plan is already applied to this model; remove it first")
        if token != TokenRule() or not moe.family.top_k_settable:
            other = _other_experts(moe)
            if other is not None:
                raise AllocMoEError(
                    f"the experts of this model are {other}, which takes layer budgets but no "
                    "token rule: use a method without one, or load the model unquantised"
                )
        self.moe = moe
        self._current = CurrentStep()
        self.controls = [
            LayerControl(layer, moe.family, token, self._current, counts=count, observe=observe)
            for layer in moe.layers
        ]
        self._hooks = [moe.decoder.register_forward_pre_hook(_before_decoder, with_kwargs=True)]
        self._marked: list[nn.Module] = []
        self._mark(moe.decoder, self)
        for control in self.controls:
            control.stock_implementation = control.layer.experts.config._experts_implementation
            self._mark(control.layer.router, control)
            self._mark(control.layer.experts, control)
            self._hooks.append(control.layer.router.register_forward_hook(_after_router))
            self._hooks.append(control.layer.experts.register_forward_pre_hook(_before_experts))
        self._stock: dict[int, tuple[Any, str | None]] = {}
        self._given: list[nn.Module] = []
        try:
            if any(control.may_mask for control in self.controls):
                self._install_implementation()
        except BaseException:
            self.remove()
            raise

    def _mark(self, module: nn.Module, owner: Any) -> None:
        """Leave `owner` where the hooks find it. They are plain functions, so that a compiled
        model that has seen one plan runs the next one."""
        module.__dict__[_ATTRIBUTE] = owner
        self._marked.append(module)

    def begin_step(self, step: Step) -> None:
        self._current.step = step

    def set_budgets(self, budgets: Sequence[float]) -> None:
        for control, budget in zip(self.controls, budgets, strict=True):
            control.set_budget(budget)

    def activity(self) -> list[LayerActivity]:
        """What ran in each MoE layer since the start or the last `reset`."""
        return [control.counter.read() for control in self.controls]

    def reset(self) -> None:
        for control in self.controls:
            control.counter.reset()

    def remove(self) -> None:
        """Give the model back as it was. Calling it twice does no harm."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for config, implementation in self._stock.values():
            config._experts_implementation_internal = implementation
        self._stock = {}
        for module in self._marked:
            module.__dict__.pop(_ATTRIBUTE, None)
        self._marked = []
        for module in self._given:
            module.__dict__.pop(KERNEL, None)
        self._given = []
        for control in self.controls:
            control.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _install_implementation(self) -> None:
        """Point the experts' config at our implementation, remembering the one it had."""
        ExpertsInterface.register(IMPLEMENTATION, experts_forward)
        for control in self.controls:
            module = control.layer.experts
            kernel = find_kernel(module)
            if kernel is not None and module.__dict__.get(KERNEL) is not kernel:
                module.__dict__[KERNEL] = kernel
                self._given.append(module)
            self._stock.setdefault(id(module.config), (module.config, control.stock_implementation))
        for config, _ in self._stock.values():
            config._experts_implementation_internal = IMPLEMENTATION


def _other_experts(moe: MoEModel) -> str | None:
    """The name of experts that dispatch on their own; quantisers may put such in a model."""
    kinds = (type(layer.experts) for layer in moe.layers)
    return next((k.__name__ for k in kinds if not k.__module__.startswith(_MODELS)), None)


def _before_decoder(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    getattr(module, _ATTRIBUTE).begin_step(read_step(args, kwargs))


def _after_router(module: nn.Module, args: Any, output: Any) -> None:
    getattr(module, _ATTRIBUTE).see_router(output)


def _before_experts(module: nn.Module, args: tuple[Any, ...]) -> None:
    _, index, weights = args
    control = getattr(module, _ATTRIBUTE)
    if control.counts or control.observed:
        _see_routing(control, index, weights)


@_uncompiled
def _see_routing(control: LayerControl, index: torch.Tensor, weights: torch.Tensor) -> None:
    control.see_routing(index, weights)


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts implementation `allocmoe`.

    Under a plan it runs the pairs that the plan keeps. Without one it runs every pair whose expert
    id is in range, so that `num_experts` may stand for "no expert". A module that has the fused
    kernel uses it, others run in plain torch.
    """
    control: LayerControl | None = getattr(module, _ATTRIBUTE, None)
    if control is not None and not control.masks and control.stock_implementation != IMPLEMENTATION:
        name = control.stock_implementation or "eager"
        stock: Any = ALL_EXPERTS_FUNCTIONS.get_interface(name, type(module).forward.__wrapped__)
        out: torch.Tensor = stock(module, hidden_states, top_k_index, top_k_weights)
        return out
    kernel: Kernel | None = getattr(module, KERNEL, None)
    if kernel is None or not kernel.takes(module, hidden_states, top_k_weights):
        return _plain_forward(module, hidden_states, top_k_index, top_k_weights)
    if control is None or not control.masks:
        return kernel.run(module, hidden_states, top_k_index, top_k_weights)
    if control.observed:
        _observe(control, top_k_index, top_k_weights)
    index, weights = control.select_fused(top_k_index, top_k_weights)
    if control.counts:
        _count(control, index)
    num_pairs = round(control.budget * hidden_states.shape[0])
    return kernel.run(module, hidden_states, index, weights, num_pairs)


@_uncompiled
def _count(control: LayerControl, index: torch.Tensor) -> None:
    control.counter.add_kept(index, control.step)


@_uncompiled
def _observe(control: LayerControl, index: torch.Tensor, weights: torch.Tensor) -> None:
    ranked, _, scores = control.rank(index, weights)
    control.observe(ranked, scores, control.select(scores))


@_uncompiled
def _plain_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    control: LayerControl | None = getattr(module, _ATTRIBUTE, None)
    num_tokens = hidden_states.shape[0]
    if control is None or not control.masks:
        keep = top_k_index < module.num_experts
        num_kept = None if control is None else keep.numel()
        pairs = compact(top_k_index, top_k_weights, keep, num_kept)
    else:
        index, weights, scores = control.rank(top_k_index, top_k_weights)
        keep = control.select(scores)
        control.observe(index, scores, keep)
        weights = control.reweigh(weights, scores, keep)
        pairs = compact(index, weights, keep, control.num_kept(num_tokens))
        if control.counts:
            control.counter.add_pairs(pairs, num_tokens, control.step)
    return run_experts(module, hidden_states, pairs, num_tokens)
