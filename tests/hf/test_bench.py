"""The benchmark steps as `generate` does, counts what runs, and adds up."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from allocmoe import Benchmark, Plan, Protocol, apply, benchmark, make_plan
from allocmoe.bench import steps
from allocmoe.bench.clock import copy_bandwidth, time_ms
from allocmoe.bench.floor import floor_bytes
from allocmoe.bench.measure import Setup
from allocmoe.bench.steps import Stepper
from allocmoe.errors import AllocMoEError
from allocmoe.models import inspect_model
from allocmoe.runtime.control import LayerControl
from tiny import tiny

# full, latent, sliding and linear attention, and a model inside another
FAMILIES = ["olmoe", "qwen2_moe", "deepseek_v2", "gpt_oss", "gemma4", "jamba", "qwen3_vl_moe"]
CPU = torch.device("cpu")
PROMPT = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(0))
STEPS = 6
PROTOCOL = Protocol(batch_size=3, prompt_lengths=(5, 12), decode_tokens=4, warmups=1, runs=3)


def generated(model: PreTrainedModel) -> torch.Tensor:
    """The greedy continuation by transformers itself: one token of the prefill, then the steps."""
    out = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=1 + STEPS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, PROMPT.shape[1] :]


def stepped(stepper: Stepper) -> torch.Tensor:
    stepper.reset()
    stepper.prefill()
    tokens = [stepper.ids_B1.clone()]
    for _ in range(STEPS):
        stepper.decode_step()
        tokens.append(stepper.ids_B1.clone())
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("method", [None, "uniform", "alloc-t"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_decode_what_generate_does(family: str, method: Any) -> None:
    model = tiny(family)
    applied = None
    if method is not None:
        applied = apply(model, make_plan(method, "50%", model=model), count=False)
    stepper = Stepper(model, PROMPT, STEPS)
    expected = generated(model)
    assert torch.equal(stepped(stepper), expected)
    assert torch.equal(stepped(stepper), expected), "a second run differs"
    if applied is not None:
        applied.remove()


@pytest.mark.parametrize("method", ["uniform", "alloc-t"])
def test_compiled_steps_decode_the_same(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = tiny("deepseek_v2")
    with apply(model, make_plan(method, "50%", model=model), count=False):
        stepper = Stepper(model, PROMPT, STEPS, compiled=True)
        assert stepper.compiled
        assert torch.equal(stepped(stepper), generated(model))
    torch._dynamo.reset()


def test_the_cache_keeps_its_place_in_memory() -> None:
    stepper = Stepper(tiny("olmoe"), PROMPT, STEPS)

    def places() -> list[int]:
        layers = stepper.cache.layers
        return [t.data_ptr() for x in layers for t in (x.keys, x.values, x.cumulative_length)]

    before, ids = places(), stepper.ids_B1.data_ptr()
    assert stepper.cache.layers[0].keys.shape[2] == PROMPT.shape[1] + STEPS
    stepped(stepper)
    assert (places(), stepper.ids_B1.data_ptr()) == (before, ids)


def test_a_sliding_window_is_not_captured() -> None:
    """Its cache counts on the host: a graph would replay one position for ever."""
    stepper = Stepper(tiny("gpt_oss"), PROMPT, STEPS, graphs=True, compiled=True)
    assert (stepper.captured, stepper.compiled) == (False, False)


def test_a_model_without_a_static_cache_is_refused() -> None:
    with pytest.raises(AllocMoEError, match="cannot run on a static cache: MiniMax"):
        Stepper(tiny("minimax"), PROMPT, STEPS)


def test_long_prompts_are_prefilled_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Any] = []

    def capture(work: Any) -> Any:
        captured.append(work)
        return work

    monkeypatch.setattr(steps, "capture", capture)
    model = tiny("olmoe")
    for most, expected in ((PROMPT.numel(), 2), (PROMPT.numel() - 1, 1)):
        monkeypatch.setattr(steps, "_MOST_TOKENS_CAPTURED", most)
        captured.clear()
        stepper = Stepper(model, PROMPT, STEPS, graphs=True)
        assert len(captured) == expected
        assert torch.equal(stepped(stepper), generated(model))


class TestFloor:
    """By hand, for the tiny OLMoE: hidden 32, 4 heads and 2 of keys of width 8, 8 experts of 16."""

    ATTENTION = 32 * 32 + 2 * 16 * 32 + 32 * 32 + (32 + 16)  # q, k and v, o, two norms
    EXPERT = 3 * 32 * 16
    LAYER = ATTENTION + 2 * 32 + 8 * 32  # two norms, the router
    OUTPUT = 32 + 128 * 32
    DISTINCT = (8.0, 2.0, 5.5, 4.0)
    # keys and values of 3 sequences, 2 heads of width 8, in 4 layers
    POSITION = 4 * 2 * 3 * 2 * 8

    def expected(self, num_cached: float) -> float:
        experts = sum(self.DISTINCT) * self.EXPERT
        return 4 * (4 * self.LAYER + experts + self.OUTPUT + num_cached * self.POSITION)

    @pytest.mark.parametrize("tied", [False, True])
    def test_bytes(self, tied: bool) -> None:
        model = tiny("olmoe", tie_word_embeddings=tied)
        stepper = Stepper(model, PROMPT, STEPS)
        counted = floor_bytes(inspect_model(model), self.DISTINCT, stepper.cache, 12)
        assert counted == self.expected(12)

    def test_half_the_bytes_in_half_the_precision(self) -> None:
        model = tiny("olmoe").to(torch.bfloat16)
        stepper = Stepper(model, PROMPT, STEPS)
        counted = floor_bytes(inspect_model(model), self.DISTINCT, stepper.cache, 12)
        assert 2 * counted == self.expected(12)

    def test_other_towers_are_not_read(self) -> None:
        model = tiny("qwen3_vl_moe")
        stepper = Stepper(model, PROMPT, STEPS)
        moe = inspect_model(model)
        full = floor_bytes(moe, [layer.num_experts for layer in moe.layers], stepper.cache, 0)
        table = model.get_input_embeddings().weight
        text = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
        assert full == sum(parameter.nbytes for parameter in text) - table.nbytes


def test_clock_and_bandwidth() -> None:
    assert time_ms(CPU, lambda: None) < 5
    assert time_ms(CPU, lambda: torch.rand(1 << 20).sort()) > 0.1
    assert 1e8 < copy_bandwidth(CPU) < 1e13


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("qwen2_moe", num_hidden_layers=3)


@pytest.fixture(scope="module")
def plans(model: PreTrainedModel) -> dict[str, Plan]:
    made = {name: make_plan(name, "50%", model=model) for name in ("uniform", "alloc-t")}
    return {**made, "mine": replace(made["uniform"], layer_budgets=(1.0, 2.0, 3.0))}


@pytest.fixture(scope="module")
def result(model: PreTrainedModel, plans: dict[str, Plan]) -> Benchmark:
    return benchmark(model, plans, protocol=PROTOCOL)


class TestBenchmark:
    def test_the_unmodified_model_comes_first(self, result: Benchmark) -> None:
        names = ["unmodified", "uniform", "alloc-t", "mine"]
        assert [row.name for row in result.rows] == names
        assert [row.token for row in result.rows][1:4] == ["none", "alloc-t/batch", "none"]
        assert [row.budget for row in result.rows] == [12, 6, 6, 6]
        # nothing of CUDA here
        assert not any(row.decode.captured or row.decode.compiled for row in result.rows)
        assert (result.fused, result.machine.gpu, result.dtype) == (False, None, "float32")

    def test_realised_is_the_budget(self, result: Benchmark, plans: dict[str, Plan]) -> None:
        for row in result.rows:
            budgets = plans[row.name].layer_budgets if row.name in plans else (4.0,) * 3
            assert row.decode.realised_per_layer == pytest.approx(budgets), row.name
            for prefill in row.prefill:
                assert prefill.realised_per_layer == pytest.approx(budgets), row.name

    def test_distinct_experts_are_those_of_a_step(self, result: Benchmark) -> None:
        for row in result.rows:
            for distinct, k in zip(
                row.decode.distinct_per_step, row.decode.realised_per_layer, strict=True
            ):
                assert k <= distinct <= min(8, k * PROTOCOL.batch_size)

    def test_every_timed_run_is_kept(self, result: Benchmark) -> None:
        for row in result.rows:
            assert [prefill.prompt_length for prefill in row.prefill] == [5, 12]
            for timing in (*(p.time for p in row.prefill), row.decode.step, row.decode.experts):
                assert len(timing.runs_ms) == PROTOCOL.runs
                assert timing.median_ms == median(timing.runs_ms)
                assert 0 < timing.min_ms <= timing.median_ms <= timing.max_ms

    def test_what_is_relative_adds_up(self, result: Benchmark) -> None:
        first = result.rows[0]
        for row in result.rows:
            decode, step = row.decode, row.decode.step.median_ms
            assert decode.speedup == pytest.approx(first.decode.step.median_ms / step)
            assert decode.tokens_per_second == pytest.approx(3000 / step)
            assert decode.rest_ms == pytest.approx(step - decode.experts.median_ms)
            floor_ms = 1e3 * decode.floor_bytes / result.copy_bytes_per_second
            assert decode.floor_ms == pytest.approx(floor_ms)
            assert decode.times_floor == pytest.approx(step / floor_ms)
            for prefill, base in zip(row.prefill, first.prefill, strict=True):
                assert prefill.speedup == pytest.approx(
                    base.time.median_ms / prefill.time.median_ms
                )

    def test_the_drift_is_the_last_timing_over_the_first(
        self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[tuple[list[float], list[float]]] = []
        original = Setup.time

        def watch(*args: Any) -> tuple[list[float], list[float]]:
            told.append(original(*args))
            return told[-1]

        monkeypatch.setattr(Setup, "time", watch)
        result = benchmark(model, {}, protocol=PROTOCOL)
        (first_prefill, first_step), (last_prefill, last_step) = told[0], told[-1]
        assert len(told) == 3  # two prompt lengths, and the first one again
        assert result.prefill_drift == pytest.approx(
            median(last_prefill) / median(first_prefill) - 1
        )
        assert result.decode_drift == pytest.approx(median(last_step) / median(first_step) - 1)

    def test_fewer_experts_lower_the_floor(self, result: Benchmark) -> None:
        floors = {row.name: row.decode.floor_bytes for row in result.rows}
        assert floors["uniform"] < floors["unmodified"]

    def test_round_trip(self, result: Benchmark, tmp_path: Path) -> None:
        result.save(tmp_path / "b.json")
        assert Benchmark.load(tmp_path / "b.json") == result

    def test_the_prompts_are_random_and_reproducible(
        self, result: Benchmark, model: PreTrainedModel
    ) -> None:
        assert result.text is not None
        assert (result.text.source, result.text.sequence_length) == ("random tokens", 5)
        short = replace(PROTOCOL, runs=1, warmups=0, decode_tokens=1)
        texts = [benchmark(model, {}, protocol=replace(short, seed=seed)).text for seed in (0, 1)]
        assert texts[0] == result.text != texts[1]

    def test_the_model_is_left_as_it_was(
        self, model: PreTrainedModel, plans: dict[str, Plan]
    ) -> None:
        def hooks() -> int:
            return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

        before, count = model(PROMPT).logits, hooks()
        benchmark(model, plans, protocol=replace(PROTOCOL, runs=1, warmups=0))
        assert torch.equal(model(PROMPT).logits, before)
        assert hooks() == count


def test_experts_alone_find_what_their_router_said(
    model: PreTrainedModel, plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule may use up the router's output: then each call of the experts needs it anew."""
    rank, calls = LayerControl.rank, []

    def use_up(self: LayerControl, *args: torch.Tensor) -> Any:
        calls.append(self.layer.index)
        ranked = rank(self, *args)
        self._logits = None
        return ranked

    monkeypatch.setattr(LayerControl, "rank", use_up)
    once = Protocol(batch_size=2, prompt_lengths=(4,), decode_tokens=1, warmups=0, runs=1)
    row = benchmark(model, {"alloc-t": plans["alloc-t"]}, protocol=once).rows[1]
    assert row.decode.experts.min_ms > 0
    assert calls == [0, 1, 2] * (len(calls) // 3)


def test_refusals(model: PreTrainedModel, plans: dict[str, Plan]) -> None:
    with pytest.raises(AllocMoEError, match="cannot be named 'unmodified'"):
        benchmark(model, {"unmodified": plans["uniform"]}, protocol=PROTOCOL)
    with pytest.raises(AllocMoEError, match="does not fit"):
        benchmark(tiny("olmoe"), plans, protocol=PROTOCOL)
