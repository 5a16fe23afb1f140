"""The runtime with the fused kernel, in Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from allocmoe.artifacts import Protocol, TokenRule
from allocmoe.bench.benchmark import benchmark
from allocmoe.errors import AllocMoEError
from allocmoe.kernels import read_layout
from allocmoe.kernels.blocks import Blocks, Tile
from allocmoe.models import inspect_model
from allocmoe.runtime import blocks as tuned
from allocmoe.runtime import kernel
from allocmoe.runtime.hf import Controller, use_kernel
from allocmoe.runtime.kernel import KERNEL, find_kernel
from tiny import available, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel, "_device_runs_it", lambda device: True)
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "blocks.json"))


@pytest.fixture
def model() -> Any:
    return tiny("olmoe").to(DEVICE, torch.float16)


def test_where_the_kernel_does_not_fit_nothing_changes(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = model.config._experts_implementation
    assert not use_kernel(model.float())
    monkeypatch.setattr(kernel, "_device_runs_it", lambda device: False)
    assert not use_kernel(model.half())
    assert model.config._experts_implementation == stock
    assert not any(KERNEL in module.__dict__ for module in model.modules())


def test_full_budget_is_the_model_with_the_kernel(model: Any) -> None:
    assert use_kernel(model)
    moe = inspect_model(model)
    with torch.no_grad():
        untouched = model(IDS).logits
        for token in (TokenRule(), TokenRule("alloc-t", "batch")):
            with Controller(moe, token) as controller:
                controller.set_budgets(moe.k_orig)
                assert torch.equal(model(IDS).logits, untouched)
        assert torch.equal(model(IDS).logits, untouched)


def test_a_layer_budget_is_the_smaller_model_with_the_kernel(model: Any) -> None:
    moe = inspect_model(model)
    smaller = tiny("olmoe", num_experts_per_tok=2).to(DEVICE, torch.float16)
    assert use_kernel(model)
    assert use_kernel(smaller)
    with torch.no_grad(), Controller(moe, TokenRule()) as controller:
        controller.set_budgets([2] * len(moe.layers))
        assert torch.equal(model(IDS).logits, smaller(IDS).logits)


@pytest.mark.parametrize("scope", ["batch", "sequence", "threshold"])
def test_counts_are_those_of_the_plain_path(model: Any, scope: Any) -> None:
    """In the first layer, where both see the same router."""
    moe = inspect_model(model)
    thresholds = (0.2,) * len(moe.layers) if scope == "threshold" else None
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    activity = []
    for fused in (True, False):
        with torch.no_grad(), Controller(moe, TokenRule("alloc-t", scope, 1, thresholds)) as c:
            if not fused:
                for layer in moe.layers:
                    del layer.experts.__dict__[KERNEL]
            c.set_budgets([1.75] * len(moe.layers))
            model(IDS, attention_mask=mask)
            activity.append(c.activity()[0])
    assert activity[0] == activity[1]
    if scope == "batch":
        assert activity[0].activations == round(1.75 * 15)


def test_removal_leaves_no_kernel_behind(model: Any) -> None:
    moe = inspect_model(model)
    with Controller(moe, TokenRule("alloc-t", "batch")):
        assert all(KERNEL in layer.experts.__dict__ for layer in moe.layers)
        with pytest.raises(AllocMoEError, match="remove it first"):
            use_kernel(model)
    assert not any(KERNEL in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("token", [None, TokenRule(), TokenRule("alloc-t", "batch")])
def test_torch_compile_finds_no_break(model: Any, token: TokenRule | None) -> None:
    # for sdpa, some versions of transformers write the causal mask out where they are compiled: on
    # CUDA that is another attention kernel, with other bits
    model.set_attn_implementation("eager")
    assert use_kernel(model)
    moe = inspect_model(model)
    torch._dynamo.reset()
    with torch.no_grad():
        controller = None if token is None else Controller(moe, token, count=False)
        if controller is not None:
            controller.set_budgets([2] * len(moe.layers))
        expected = model(input_ids=IDS).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(input_ids=IDS).logits, expected)


def test_training_takes_the_plain_path(model: Any) -> None:
    """The kernel has no backward pass."""
    assert use_kernel(model)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    experts = inspect_model(model).layers[0].experts
    assert experts.down_proj.grad is not None
    assert experts.down_proj.grad.abs().sum() > 0


@pytest.mark.parametrize("planned", [False, True])
def test_what_trains_gets_its_gradient(model: Any, planned: bool) -> None:
    """A router alone, under a plan or not, and the first product's weights alone."""
    moe = inspect_model(model)
    parts = [moe.layers[0].router.weight, moe.layers[0].experts.gate_up_proj]
    for part in parts:
        model.requires_grad_(False)
        part.requires_grad_(True)
        if planned:
            with Controller(moe, TokenRule("alloc-t", "batch")) as controller:
                controller.set_budgets([1.75] * len(moe.layers))
                loss = model(IDS, labels=IDS).loss
        else:
            assert use_kernel(model)
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        assert part.grad is not None
        assert part.grad.abs().sum() > 0


