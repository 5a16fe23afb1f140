"""How an experts module keeps its weights and what it does between its two products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class Activation:
    """f(min(gate, limit)) * (clamp(up, -limit, limit) + shift), or f(up) where there is no gate.

    `alpha` scales silu's slope: x * sigmoid(alpha * x).
    """

    function: str
    gated: bool = True
    limit: float = math.inf
    alpha: float = 1.0
    shift: float = 0.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        gate = gate.clamp(max=self.limit)
        if self.alpha != 1.0:
            activated = gate * torch.sigmoid(self.alpha * gate)
        else:
            activated = FUNCTIONS[self.function](gate)
        if up is None:
            return activated
        return activated * (up.clamp(-self.limit, self.limit) + self.shift)


@dataclass(frozen=True)
class Layout:
    """`interleaved`: gate and up take turns row by row; `transposed`: `[E, in, out]`."""

    activation: Activation
    interleaved: bool
    transposed: bool


@dataclass(frozen=True)
class Weights:
    """The parameters of all experts: `[E, out, in]`, or `[E, in, out]` where transposed."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def weights_of(module: Any) -> Weights:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    return Weights(
        getattr(module, name),
        module.down_proj,
        getattr(module, f"{name}_bias") if module.has_bias else None,
        module.down_proj_bias if module.has_bias else None,
    )


def read_layout(module: Any) -> Layout | None:
    """The layout of an experts module of transformers; None if it does something else.

    What a module does between its products is found by trying it: its own function and ours must
    agree on a sweep of numbers. So a family nobody has seen is either computed right or left to
    the plain path.
    """
    if getattr(module, "has_post_expert_norm", False):
        return None
    interleaved = module.has_gate and not module.is_concatenated
    # past the limits in use, and dense around zero
    sweep = torch.linspace(-5, 5, 201).sinh() / 5
    if module.has_gate:
        gate, up = sweep.repeat(3), torch.cat([sweep.roll(n) for n in (0, 67, 134)])
        both = torch.stack([gate, up], 1).flatten() if interleaved else torch.cat([gate, up])
    try:
        with torch.no_grad():
            wanted = module._apply_gate(both) if module.has_gate else module.act_fn(sweep)
    except (RuntimeError, TypeError, AttributeError):
        return None  # parameters of its own, or another way of calling
    for activation in _candidates(module):
        got = activation(gate, up) if module.has_gate else activation(sweep, None)
        if got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-5, atol=1e-5):
            return Layout(activation, interleaved, module.is_transposed)
    return None


def _candidates(module: Any) -> Iterator[Activation]:
    if not module.has_gate:
        yield from (Activation(function, gated=False) for function in FUNCTIONS)
        return
    limits = {math.inf} | {float(getattr(module, n, math.inf)) for n in ("limit", "swiglu_limit")}
    alphas = {1.0} | {float(getattr(module, n, 1.0)) for n in ("alpha", "swiglu_alpha")}
    for limit in limits:
        for shift in (0.0, 1.0):
            for function in FUNCTIONS:
                yield Activation(function, True, limit, 1.0, shift)
            for alpha in alphas - {1.0}:
                yield Activation("silu", True, limit, alpha, shift)
