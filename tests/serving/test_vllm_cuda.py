"""A plan inside vLLM on a GPU, with torch.compile and CUDA graphs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm_runner import engine, run

import allocmoe
from allocmoe.artifacts import Plan
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# three sequences: a graph for four has a row that is no token
IDS = torch.randint(3, 128, (3, 100), generator=torch.Generator().manual_seed(0))
TEXT = allocmoe.text_from_ids(
    torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(1))
)


def model() -> Any:
    # attention heads of a size that every backend takes
    return tiny("olmoe", hidden_size=128, num_attention_heads=2, num_key_value_heads=2)


def logprobs_of(plan: Plan) -> torch.Tensor:
    """What transformers gives in float32."""
    loaded = model()
    with torch.no_grad(), allocmoe.apply(loaded, plan):
        logprobs = loaded(IDS).logits.log_softmax(-1)
    return logprobs[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("rule", ["alloc-t/batch", "alloc-t/threshold", "naee", "dynamic-moe"])
def test_a_rule_is_the_one_of_transformers(
    rule: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our experts and with vLLM's: far nearer to the plan in float32 than to others."""
    from allocmoe.runtime.vllm import runner

    kernels = []

    def find(layer: Any) -> Any:
        kernels.append(own_kernel(layer) if own else None)
        return kernels[-1]

    own_kernel = runner.own_kernel
    monkeypatch.setattr(runner, "own_kernel", find)
    method, _, scope = rule.partition("/")
    options = {"scope": scope} if scope else {}
    loaded = model()
    plan = allocmoe.make_plan(method, "50%", model=loaded, text=TEXT, **options)
    loaded.save_pretrained(tmp_path)
    with engine(
        tmp_path,
        plan,
        enforce_eager=False,
        dtype="bfloat16",
        gpu_memory_utilization=0.1,
        worker_extension_cls="allocmoe.runtime.vllm.worker.WorkerExtension",
    ) as llm:
        llm.llm.collective_rpc("allocmoe_reset")
        served, _ = run(llm, IDS)
        layers = llm.llm.collective_rpc("allocmoe_status")[0]["layers"].values()
    assert kernels
    assert all((kernel is not None) == own for kernel in kernels)
    expected = logprobs_of(plan)
    error = (served - expected).abs().mean()
    for other in ("uniform", "original"):
        far = allocmoe.make_plan("uniform", "100%" if other == "original" else "50%", model=loaded)
        assert error < 0.4 * (logprobs_of(far) - expected).abs().mean()
    # 3 x 100 tokens of the prompts, then three more steps of 3; the padding is none of them
    assert {layer["tokens"] for layer in layers} == {309}
    if scope == "batch":
        assert [layer["activations"] for layer in layers] == [
            round(b * 300) + 3 * round(b * 3) for b in plan.layer_budgets
        ]
