"""The fused experts kernel against the definition, on CUDA or in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from allocmoe.kernels import compact, read_layout, weights_of
from allocmoe.kernels.blocks import Blocks, BlockTable, Tile, default_blocks
from allocmoe.kernels.fused import launch, tune
from allocmoe.kernels.fused.launch import launch_experts
from allocmoe.kernels.layout import FUNCTIONS, Activation
from allocmoe.kernels.reference import run_experts_reference
from allocmoe.models import families, inspect_model
from tiny import available, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter takes bfloat16 for integers
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
# gated; interleaved, transposed, clamped and with biases; no gate; transposed; clamped
LAYOUTS = [f for f in ("olmoe", "gpt_oss", "nemotron_h", "aria", "hy_v4") if f in available()]
# off every block size, and several blocks of an expert
BLOCKS = [
    Blocks(16, Tile(32, 32, 1, 4, 2, False), Tile(16, 16, 1, 4, 2, False)),
    Blocks(32, Tile(16, 64, 8, 4, 3, True), Tile(64, 32, 2, 4, 2, True)),
    # large enough that blocks less than half full are halved
    Blocks(128, Tile(32, 32, 8, 4, 3, True), Tile(32, 32, 8, 4, 3, False)),
]


def routing(T: int, E: int, K: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """An uneven routing: the last experts are rare, expert 0 is never chosen."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(T, E, generator=generator) - torch.linspace(0, 0.8, E)
    scores[:, 0] = -1
    index = scores.argsort(1, descending=True)[:, :K]
    return index.to(DEVICE), torch.rand(T, K, generator=generator).to(DEVICE)


