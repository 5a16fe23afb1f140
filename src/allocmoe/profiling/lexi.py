"""LExI's data-free sensitivity (arXiv 2509.02753): what a block loses on Gaussian inputs."""

from __future__ import annotations

from typing import Any

import torch

from allocmoe.artifacts import TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoELayer, MoEModel
from allocmoe.progress import Progress
from allocmoe.runtime.hf import Controller


@torch.no_grad()
def lexi_distances(
    moe: MoEModel,
    *,
    samples: int = 16,
    tokens: int = 128,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[list[float]]:
    """D[l][k-1] = mean over samples of || block_l(X; k) - block_l(X; k_orig) ||_F, X ~ N(0, 1).

    The samples are the same for every k, and drawn on the host so that every device sees them.
    """
    if any(layer.block is moe.decoder_layers[layer.decoder_index] for layer in moe.layers):
        raise AllocMoEError(
            f"LExI cannot be measured on {moe.info.family}: its experts are not in a block that "
            "can run alone"
        )
    hidden = moe.model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    distances = []
    with (
        Controller(moe, TokenRule(), count=False) as controller,
        (progress or Progress()).bar("LExI distances", len(moe.layers)) as bar,
    ):
        for layer in moe.layers:
            generator = torch.Generator().manual_seed(seed)
            control = controller.controls[layer.index]
            row = [0.0] * layer.k_orig
            for _ in range(samples):
                x = torch.randn(1, tokens, hidden, generator=generator)
                control.set_budget(layer.k_orig)
                full = _run(layer, x)
                for k in range(1, layer.k_orig):
                    control.set_budget(k)
                    row[k - 1] += float(torch.linalg.norm(_run(layer, x) - full)) / samples
            control.set_budget(layer.k_orig)
            distances.append(row)
            bar.advance(1, f"layer {layer.index + 1}/{len(moe.layers)}")
    return distances


def _run(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    weight = next(layer.router.parameters())
    expert = next(layer.experts.parameters())
    output: Any = layer.block(x.to(weight.device, expert.dtype))
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden.float()
