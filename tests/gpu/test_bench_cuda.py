"""Steps replayed as CUDA graphs decode what plain calls do, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from allocmoe import Protocol, apply, benchmark, make_plan
from allocmoe.bench.clock import copy_bandwidth
from allocmoe.bench.steps import Stepper
from allocmoe.models.shapes import build_shape
from no_waiting import no_waiting
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPT = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(0))
STEPS = 6
# of bfloat16 logits of a few units
CLOSE = 0.1


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@torch.no_grad()
def shortfalls(model: Any, tokens_BN: torch.Tensor) -> torch.Tensor:
    """How far the logit of each token is below the largest one, where `generate` is led along the
    same tokens: 0 for what it would choose, and next to nothing where rounding chose."""
    ids, cache, gaps = PROMPT.cuda(), None, []
    for token_B1 in tokens_BN.split(1, dim=1):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        logits, cache, ids = out.logits[:, -1].float(), out.past_key_values, token_B1
        gaps.append(logits.max(-1, keepdim=True).values - logits.gather(1, token_B1))
    return torch.cat(gaps, 1)


def stepped(stepper: Stepper) -> torch.Tensor:
    stepper.reset()
    stepper.prefill()
    tokens = [stepper.ids_B1.clone()]
    for _ in range(STEPS):
        stepper.decode_step()
        tokens.append(stepper.ids_B1.clone())
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", [None, "uniform", "alloc-t"])
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "deepseek_v2"])
def test_graphs_decode_what_generate_does(family: str, method: Any, compiled: bool) -> None:
    model = tiny(family).to("cuda", torch.bfloat16)
    plan = None if method is None else make_plan(method, "50%", model=model)
    with nullcontext() if plan is None else apply(model, plan, count=False):
        stepper = Stepper(model, PROMPT.cuda(), STEPS, graphs=True, compiled=compiled)
        assert (stepper.captured, stepper.compiled) == (True, compiled)
        tokens = stepped(stepper)
        assert torch.equal(stepped(stepper), tokens), "a replay differs"
        assert shortfalls(model, tokens).max() < CLOSE


def test_a_replay_does_not_wait() -> None:
    stepper = Stepper(tiny("olmoe").to("cuda", torch.bfloat16), PROMPT.cuda(), STEPS, graphs=True)
    stepper.reset()
    with no_waiting():
        stepper.prefill()
        stepper.decode_step()


@pytest.mark.parametrize("experts", ["allocmoe", "stock"])
def test_benchmark(experts: Any) -> None:
    model = tiny("qwen2_moe").to("cuda", torch.bfloat16)
    plans = {name: make_plan(name, "50%", model=model) for name in ("uniform", "alloc-t")}
    before = model.config._experts_implementation
    protocol = Protocol(batch_size=4, prompt_lengths=(8, 1024), decode_tokens=8, warmups=1, runs=3)
    result = benchmark(model, plans, protocol=protocol, experts=experts, compiled=False)
    stock = ["unmodified, stock"] if experts == "allocmoe" else []
    names = ["unmodified", *stock, "uniform", "alloc-t"]
    assert [row.name for row in result.rows] == names
    for row in result.rows:
        assert row.decode.captured
        assert [prefill.captured for prefill in row.prefill] == [True, False]
        budget = 2.0 if row.method in plans else 4.0
        assert row.decode.realised_per_layer == pytest.approx((budget,) * 4)
        assert row.decode.times_floor > 1
    assert result.machine.gpu == torch.cuda.get_device_name()
    assert model.config._experts_implementation == before


def test_memory_is_given_back() -> None:
    model = tiny("olmoe").to("cuda", torch.bfloat16)
    plans = {"uniform": make_plan("uniform", "50%", model=model)}
    protocol = Protocol(batch_size=2, prompt_lengths=(8,), decode_tokens=4, warmups=0, runs=1)
    used = []
    for _ in range(3):
        benchmark(model, plans, protocol=protocol, compiled=False)
        used.append(torch.cuda.memory_allocated())
    assert used[2] == used[1]


def test_a_shape_is_built_on_the_device() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build_shape("olmoe", layers=1, device="cuda")
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert next(model.parameters()).is_cuda
    # no copy in another precision on the way
    assert torch.cuda.max_memory_allocated() - before < 1.5 * size


def test_bandwidth() -> None:
    assert 1e11 < copy_bandwidth(torch.device("cuda")) < 1e14