def reference(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The definition in float64."""
    exact = type("Exact", (), {})()
    for name in ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate", "act_fn"):
        if hasattr(module, name):
            setattr(exact, name, getattr(module, name))
    for name, parameter in module.named_parameters():
        setattr(exact, name, parameter.detach().double())
    keep = index < module.num_experts
    pairs = compact(index, weights.double(), keep)
    return run_experts_reference(exact, hidden.double(), pairs, len(hidden))


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("T", [1, 5, 33, 150])
def test_equals_the_definition(family: str, dtype: torch.dtype, blocks: Blocks, T: int) -> None:
    model = tiny(family).to(DEVICE, dtype)
    layer = inspect_model(model).layers[0]
    module, K = layer.experts, layer.k_orig
    layout = read_layout(module)
    assert layout is not None
    index, weights = routing(T, module.num_experts, K, seed=T)
    index[torch.rand(T, K, device=DEVICE) < 0.4] = module.num_experts
    # a dropped pair's weight must not matter, whatever it is
    weights[index == module.num_experts] = float("nan")
    hidden = torch.randn(T, 32, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        out = launch_experts(hidden, index, weights, weights_of(module), layout, blocks)
        again = launch_experts(hidden, index, weights, weights_of(module), layout, blocks)
        expected = reference(module, hidden, index, weights)
    assert out.dtype == dtype
    assert torch.equal(out, again)
    error = (out.double() - expected).norm() / expected.norm().clamp_min(1e-9)
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("T", [0, 3, 40])
def test_nothing_kept_gives_zeros(T: int) -> None:
    model = tiny("olmoe").to(DEVICE, torch.float16)
    module = inspect_model(model).layers[0].experts
    layout = read_layout(module)
    assert layout is not None
    index = torch.full((T, 4), module.num_experts, device=DEVICE)
    hidden = torch.randn(T, 32, dtype=torch.float16, device=DEVICE)
    weights = torch.rand(T, 4, device=DEVICE)
    out = launch_experts(hidden, index, weights, weights_of(module), layout, BLOCKS[0])
    assert torch.equal(out, torch.zeros_like(hidden))


@pytest.mark.parametrize(("N", "E"), [(1, 3), (17, 8), (300, 8), (700, 60), (5000, 300)])
def test_sorted_pairs_are_all_kept_pairs_by_expert(N: int, E: int) -> None:
    """In one launch and in two; the blocks cover every expert's pairs once."""
    index = torch.randint(0, E + 2, (N, 1), device=DEVICE)
    index[index == 1] = E  # an empty expert
    slot, table = launch._sort(index, E, 16)
    kept = (index.flatten() < E).nonzero().flatten().tolist()
    assert sorted(slot[: len(kept)].tolist()) == kept
    rows: list[int] = []
    for expert, first, end in table.tolist():
        if expert >= 0:
            mine = range(first, min(first + 16, end))
            assert all(index[slot[row], 0] == expert for row in mine)
            rows += mine
    assert sorted(rows) == list(range(len(kept)))


def test_every_family_is_recognised_or_left_to_the_plain_path() -> None:
    unknown = set()
    for family in sorted(set(available()) & set(families.FAMILIES)):
        module = inspect_model(tiny(family)).layers[0].experts
        if read_layout(module) is None:
            unknown.add(family)
    # a norm after each expert
    assert unknown <= {"muse_spark"}, unknown


def test_an_unknown_gate_is_not_mistaken_for_a_known_one() -> None:
    def module(gate: Any) -> Any:
        return SimpleNamespace(
            has_gate=True, is_concatenated=True, is_transposed=False, _apply_gate=gate
        )

    def silu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def nearly(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate.clamp(max=9.0)) * up

    known = read_layout(module(silu))
    assert known is not None
    assert known.activation == Activation("silu")
    assert read_layout(module(nearly)) is None


@pytest.mark.parametrize("function", FUNCTIONS)
def test_activations(function: str) -> None:
    """Each activation inside the kernel, with and without a gate."""
    torch.manual_seed(0)
    hidden = torch.randn(20, 32, dtype=torch.float16, device=DEVICE)
    index, weights = routing(20, 4, 2)
    for gated in (True, False):
        f = Activation(function, gated=gated)
        module = SimpleNamespace(
            num_experts=4,
            has_gate=gated,
            has_bias=False,
            is_transposed=False,
            act_fn=lambda x, f=f: f(x, None),
            _apply_gate=lambda x, f=f: f(*x.chunk(2, -1)),
        )
        up = torch.randn(4, 32 if gated else 16, 32, device=DEVICE).half() / 4
        setattr(module, "gate_up_proj" if gated else "up_proj", up)
        module.down_proj = torch.randn(4, 32, 16, device=DEVICE).half() / 4
        weights_ = weights_of(module)
        layout = launch.Layout(f, interleaved=False, transposed=False)
        out = launch_experts(hidden, index, weights, weights_, layout, BLOCKS[0])
        pairs = compact(index, weights, index < 4)
        exact = SimpleNamespace(**vars(module))
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            if hasattr(exact, name):
                setattr(exact, name, getattr(exact, name).double())
        expected = run_experts_reference(exact, hidden.double(), pairs, 20)
        error = (out.double() - expected).norm() / expected.norm()
        assert error < 2e-3


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("limit", [float("inf"), 7.0])
def test_what_is_not_a_number_stays_so(function: str, limit: float) -> None:
    """An overflow must not come out as a plausible number."""
    layout = launch.Layout(Activation(function, True, limit), interleaved=False, transposed=False)
    up, down = (torch.randn(4, 32, k, device=DEVICE).half() / 4 for k in (32, 16))
    hidden = torch.randn(20, 32, device=DEVICE).half()
    hidden[3, 5] = float("nan")
    index, weights = routing(20, 4, 2)
    out = launch_experts(
        hidden, index, weights, launch.Weights(up, down, None, None), layout, BLOCKS[0]
    )
    assert out[3].isnan().all()
    assert int(out.isnan().any(1).sum()) == 1


def test_weights_and_biases_may_lie_anyhow() -> None:
    """A slice of larger ones, in a kernel that would rather copy in bulk."""
    torch.manual_seed(0)
    layout = launch.Layout(Activation("silu"), interleaved=False, transposed=False)
    shapes = [(4, 32, 32), (4, 32, 16), (4, 32), (4, 32)]
    whole = [(torch.randn(4, 2 * shape[1], *shape[2:]) / 4).half().to(DEVICE) for shape in shapes]
    sliced = [w[:, : shape[1]] for w, shape in zip(whole, shapes, strict=True)]
    hidden = torch.randn(20, 32, device=DEVICE).half()
    out, expected = (
        launch_experts(hidden, *routing(20, 4, 2), launch.Weights(*parts), layout, BLOCKS[1])
        for parts in (sliced, [part.contiguous() for part in sliced])
    )
    assert torch.equal(out, expected)


def test_blocks_survive_as_numbers() -> None:
    for blocks in BLOCKS:
        assert Blocks.from_numbers(blocks.numbers()) == blocks


def test_a_table_gives_the_first_entry_that_reaches() -> None:
    small, large, _ = BLOCKS
    table = BlockTable(((4.0, small), (100.0, large)))
    assert table.choose(num_pairs=32, num_experts=8) == small
    assert table.choose(num_pairs=33, num_experts=8) == large
    assert table.choose(num_pairs=10**6, num_experts=8) == large


@pytest.mark.parametrize("T", [1, 8, 64, 700, 8192, 100_000])
@pytest.mark.parametrize("up", [True, False])
def test_candidates_differ_and_fit(T: int, up: bool) -> None:
    layout = launch.Layout(Activation("silu"), interleaved=False, transposed=False)
    problem = tune.Problem(64, 2048, 1408, 6, torch.bfloat16, layout)
    found = list(problem.candidates(T, True, up))
    assert found
    assert len(set(found)) == len(found)
    assert all(b.up.shared_bytes(b.block_m, 1 + up) <= 227 * 1024 for b in found)
    older = list(problem.candidates(T, False, up))
    assert older
    assert not any(b.up.tma for b in older)


def test_defaults_exist_for_every_size() -> None:
    table = default_blocks(torch.device(DEVICE))
    assert table.entries[-1][0] == float("inf")


def test_weights_are_fetched_in_whole_vectors() -> None:
    """In every layout, as compiled for an H200: number by number the kernel is 50 times slower."""
    script = Path(__file__).parents[1] / "compile_products.py"
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(compiled) == 3 * 2**4
    assert [one for one in compiled if one["narrow_loads"] or one["spilled"]] == []
