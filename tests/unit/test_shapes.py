"""The shapes of public models: as many parameters as published, and random weights that route."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocmoe.errors import AllocMoEError
from allocmoe.models import inspect_model
from allocmoe.models.shapes import SHAPES, build_shape

# from the public checkpoints: parameters, MoE layers, experts, k
PUBLISHED = {
    "deepseek-v2-lite": (15_706_484_224, 26, 64, 6),
    "qwen1.5-moe": (14_315_784_192, 24, 60, 4),
    "olmoe": (6_919_161_856, 16, 64, 8),
    "qwen3-30b-a3b": (30_532_122_624, 48, 128, 8),
    "gpt-oss-20b": (20_914_757_184, 24, 32, 4),
    "mixtral-8x7b": (46_702_792_704, 32, 8, 2),
}
SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=16,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes with every width cut down."""
    for name, (family, settings) in SHAPES.items():
        cut: dict[str, Any] = {key: value for key, value in SMALL.items() if key in settings}
        monkeypatch.setitem(SHAPES, name, (family, settings | cut))


def test_every_shape_is_checked() -> None:
    assert set(PUBLISHED) == set(SHAPES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    num_parameters, num_layers, num_experts, k = PUBLISHED[name]
    model = build_shape(name, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    info = inspect_model(model).info
    assert (info.id, info.family) == (name, SHAPES[name][0])
    assert info.k_orig == (k,) * num_layers
    assert info.num_experts == (num_experts,) * num_layers


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("small")
def test_weights_are_random_and_reproducible(name: str) -> None:
    before = torch.random.get_rng_state()
    models = [build_shape(name, layers=2, device="cpu", seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), before)
    first, same, other = (dict(m.named_parameters()) for m in models)
    for parameter_name, parameter in first.items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, same[parameter_name])
        # norms are ones and biases zeros
        if parameter.dim() > 1 and not parameter_name.endswith("bias"):
            assert parameter.detach().float().std().item() == pytest.approx(0.02, rel=0.35), (
                parameter_name
            )
            assert not torch.equal(parameter, other[parameter_name])


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("small")
def test_tokens_are_spread_over_the_experts(name: str) -> None:
    model = build_shape(name, layers=2, device="cpu", dtype="float32")
    layer = inspect_model(model).layers[-1]
    seen: set[int] = set()
    layer.experts.register_forward_pre_hook(
        lambda module, args: seen.update(args[1].flatten().tolist())
    )
    with torch.no_grad():
        model(torch.arange(64)[None])
    assert len(seen) > 0.8 * layer.num_experts


def test_fewer_layers() -> None:
    info = inspect_model(build_shape("deepseek-v2-lite", layers=3, device="meta")).info
    assert (info.id, len(info.k_orig)) == ("deepseek-v2-lite, 3 layers", 2)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt-9", {}, "unknown shape 'gpt-9'; known: deepseek-v2-lite, qwen1.5-moe, olmoe, "),
        ("deepseek-v2-lite", dict(layers=1), "takes 2 to 27 layers, not 1"),
        ("olmoe", dict(layers=17), "takes 1 to 16 layers, not 17"),
        ("olmoe", dict(device="spread"), "on one device"),
        ("olmoe", dict(dtype="int8"), "unknown dtype 'int8'"),
    ],
)
def test_what_cannot_be_built(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(AllocMoEError, match=words):
        build_shape(name, **options)
