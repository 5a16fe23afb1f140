"""The training recipe through its own functions: every family learns, balances and loads again."""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from allocmoe.models import inspect_model

RECIPE = Path(__file__).parents[2] / "recipes" / "reference"
pytestmark = pytest.mark.skipif(not RECIPE.exists(), reason="a package without its recipes")
VOCABULARY = 300
COMMON = "--layers 3 --hidden 32 --heads 2 --experts 8 --top-k 2 --expert-width 16 --length 32"
PRESETS = {
    "reference": "",
    "small-olmoe": "",
    "small-qwen2-moe": "--shared-width 32",
    "small-deepseek-v2": "--shared-width 32 --dense-width 32 --latent 16",
}
# vocabulary, parameters as the README has them, k
FULL = {
    "reference": (2048, 4_354_176, 6),
    "small-olmoe": (8192, 48_776_000, 8),
    "small-qwen2-moe": (8192, 53_697_600, 4),
    "small-deepseek-v2": (8192, 50_481_728, 6),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def recipe() -> Iterator[dict[str, ModuleType]]:
    """The recipe's modules, which import each other by their plain names."""
    names = ("sizes", "layers", "train", "prepare")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(RECIPE))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(RECIPE))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def arguments(recipe: dict[str, ModuleType], preset: str, *words: str) -> argparse.Namespace:
    options = [*COMMON.split(), *PRESETS[preset].split(), "--batch", "8", "--log-every", "1"]
    base = ["prepared", "-o", "model", "--preset", preset, *options, *words]
    return recipe["train"].parse(base)


def text() -> torch.Tensor:
    """Tokens in which the next one follows from the last."""
    return (torch.arange(4000, device=DEVICE) * 7 % 50).to(torch.int32)


def build(recipe: dict[str, ModuleType], args: argparse.Namespace) -> tuple[Any, Any]:
    model = recipe["train"].build_model(args, VOCABULARY, DEVICE)
    return model, recipe["train"].build_losses(model, args, half=DEVICE.type == "cuda")


@pytest.mark.parametrize("preset", FULL)
def test_presets_have_their_sizes(recipe: dict[str, ModuleType], preset: str) -> None:
    vocabulary, num_parameters, k = FULL[preset]
    args = recipe["train"].parse(["prepared", "-o", "model", "--preset", preset])
    with torch.device("meta"):  # moved there, it would lose its tie
        model = recipe["train"].build_model(args, vocabulary, torch.device("meta"))
    assert recipe["train"].count_parameters(model, args)["parameters"] == num_parameters
    layers = args.layers - (args.family == "deepseek_v2")
    assert inspect_model(model).k_orig == (k,) * layers
    assert model.config.norm_topk_prob is False


def test_the_reference_is_what_was_trained(recipe: dict[str, ModuleType]) -> None:
    folder = Path(__file__).parents[2] / "src/allocmoe/reference"
    settings = json.loads((folder / "training.json").read_text())["settings"]
    args = recipe["train"].parse(["prepared", "-o", "model", "--minutes", "6.2"])
    assert {name: getattr(args, name) for name in settings} == settings
    config = recipe["sizes"].build_config(args, 2048).to_dict()
    saved = json.loads((folder / "config.json").read_text())
    same = set(saved) - {"architectures", "dtype", "transformers_version"}
    assert {name: config[name] for name in same} == {name: saved[name] for name in same}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_few_steps(recipe: dict[str, ModuleType], preset: str, tmp_path: Path) -> None:
    args = arguments(recipe, preset, "--max-steps", "12", "--learning-rate", "0.01")
    args.prepared, args.output = tmp_path / "prepared", tmp_path / "model"
    (args.prepared / "tokenizer").mkdir(parents=True)
    model, losses = build(recipe, args)
    source = recipe["train"].batches(text(), args)
    step, way = recipe["train"].working_step(model, losses, next(source), args)
    log: list[dict[str, float]] = []
    steps, _ = recipe["train"].train(model, step, source, args, seconds=60, log=log.append)
    assert (steps, way["experts_impl"]) == (12, args.experts_impl)
    assert all(np.isfinite(entry["loss"]) for entry in log)
    assert log[-1]["loss"] < log[0]["loss"] - 0.5
    assert log[-1]["skipped"] == 0
    recipe["train"].save(model, args)
    loaded = AutoModelForCausalLM.from_pretrained(args.output)
    assert loaded.dtype == torch.bfloat16
    assert inspect_model(loaded).info.family == args.family
    assert set(inspect_model(loaded).k_orig) == {2}
    # as it was trained, less the rounding
    loss, windows = recipe["train"].evaluate(loaded.to(DEVICE), text(), 32)
    assert loss < log[0]["loss"] - 0.5
    assert windows == 125


