"""A plan inside an unmodified vLLM."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm_runner import FAMILIES, IDS, SAME, SIZES, engine, model, run

import allocmoe
from allocmoe.artifacts import Plan
from allocmoe.errors import AllocMoEError
from tiny import tiny

TEXT = allocmoe.text_from_ids(
    torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(1))
)
RULES = ["uniform", "layers", "alloc-t/batch", "alloc-t/threshold", "naee", "dynamic-moe"]


def make(family: str, rule: str, budget: str = "50%") -> Plan:
    loaded = model(family)
    method, _, scope = rule.partition("/")
    if rule == "layers":
        plan = allocmoe.make_plan("uniform", "50%", model=loaded)
        budgets = [1.0 + i % k for i, k in enumerate(plan.model.k_orig)]
        used = sum(budgets)
        return replace(plan, layer_budgets=tuple(budgets), budget=int(used), budget_used=used)
    options: dict[str, Any] = {"scope": scope} if scope else {}
    return allocmoe.make_plan(method, budget, model=loaded, text=TEXT, **options)


def transformers_logprobs(family: str, plan: Plan, ids: torch.Tensor = IDS) -> torch.Tensor:
    loaded = model(family)
    with torch.no_grad(), allocmoe.apply(loaded, plan):
        logprobs = loaded(ids).logits.log_softmax(-1)
    return logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_budget_is_stock(family: str, folders: dict[str, Path]) -> None:
    with engine(folders[family]) as llm:
        stock = run(llm)
    for rule in ("uniform", "alloc-t/batch"):
        with engine(folders[family], make(family, rule, "100%")) as llm:
            planned = run(llm)
        assert torch.equal(planned[0], stock[0])
        assert planned[1] == stock[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_uniform_is_the_smaller_config(family: str, folders: dict[str, Path]) -> None:
    with engine(folders[family], hf_overrides={"num_experts_per_tok": 2}) as llm:
        smaller = run(llm)
    with engine(folders[family], make(family, "uniform")) as llm:
        planned = run(llm)
    assert torch.equal(planned[0], smaller[0])
    assert planned[1] == smaller[1]


@pytest.mark.parametrize("family", SAME)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_does_what_it_does_in_transformers(
    family: str, rule: str, folders: dict[str, Path]
) -> None:
    plan = make(family, rule)
    with engine(folders[family], plan) as llm:
        logprobs, _ = run(llm)
    expected = transformers_logprobs(family, plan)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


RENORMALISES = dict(head_dim=32, moe_intermediate_size=32, norm_topk_prob=True)
PROBABILITIES = dict(
    head_dim=32, global_head_dim=32, moe_intermediate_size=32, hidden_size_per_layer_input=0
)


@pytest.mark.parametrize(
    ("family", "sizes", "method", "options"),
    [
        ("qwen3_moe", RENORMALISES, "uniform", {"renormalise_over": 4}),
        ("qwen3_moe", RENORMALISES, "alloc-t", {}),
        ("gemma4", PROBABILITIES, "alloc-t", {"scope": "threshold"}),
    ],
)
def test_weights_that_are_renormalised_and_routers_that_give_probabilities(
    family: str, sizes: dict[str, Any], method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    loaded = tiny(family, **SIZES, **sizes)
    plan = allocmoe.make_plan(method, "50%", model=loaded, text=TEXT, **options)
    loaded.save_pretrained(tmp_path)
    with engine(tmp_path, plan) as llm:
        logprobs, _ = run(llm)
    with torch.no_grad(), allocmoe.apply(loaded, plan):
        expected = loaded(IDS).logits.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])
    torch.testing.assert_close(logprobs, expected[..., 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rule", ["alloc-t/batch", "alloc-t/threshold", "naee"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_is_the_plans_and_no_dropped_expert_is_loaded(
    family: str, rule: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at the last place before vLLM's experts, in the first layer, where both see the same."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = RoutedExperts.forward_modular

    def watch(
        self: Any, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if len(x) == IDS.numel():
            seen.append((topk_weights.clone(), topk_ids.clone().long()))
        return original(self, x, topk_weights, topk_ids, *args, **kwargs)

    plan = make(family, rule)
    with engine(folders[family], plan) as llm:
        monkeypatch.setattr(RoutedExperts, "forward_modular", watch)
        run(llm)
    weights, ids = seen[0]
    kept = weights != 0
    if rule == "alloc-t/batch":
        assert int(kept.sum()) == round(plan.layer_budgets[0] * IDS.numel())
    # an expert that stands in for a dropped pair is one its token runs
    for token in range(len(ids)):
        assert set(ids[token].tolist()) == set(ids[token][kept[token]].tolist())
    if family in SAME:
        expected = first_layer(family, plan)
        got = torch.zeros_like(expected).scatter_add(1, ids, weights.float())
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def first_layer(family: str, plan: Plan) -> torch.Tensor:
    """The weights, `[T, E]`, with which the first MoE layer runs in transformers."""
    loaded = model(family)
    with torch.no_grad(), allocmoe.apply(loaded, plan) as applied:
        control = applied.controls[0]
        seen: list[Any] = []
        layer = control.layer
        hook = layer.experts.register_forward_pre_hook(lambda m, args: seen.append(args))
        loaded(IDS)
        hook.remove()
        _, index, weights = seen[0]
        index, weights, scores = control.rank(index, weights)
        keep = control.select(scores)
        weights = torch.where(keep, control.reweigh(weights, scores, keep), 0.0)
    return torch.zeros(len(index), layer.num_experts).scatter_add(1, index, weights.float())


@pytest.mark.parametrize("rule", ["layers", "alloc-t/threshold"])
def test_company_does_not_matter(rule: str, folders: dict[str, Path]) -> None:
    with engine(folders["olmoe"], make("olmoe", rule)) as llm:
        together, tokens = run(llm)
        for number in range(len(IDS)):
            alone, own = run(llm, IDS[number : number + 1])
            assert own == [tokens[number]]
            assert torch.equal(alone[0], together[number])


@pytest.mark.parametrize("rule", ["layers", "alloc-t/batch", "alloc-t/threshold"])
def test_compiled_is_eager(rule: str, folders: dict[str, Path]) -> None:
    plan = make("olmoe", rule)
    with engine(folders["olmoe"], plan, enforce_eager=False) as llm:
        logprobs, _ = run(llm)
    torch.testing.assert_close(logprobs, transformers_logprobs("olmoe", plan), atol=1e-4, rtol=0)


def test_a_plan_by_file_and_by_variable(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make("olmoe", "layers")
    plan.save(tmp_path / "plan.json")
    with engine(folders["olmoe"], plan) as llm:
        inline = run(llm)[0]
    config = {"allocmoe": {"plan": str(tmp_path / "plan.json")}}
    with engine(folders["olmoe"], additional_config=config) as llm:
        assert torch.equal(run(llm)[0], inline)
    monkeypatch.setenv("ALLOCMOE_PLAN", str(tmp_path / "plan.json"))
    with engine(folders["olmoe"]) as llm:
        assert torch.equal(run(llm)[0], inline)


def test_what_cannot_be_served_stops_the_start(folders: dict[str, Path]) -> None:
    plan = make("olmoe", "uniform")
    foreign = make("qwen2_moe", "uniform")
    broken = {**plan.to_json(), "layer_budgets": [9.0] * 4}
    sequence = allocmoe.make_plan("alloc-t", "50%", model=model("olmoe"), scope="sequence")
    cases: list[tuple[Any, str]] = [
        (foreign.to_json(), "does not fit"),
        (broken, "outside"),
        ({"kind": "nothing"}, "kind"),
        ("no/such/plan.json", "no/such/plan.json"),
        (json.loads(json.dumps(sequence.to_json())), "sequence scope"),
    ]
    for given, message in cases:
        with (
            pytest.raises(Exception, match=message),
            engine(folders["olmoe"], additional_config={"allocmoe": {"plan": given}}),
        ):
            pass
    with (
        pytest.raises(Exception, match="must be"),
        engine(folders["olmoe"], additional_config={"allocmoe": {"plam": 1}}),
    ):
        pass


def test_routing_outside_of_vllm_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transformers backend has a layer for models whose router it does not know."""
    from vllm.model_executor.custom_op import op_registry_oot

    from allocmoe.runtime.vllm.plugin import register

    register()
    register()  # as vLLM may
    refused = op_registry_oot["TransformersMoERunner"]
    monkeypatch.setitem(op_registry_oot, "MoERunner", refused)
    with (
        pytest.raises(Exception, match="through its transformers backend"),
        engine(folders["olmoe"], make("olmoe", "uniform")),
    ):
        pass


