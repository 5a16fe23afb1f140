"""The fused kernels at real sizes on a CUDA device: right, the same twice, and capturable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import allocmoe
from allocmoe import routing
from allocmoe.artifacts import TokenRule
from allocmoe.models import inspect_model
from allocmoe.runtime.hf import Controller, use_kernel
from allocmoe.runtime.kernel import KERNEL, find_kernel
from allocmoe.runtime.step import Step
from no_waiting import no_waiting
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
IDS = torch.randint(3, 128, (3, 21), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def experts() -> Any:
    """Experts of an odd size: 1000 is off every block."""
    module = tiny("olmoe").model.layers[0].mlp.experts
    torch.manual_seed(0)
    module.num_experts = 24
    module.gate_up_proj = torch.nn.Parameter(torch.randn(24, 1400, 1000).bfloat16().cuda() * 0.03)
    module.down_proj = torch.nn.Parameter(torch.randn(24, 1000, 700).bfloat16().cuda() * 0.03)
    module.requires_grad_(False)
    module.__dict__[KERNEL] = find_kernel(module)
    return module


def route(T: int, K: int, E: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uneven: half of the tokens choose among the first quarter of the experts."""
    scores = torch.rand(T, E, device="cuda")
    scores[::2, : E // 4] += 1
    return scores.topk(K, dim=1).indices, torch.rand(T, K, device="cuda")


@pytest.mark.parametrize("T", [1, 7, 16, 17, 100, 513, 3000, 20011])
def test_against_float64_and_the_same_twice(experts: Any, T: int) -> None:
    hidden = torch.randn(T, 1000, device="cuda").bfloat16()
    index, weights = route(T, 5, 24)
    index[torch.rand(T, 5, device="cuda") < 0.3] = 24
    kernel = experts.__dict__[KERNEL]
    out = kernel.run(experts, hidden, index, weights)
    # the order of pairs within an expert may differ, the bits may not
    for _ in range(5):
        assert torch.equal(out, kernel.run(experts, hidden, index, weights))
    expected = torch.zeros(T, 1000, dtype=torch.float64, device="cuda")
    for expert in range(24):
        token, column = (index == expert).nonzero(as_tuple=True)
        gate, up = (hidden[token].double() @ experts.gate_up_proj[expert].double().T).chunk(2, 1)
        y = (F.silu(gate) * up) @ experts.down_proj[expert].double().T
        expected.index_add_(0, token, y * weights[token, column, None].double())
    assert (out.double() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("T", [8, 300])
def test_a_graph_follows_its_inputs(experts: Any, T: int) -> None:
    """Captured once, replayed with another routing and other inputs."""
    kernel = experts.__dict__[KERNEL]
    hidden = torch.randn(T, 1000, device="cuda").bfloat16()
    index, weights = route(T, 5, 24)
    kernel.run(experts, hidden, index, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.run(experts, hidden, index, weights)
    for _ in range(3):
        hidden.normal_()
        new_index, new_weights = route(T, 5, 24)
        index.copy_(new_index)
        weights.copy_(new_weights)
        graph.replay()
        assert torch.equal(out, kernel.run(experts, hidden, index, weights))


def test_a_graph_follows_other_budgets() -> None:
    model = tiny("olmoe").to("cuda", torch.bfloat16)
    moe = inspect_model(model)
    layer, hidden = model.model.layers[0].mlp, torch.randn(2, 21, 32, device="cuda").bfloat16()
    with torch.no_grad(), Controller(moe, TokenRule("alloc-t", "batch"), count=False) as controller:
        controller.begin_step(Step(1))
        controller.set_budgets([1.5] * len(moe.layers))
        layer(hidden)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(hidden)
        for budget in (1.5, 2.25, 3.5, 1.0):
            controller.set_budgets([budget] * len(moe.layers))
            graph.replay()
            assert torch.equal(out, layer(hidden))


@pytest.mark.parametrize("token", [TokenRule(), TokenRule("alloc-t", "batch")])
def test_a_graph_counts_its_replays(token: TokenRule) -> None:
    """Like forwards, with the memory given back that nobody holds after the capture."""
    model = tiny("olmoe").to("cuda", torch.bfloat16)
    moe, ids = inspect_model(model), IDS.cuda()
    with torch.no_grad(), Controller(moe, token) as controller:
        controller.set_budgets([2] * len(moe.layers))
        model(ids, use_cache=False)
        controller.reset()
        model(ids, use_cache=False)
        once = controller.activity()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(ids, use_cache=False)
        torch.cuda.empty_cache()
        controller.reset()
        for _ in range(3):
            graph.replay()
        assert controller.activity() == [a + a + a for a in once]
    assert {a.mean for a in once} == {2.0}


@pytest.mark.parametrize("scope", ["batch", "sequence", "threshold"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_does_not_wait(scope: Any, padded: bool) -> None:
    """With padding too, and where nobody knows beforehand how many pairs run."""
    model = tiny("olmoe").to("cuda", torch.bfloat16)
    moe = inspect_model(model)
    thresholds = (0.2,) * len(moe.layers) if scope == "threshold" else None
    ids = IDS.cuda()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    given = {"attention_mask": mask} if padded else {}
    token = TokenRule("alloc-t", scope, thresholds=thresholds)
    with torch.no_grad(), Controller(moe, token) as controller:
        controller.set_budgets([2.5] * len(moe.layers))
        position = (mask.cumsum(1) - 1).clamp_min(0)
        model.model(ids, position_ids=position, **given)
        controller.reset()
        layers = model.model.layers
        hidden = model.model.embed_tokens(ids)
        with no_waiting():
            for layer in layers:
                layer.mlp(hidden)
        activity = controller.activity()
    if scope == "batch":
        tokens = int(mask.sum()) if padded else ids.numel()
        assert {a.activations for a in activity} == {routing.num_pairs(2.5, tokens)}


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", "gpt_oss", "mixtral", "nemotron_h"])
def test_the_kernel_agrees_with_stock(family: str) -> None:
    model = tiny(family).to("cuda", torch.bfloat16)
    stock = model.config._experts_implementation
    with torch.no_grad():
        before = model(IDS.cuda()).logits.float()
        assert use_kernel(model)
        after = model(IDS.cuda()).logits.float()
        model.set_experts_implementation(stock)
        again = model(IDS.cuda()).logits.float()
    assert torch.equal(before, again)
    # a router may flip at a near tie, so a few tokens may differ
    close = (before - after).abs().amax(-1) < 0.25
    assert close.float().mean() > 0.8


def test_full_budget_is_the_model_with_the_kernel() -> None:
    model = tiny("olmoe").to("cuda", torch.bfloat16)
    assert use_kernel(model)
    moe = inspect_model(model)
    with torch.no_grad():
        untouched = model(IDS.cuda()).logits
        for token in (TokenRule(), TokenRule("alloc-t", "batch")):
            with Controller(moe, token) as controller:
                controller.set_budgets(moe.k_orig)
                assert torch.equal(model(IDS.cuda()).logits, untouched)


def test_a_compiled_model_runs_the_plan() -> None:
    model = tiny("olmoe").to("cuda", torch.bfloat16)
    plan = allocmoe.make_plan("alloc-t", "50%", model=model)
    with torch.no_grad(), allocmoe.apply(model, plan, count=False):
        eager = model(input_ids=IDS.cuda()).logits
        compiled = torch.compile(model, fullgraph=True)(input_ids=IDS.cuda()).logits
    close = (eager.float() - compiled.float()).abs().amax(-1) < 0.25
    assert close.float().mean() > 0.8