@pytest.mark.parametrize("preset", PRESETS)
def test_both_ways_to_compute_experts_agree(recipe: dict[str, ModuleType], preset: str) -> None:
    args = arguments(recipe, preset)
    model, losses = build(recipe, args)
    found: dict[str, torch.Tensor] = {}
    for name in ("dense", "grouped_mm", "stock"):
        recipe["layers"].set_layers(model, "dense" if name == "stock" else name)
        if name == "stock":
            model.set_attn_implementation("sdpa")
            model.set_experts_implementation("eager")
        recipe["train"].backward(losses, text()[:256].view(8, 32).long(), args, passes=1)
        found[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
    # in bfloat16 a token may go to another expert
    close = 1e-4 if DEVICE.type == "cpu" else 0.1
    for name in ("dense", "grouped_mm"):
        assert float((found[name] - found["stock"]).norm() / found["stock"].norm()) < close


@pytest.mark.parametrize("preset", PRESETS)
def test_the_balancing_loss_reaches_every_router(
    recipe: dict[str, ModuleType], preset: str
) -> None:
    args = arguments(recipe, preset)
    model, losses = build(recipe, args)
    recipe["layers"].set_layers(model, "dense")
    _, balance, chosen = losses(text()[:256].view(8, 32).long())
    assert chosen.sum(-1).tolist() == pytest.approx([2.0] * len(chosen))
    balance.backward()
    routers = [p for name, p in model.named_parameters() if name.endswith(".gate.weight")]
    assert len(routers) == len(chosen) == 3 - (args.family == "deepseek_v2")
    assert all(float(router.grad.abs().max()) > 0 for router in routers)


def test_the_balancing_loss_is_that_of_transformers(recipe: dict[str, ModuleType]) -> None:
    model, losses = build(recipe, arguments(recipe, "reference"))
    ids = text()[:256].view(8, 32).long()
    out = model(ids, labels=ids, output_router_logits=True)
    assert float(losses(ids)[1].detach()) == pytest.approx(float(out.aux_loss.detach()), rel=1e-3)


def test_uneven_layers_that_even_out(recipe: dict[str, ModuleType]) -> None:
    chosen = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    balance_loss = recipe["layers"].balance_loss
    assert float(balance_loss(chosen, chosen / 2, "model")) == 2  # as if all were even
    assert float(balance_loss(chosen, chosen / 2, "layer")) == 4


def test_passes_change_nothing_but_memory(recipe: dict[str, ModuleType]) -> None:
    args = arguments(recipe, "small-olmoe", "--balance", "0")
    model, losses = build(recipe, args)
    recipe["layers"].set_layers(model, "dense")
    found = []
    for passes in (1, 4):
        ids = torch.arange(256, device=DEVICE).view(8, 32)
        recipe["train"].backward(losses, ids, args, passes)
        found.append(model.lm_head.weight.grad.clone())
        model.zero_grad()
    assert float((found[0] - found[1]).abs().max()) < 1e-2 * float(found[0].abs().max())


def test_a_step_without_finite_gradients_changes_nothing(recipe: dict[str, ModuleType]) -> None:
    args = arguments(recipe, "small-olmoe", "--max-steps", "2")
    model, losses = build(recipe, args)
    recipe["layers"].set_layers(model, "dense")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weight = model.model.norm.weight
    weight.register_hook(lambda gradient: gradient * float("nan"))
    log: list[dict[str, Any]] = []
    source = recipe["train"].batches(text(), args)
    recipe["train"].train(model, losses, source, args, seconds=60, log=log.append)
    assert [(entry["skipped"], entry["broken"]) for entry in log] == [
        (1, {"model.norm.weight": 1}),
        (2, {"model.norm.weight": 2}),
    ]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_way_that_fails_is_followed_by_another(
    recipe: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(recipe, "small-olmoe", "--no-compile")
    model, losses = build(recipe, args)

    def broken(*args: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(recipe["layers"].EXPERTS, "grouped_mm", broken)
    step, way = recipe["train"].working_step(model, losses, text()[:64].view(2, 32).long(), args)
    assert (step, way["experts_impl"]) == (losses, "dense")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--family qwen2_moe", "qwen2_moe needs --shared-width"),
        ("--latent 8", "olmoe has no --latent"),
        ("--heads 3", "--hidden 32 is not a multiple of --heads 3"),
        ("--top-k 9", "--top-k 9 is more than --experts 8"),
    ],
)
def test_sizes_that_do_not_fit(
    recipe: dict[str, ModuleType], words: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(recipe, "small-olmoe", *words.split())
    assert complaint in capsys.readouterr().err


def test_what_is_excluded(
    recipe: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = recipe["prepare"]
    words = [f"word{i}" for i in range(60)]
    folder = tmp_path / "tasks" / "one"
    folder.mkdir(parents=True)
    line = json.dumps({"text": "It\u2019s " + "\n".join(words[:13])})
    (folder / "items.jsonl").write_text(line + "\n")
    with lzma.open(tmp_path / "more.txt.xz", "wt") as file:
        file.write(" ".join(words[20:40]))
    paths = list(prepare.files_under([tmp_path / "tasks", tmp_path / "more.txt.xz"]))
    assert [path.name for path in paths] == ["items.jsonl", "more.txt.xz"]
    found = map(prepare.block_runs, prepare.blocks(map(prepare.read, paths)))
    monkeypatch.setattr(prepare, "_forbidden", np.unique(np.concatenate(list(found))))
    for start, kept in ((0, False), (1, True), (20, False), (27, False), (28, True), (47, True)):
        document = "Before, " + ", ".join(words[start : start + 13]).upper() + " and after."
        assert (prepare.clean(document) is not None) == kept, start
    assert prepare.clean("short") == "short"
    # half of a long text is in one block and half in the next
    monkeypatch.setattr(prepare, "BLOCK", 100)
    parts = [prepare.block_runs(block) for block in prepare.blocks([" ".join(words)])]
    assert len(parts) > 3
    assert np.isin(prepare.word_runs(" ".join(words)), np.concatenate(parts)).all()
    (tmp_path / "binary.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit, match="not text in UTF-8"):
        prepare.read(tmp_path / "binary.bin")