def test_context_parallelism_is_refused() -> None:
    from allocmoe.runtime.vllm.runner import served_by

    config = SimpleNamespace(
        additional_config={"allocmoe": {"plan": make("olmoe", "alloc-t/batch").to_json()}},
        parallel_config=SimpleNamespace(decode_context_parallel_size=2),
    )
    with pytest.raises(AllocMoEError, match="context parallelism"):
        served_by(config)


def test_a_sleep_would_lose_what_the_selection_reads() -> None:
    from allocmoe.runtime.vllm.runner import served_by

    config = SimpleNamespace(
        additional_config={"allocmoe": {"plan": make("olmoe", "naee").to_json()}},
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(enable_sleep_mode=True),
    )
    with pytest.raises(AllocMoEError, match="sleep"):
        served_by(config)


@pytest.mark.parametrize(
    ("shares", "rule", "message"),
    [
        ({"dp_size": 2}, "alloc-t/batch", "data or expert parallelism"),
        ({"use_ep": True}, "alloc-t/batch", "data or expert parallelism"),
        ({"enable_eplb": True}, "naee", "load balancing"),
        ({"pcp_size": 2}, "alloc-t/threshold", "split over ranks"),
        ({"is_sequence_parallel": True}, "alloc-t/threshold", "split over ranks"),
    ],
)
def test_ranks_that_share_tokens_or_experts_are_refused(
    shares: dict[str, Any], rule: str, message: str
) -> None:
    from allocmoe.runtime.vllm.runner import _check_token_rule

    alone: dict[str, Any] = dict(dp_size=1, use_ep=False, enable_eplb=False, pcp_size=1)
    for parallel in (alone, alone | shares):
        moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(**parallel))
        with pytest.raises(AllocMoEError, match=message) if parallel != alone else nullcontext():
            _check_token_rule(make("olmoe", rule), moe_config, SimpleNamespace())


