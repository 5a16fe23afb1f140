"""The sensitivity matrix against Algorithm 1 written out, and everything around it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import allocmoe
from allocmoe.artifacts import Sensitivity, TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.models import inspect_model
from allocmoe.profiling import walk
from allocmoe.progress import Progress
from tiny import tiny

torch.manual_seed(0)
IDS = torch.randint(3, 128, (5, 24))
TEXT = allocmoe.text_from_ids(IDS)


def perplexity(model: Any) -> float:
    with torch.no_grad():
        logits = model(IDS).logits[:, :-1].double()
    return math.exp(torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten()))


def algorithm_1(model: Any) -> list[list[float]]:
    """Algorithm 1 of the paper, literally: one whole forward for each entry."""
    layers = inspect_model(model).layers
    k_orig = [layer.k_orig for layer in layers]
    S = [[0.0] * k for k in k_orig]
    C = list(k_orig)

    def get_perplexity() -> float:
        for layer, k in zip(layers, C, strict=True):
            layer.router.top_k = k
        return perplexity(model)

    ppl = get_perplexity()
    for i in range(len(layers) - 1, -1, -1):
        S[i][k_orig[i] - 1] = ppl
        for k in range(k_orig[i] - 1, 0, -1):
            C[i] = k
            ppl = get_perplexity()
            S[i][k - 1] = ppl
    for layer, k in zip(layers, k_orig, strict=True):
        layer.router.top_k = k
    return S


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_equals_the_literal_algorithm(family: str) -> None:
    model = tiny(family)
    literal = algorithm_1(model)
    result = allocmoe.profile(model, TEXT, batch_size=2)
    for row, expected in zip(result.perplexity, literal, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", "phimoe", "qwen3_next"])
def test_identities(family: str) -> None:
    result = allocmoe.profile(tiny(family), TEXT, batch_size=3)
    S = result.perplexity
    for layer in range(len(S) - 1):
        assert S[layer][-1] == S[layer + 1][0]
    assert S[-1][-1] == result.base_perplexity
    assert result.base_perplexity == pytest.approx(perplexity(tiny(family)), rel=1e-6)
    telescoped = sum(row[0] for row in result.cost())
    assert telescoped == pytest.approx(math.log(S[0][0] / result.base_perplexity))


def literal_entry(model: Any, budgets: list[float], token: TokenRule, batch_size: int) -> float:
    """One entry by whole forwards under a controller, batch by batch."""
    from allocmoe.runtime.hf import Controller

    total = 0.0
    with torch.no_grad(), Controller(inspect_model(model), token) as controller:
        controller.set_budgets(budgets)
        for ids in IDS.split(batch_size):
            logits = model(ids).logits[:, :-1].double()
            total += float(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
                )
            )
    return math.exp(total / IDS[:, 1:].numel())


@pytest.mark.parametrize("token", [TokenRule(), TokenRule("alloc-t", "batch")], ids=["plain", "T"])
@pytest.mark.parametrize("context", ["paper", "single", "around"])
def test_contexts_and_token_rule(context: Any, token: TokenRule) -> None:
    model = tiny("olmoe")
    budget = "10" if context == "around" else None
    result = allocmoe.profile(
        model, TEXT, context=context, budget=budget, token=token, batch_size=2
    )
    uniform = [2.5] * 4 if token.rule == "alloc-t" else [2, 3, 2, 3]
    before, after = {
        "paper": ([4] * 4, [1] * 4),
        "single": ([4] * 4, [4] * 4),
        "around": (uniform, uniform),
    }[context]
    assert list(result.context.before) == before
    for layer in (0, 2, 3):
        for k in (1, 3, 4):
            budgets = [*before[:layer], k, *after[layer + 1 :]]
            expected = literal_entry(model, budgets, token, 2)
            assert result.perplexity[layer][k - 1] == pytest.approx(expected, rel=1e-5)


def test_coarse_and_fractional_grids() -> None:
    model = tiny("olmoe")
    full = allocmoe.profile(model, TEXT)
    coarse = allocmoe.profile(model, TEXT, ks=[1, 2])
    assert coarse.ks == ((1, 2, 4),) * 4
    assert coarse.perplexity == tuple((row[0], row[1], row[3]) for row in full.perplexity)
    token = TokenRule("alloc-t", "batch")
    halves = allocmoe.profile(model, TEXT, ks=[1, 1.5, 2.5], token=token, context="single")
    assert halves.ks == ((1, 1.5, 2.5, 4),) * 4
    plan = allocmoe.solve(halves, "50%", method="alloc-moe")
    assert sum(plan.layer_budgets) <= 8
    assert all(k in (1, 1.5, 2.5, 4) for k in plan.layer_budgets)
    for bad in ([0.5], [5], []):
        with pytest.raises(AllocMoEError, match="grid"):
            allocmoe.profile(model, TEXT, ks=bad)
    with pytest.raises(AllocMoEError, match="whole"):
        allocmoe.profile(model, TEXT, ks=[1.5])


def test_never_computes_the_layers_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoder layer runs once at its full budget per batch, and then only in its tail runs."""
    model = tiny("olmoe")
    monkeypatch.setattr("allocmoe.profiling.measurers.can_walk", lambda *a: True)
    runs = [0] * 4
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(
            lambda m, a, o, number=number: runs.__setitem__(number, runs[number] + 1)
        )
    allocmoe.profile(model, TEXT, batch_size=5)
    # unmodified: 1 each. Row l: K entries less one already known (k=1, but for row 0), and the
    # last entry of the last row is the unmodified model. Moving on costs nothing extra.
    entries = [4, 3, 3, 2]
    expected = [1 + sum(entries[: layer + 1]) for layer in range(4)]
    assert runs == expected