def test_a_kernel_that_no_longer_fits_is_not_used(model: Any) -> None:
    assert use_kernel(model)
    assert not use_kernel(model.float())
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()
    assert use_kernel(model.bfloat16())
    experts = inspect_model(model).layers[0].experts
    assert experts.__dict__[KERNEL].dtype == torch.bfloat16
    weights = torch.ones(1, 4)
    with torch.no_grad():
        for device, taken in ((experts.down_proj.device, True), ("meta", False)):
            hidden = torch.empty(1, 32, dtype=torch.bfloat16, device=device)
            assert experts.__dict__[KERNEL].takes(experts, hidden, weights) == taken


def test_one_layer_without_a_kernel_leaves_the_others_as_they_are(model: Any) -> None:
    layers = inspect_model(model).layers
    layers[-1].experts.act_fn = torch.nn.Softplus()
    assert not use_kernel(model)
    assert not any(KERNEL in layer.experts.__dict__ for layer in layers)


def test_a_benchmark_wants_the_model_as_transformers_runs_it(model: Any) -> None:
    assert use_kernel(model)
    with pytest.raises(AllocMoEError, match="set_experts_implementation"):
        benchmark(model, {})
    model.set_experts_implementation("eager")
    benchmark(model, {}, protocol=Protocol(1, (2,), 1, 0, 1), compiled=False, graphs=False)
    assert use_kernel(model)


def test_a_plan_that_could_not_be_applied_leaves_nothing(model: Any) -> None:
    moe = inspect_model(model)
    tuned.blocks_path().write_text("{}")
    with pytest.raises(AllocMoEError, match="tune again"):
        Controller(moe, TokenRule("alloc-t", "batch"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    tuned.blocks_path().unlink()
    Controller(moe, TokenRule("alloc-t", "batch")).remove()


@pytest.mark.skipif("muse_spark" not in available(), reason="transformers has no muse_spark")
def test_a_norm_after_each_expert_needs_the_plain_path() -> None:
    layer = inspect_model(tiny("muse_spark").half()).layers[0]
    assert find_kernel(layer.experts) is None


class TestTunedBlocks:
    BLOCKS = Blocks(16, Tile(32, 32, 1, 4, 2, False), Tile(16, 16, 1, 4, 2, False))

    def keep(self, model: Any) -> tuned.TunedShape:
        module = inspect_model(model).layers[0].experts
        layout = read_layout(module)
        assert layout is not None
        shape = tuned.shape_key(module.down_proj, layout)
        one = tuned.TunedShape(
            shape, (tuned.Entry(3.0, self.BLOCKS), tuned.Entry(None, self.BLOCKS))
        )
        tuned.TunedBlocks().with_shape(one).save(tuned.blocks_path())
        return one

    def test_what_was_tuned_is_used(self, model: Any) -> None:
        self.keep(model)
        use_kernel(model)
        table = inspect_model(model).layers[0].experts.__dict__[KERNEL].blocks
        assert table.entries == ((3.0, self.BLOCKS), (float("inf"), self.BLOCKS))

    def test_another_shape_takes_the_defaults(self, model: Any) -> None:
        self.keep(model)
        other = tiny("olmoe", intermediate_size=48).to(DEVICE, torch.float16)
        use_kernel(other)
        table = inspect_model(other).layers[0].experts.__dict__[KERNEL].blocks
        assert table.entries[0][1] != self.BLOCKS

    def test_a_shape_is_kept_once_and_others_stay(self, model: Any) -> None:
        one = self.keep(model)
        kept = tuned.TunedBlocks.load(tuned.blocks_path())
        assert kept.with_shape(one) == kept
        assert len(kept.shapes) == 1

    @pytest.mark.parametrize("broken", ["{}", "[]", '{"kind": "allocmoe.plan"}'])
    def test_a_foreign_file_is_refused(self, model: Any, broken: str) -> None:
        tuned.blocks_path().write_text(broken)
        with pytest.raises(AllocMoEError, match="tune again"):
            use_kernel(model)

    @pytest.mark.parametrize(
        ("place", "value"), [("block_n", 0), ("block_k", 48), ("num_warps", 3), ("num_stages", 0)]
    )
    def test_sizes_that_no_kernel_has_are_refused(self, model: Any, place: str, value: int) -> None:
        self.keep(model)
        data = json.loads(tuned.blocks_path().read_text())
        data["shapes"][0]["entries"][0]["blocks"]["up"][place] = value
        tuned.blocks_path().write_text(json.dumps(data))
        with pytest.raises(AllocMoEError, match="tune again"):
            use_kernel(model)

    def test_an_unknown_key_is_named(self, model: Any) -> None:
        self.keep(model)
        data = json.loads(tuned.blocks_path().read_text())
        data["shapes"][0]["entries"][0]["blocks"]["warp"] = 1
        tuned.blocks_path().write_text(json.dumps(data))
        with pytest.raises(AllocMoEError, match="warp"):
            use_kernel(model)