def test_our_kernel_is_not_for_experts_shared_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data parallelism vLLM's kernel gathers the tokens and sums over the ranks."""
    from allocmoe.runtime.vllm import experts

    class Weight:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda")

        def __init__(self, *shape: int) -> None:
            self.shape = shape

        def dim(self) -> int:
            return len(self.shape)

    class UnquantizedFusedMoEMethod:
        unquantized_backend = SimpleNamespace(name="TRITON")
        mk_can_overlap_shared_experts = False

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(experts, "blocks_for", lambda weight, layout: None)
    routed = SimpleNamespace(
        w13_weight=Weight(8, 64, 128),
        w2_weight=Weight(8, 128, 32),
        activation=SimpleNamespace(value="silu"),
    )
    for dp_size, found in ((1, True), (2, False)):
        parallel = SimpleNamespace(use_ep=False, dp_size=dp_size)
        runner = SimpleNamespace(
            routed_experts=routed,
            _quant_method=UnquantizedFusedMoEMethod(),
            moe_config=SimpleNamespace(moe_parallel_config=parallel),
        )
        assert (experts.own_kernel(runner) is not None) == found


def test_layers_that_draft_tokens_are_not_the_plans() -> None:
    from allocmoe.models import inspect_model
    from allocmoe.runtime.vllm.served import Served

    served = Served(make("olmoe", "uniform"), inspect_model(model("olmoe")))
    for name in ("model.layers.1.mlp.experts", "language_model.model.layers.1.mlp.experts"):
        layer = served.layer(name)
        assert layer is not None
        assert layer.index == 1
    for name in ("mtp.layers.0.mlp.experts", "model.layers.4.mtp_block.mlp", "model.layers.4.mlp"):
        assert served.layer(name) is None
    with pytest.raises(AllocMoEError, match="knows no MoE layer"):
        served.layer("model.experts")


def test_a_backend_with_its_top_k_inside_cannot_change_it() -> None:
    from allocmoe.runtime.vllm.runner import PlannedRouter

    router = PlannedRouter.__new__(PlannedRouter)
    router._device = torch.device("cuda")
    router.owner = SimpleNamespace(_quant_method=SimpleNamespace(is_monolithic=True))
    with pytest.raises(AllocMoEError, match="moe_backend"):
        router.follow(make("olmoe", "uniform"))


def test_another_plugin_in_our_place_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    from allocmoe.runtime.vllm.plugin import register

    monkeypatch.setitem(op_registry_oot, "MoERunner", SimpleNamespace)
    with pytest.raises(AllocMoEError, match=r"SimpleNamespace.*VLLM_PLUGINS"):
        register()


def test_workers_of_ray_get_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from allocmoe.runtime.vllm.plugin import register

    monkeypatch.setenv("ALLOCMOE_PLAN", "plan.json")
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MINE")
    register()
    register()
    assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == "MINE,ALLOCMOE_PLAN"


@pytest.mark.parametrize("kept", [True, False])
def test_padding_is_told_by_what_vllm_keeps_up_to_date(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that vLLM does not use itself says what it said when a graph was captured."""
    from allocmoe.runtime.vllm import versions

    stale, slots = torch.ones(8, dtype=torch.bool), torch.tensor([5, 6, 7, -1, -1])
    context = SimpleNamespace(is_padding=stale, slot_mapping={"a layer": slots})
    monkeypatch.setattr(versions, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(versions, "get_forward_context", lambda: context)
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", str(int(kept)))
    expected = stale if kept else slots
    assert torch.equal(versions.padding_marks(4), expected[:4])
    context.is_padding = None
    assert torch.equal(versions.padding_marks(4), slots[:4])
    context.slot_mapping = {}
    assert versions.padding_marks(4) is None


def test_a_vllm_without_our_seams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from allocmoe.errors import AllocMoEError
    from allocmoe.runtime.vllm.plugin import register

    monkeypatch.setitem(sys.modules, "allocmoe.runtime.vllm.runner", None)
    with pytest.raises(AllocMoEError, match=r"needs vLLM 0\.26"):
        register()