class StopAfter(Progress):
    """Interrupts a profile after some rows."""

    def __init__(self, entries: int) -> None:
        self.left = entries

    def bar(self, label: str, total: float) -> Any:
        from contextlib import nullcontext

        return nullcontext(self)

    def advance(self, work: float, note: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("context", ["paper", "single", "around"])
@pytest.mark.parametrize("entries", [3, 6, 12])
def test_resume_equals_an_uninterrupted_run(tmp_path: Path, context: Any, entries: int) -> None:
    model = tiny("olmoe")
    options = dict(context=context, budget="10" if context == "around" else None, batch_size=2)
    whole = allocmoe.profile(model, TEXT, **options)
    file = tmp_path / "S.json"
    with pytest.raises(KeyboardInterrupt):
        allocmoe.profile(model, TEXT, save_to=file, progress=StopAfter(entries), **options)
    assert not file.exists()
    assert Path(f"{file}.partial").exists() == (entries > 4)
    resumed = allocmoe.profile(model, TEXT, save_to=file, resume=True, **options)
    assert resumed.perplexity == whole.perplexity
    assert resumed.base_perplexity == whole.base_perplexity
    assert Sensitivity.load(file) == resumed
    assert not Path(f"{file}.partial").exists()


def test_resume_refuses_what_has_changed(tmp_path: Path) -> None:
    model, file = tiny("olmoe"), tmp_path / "S.json"
    with pytest.raises(KeyboardInterrupt):
        allocmoe.profile(model, TEXT, save_to=file, progress=StopAfter(7))
    partial = Path(f"{file}.partial").read_text()
    other_text = allocmoe.text_from_ids(IDS + 1)
    for changed, kwargs in (
        ("text.sha256", {"text": other_text}),
        ("model.fingerprint", {"model": tiny("olmoe", seed=1)}),
        ("context.name", {"context": "single"}),
        ("token.rule", {"token": TokenRule("alloc-t", "batch")}),
        ("ks", {"ks": [1, 2]}),
        ("batch_size", {"batch_size": 1}),
        ("dtype", {"model": tiny("olmoe").double()}),
    ):
        arguments = {"model": model, "text": TEXT, "save_to": file, "resume": True, **kwargs}
        with pytest.raises(AllocMoEError, match=changed):
            allocmoe.profile(**arguments)
    with pytest.raises(AllocMoEError, match="--resume"):
        allocmoe.profile(model, TEXT, save_to=file)
    assert Path(f"{file}.partial").read_text() == partial
    assert json.loads(partial)["kind"] == "allocmoe.profile-in-progress"


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("scope", "change", "same"),
    [
        (None, {}, True),
        (None, {"batch_size": 1}, True),
        (None, {"model": tiny("olmoe").bfloat16()}, False),
        ("sequence", {"batch_size": 1}, True),
        ("batch", {}, True),
        ("batch", {"batch_size": 1}, False),
    ],
)
def test_a_finished_profile_is_used_again_if_it_is_the_same(
    tmp_path: Path, scope: Any, change: dict[str, Any], same: bool
) -> None:
    token = TokenRule() if scope is None else TokenRule("alloc-t", scope)
    options: dict[str, Any] = dict(
        model=tiny("olmoe"), text=TEXT, token=token, ks=[1], save_to=tmp_path / "S.json"
    )
    finished, notes = allocmoe.profile(**options), Notes()
    again = allocmoe.profile(**options | change, resume=True, progress=notes)
    assert (again.created, again.seconds) == (finished.created, finished.seconds) or not same
    assert any("used again" in line for line in notes.lines) == same
    assert (again.dtype, again.batch_size) == (
        "bfloat16" if "model" in change else "float32",
        4 if same else change.get("batch_size", 4),
    )


def test_a_finished_profile_that_does_not_tell_its_dtype_is_made_anew(tmp_path: Path) -> None:
    model, file, notes = tiny("olmoe"), tmp_path / "S.json", Notes()
    earlier = allocmoe.profile(model, TEXT, ks=[1], save_to=file).to_json()
    del earlier["dtype"], earlier["batch_size"]
    file.write_text(json.dumps(earlier))
    assert Sensitivity.load(file).dtype is None
    allocmoe.profile(model, TEXT, ks=[1], save_to=file, resume=True, progress=notes)
    assert not any("used again" in line for line in notes.lines)
    assert Sensitivity.load(file).dtype == "float32"


def test_a_loss_that_is_not_finite_is_named() -> None:
    model = tiny("olmoe")
    layer = inspect_model(model).layers[2]
    # a layer whose top-1 output overflows, while the average over four experts stays finite
    original = layer.experts.forward

    def poisoned(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = original(hidden, index, weights)
        return out * float("nan") if index.shape[1] == 3 else out

    layer.experts.forward = poisoned
    with pytest.raises(AllocMoEError, match=r"MoE layer 2, k=3"):
        allocmoe.profile(model, TEXT)


def test_without_a_walk_the_matrix_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("olmoe")
    walked = allocmoe.profile(model, TEXT, batch_size=2)
    monkeypatch.setattr("allocmoe.profiling.measurers.can_walk", lambda *a: False)
    slow = allocmoe.profile(model, TEXT, batch_size=2)
    for a, b in zip(walked.perplexity, slow.perplexity, strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def test_a_model_that_hands_on_more_than_a_hidden_state_is_noticed() -> None:
    model = tiny("olmoe")
    memory: dict[str, torch.Tensor] = {}
    model.model.embed_tokens.register_forward_hook(lambda m, a, out: memory.clear())
    model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: memory.update(side=out))
    model.model.layers[3].register_forward_pre_hook(lambda m, a: (a[0] + memory.get("side", 0),))
    assert walk.can_walk(inspect_model(tiny("olmoe")), IDS)
    assert not walk.can_walk(inspect_model(model), IDS)
    literal = algorithm_1(model)
    for row, expected in zip(allocmoe.profile(model, TEXT).perplexity, literal, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_offloaded_states_give_the_same_matrix() -> None:
    model = tiny("qwen2_moe")
    plain = allocmoe.profile(model, TEXT, batch_size=2)
    assert allocmoe.profile(model, TEXT, batch_size=2, offload=True).perplexity == plain.perplexity


def test_rules_with_thresholds_cannot_be_profiled_with() -> None:
    token = TokenRule("naee", thresholds=(0.5,) * 4)
    with pytest.raises(AllocMoEError, match="naee"):
        allocmoe.profile(tiny("olmoe"), TEXT, token=token)


def test_a_profile_leaves_the_model_as_it_was() -> None:
    model = tiny("olmoe")
    with torch.no_grad():
        before = model(IDS).logits
        allocmoe.profile(model, TEXT, token=TokenRule("alloc-t", "batch"))
        assert torch.equal(model(IDS).logits, before)
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)
