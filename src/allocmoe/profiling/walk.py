"""Runs a model from the middle: the layers before a point are never computed again.

The model's own forward is used for everything. Layers before the start return what they returned
the last time, so the model embeds, masks, rotates and projects as it always does, and no family
needs forward code of its own.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from allocmoe.models import MoEModel
from allocmoe.profiling.ranks import Ranks
from allocmoe.runtime.loss import logits_of, nll_sum

# What a layer returns is a hidden state, or a tuple that starts with one.
LayerOutput = Any


class LayerWalk:
    """Batches of text on their way through a model, all stopped before decoder layer `start`."""

    def __init__(
        self,
        moe: MoEModel,
        ids_NS: torch.Tensor,
        batch_size: int,
        *,
        ranks: Ranks | None = None,
        offload: bool = False,
    ) -> None:
        self._moe = moe
        self._device = moe.model.get_input_embeddings().weight.device  # type: ignore[operator]
        self._batches = ids_NS.split(batch_size)
        self._ranks = ranks or Ranks()
        self._offload = offload
        # the logits of a run that stops early are not wanted
        takes = inspect.signature(moe.model.forward).parameters
        self._few_logits = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.start = 0
        # what layer start - 1 returned, for each of this rank's batches
        self._states: dict[int, LayerOutput] = {}
        # what layer start computes before its experts: the same in every run from there
        self._attention: dict[tuple[int, nn.Module, int], Any] = {}

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    @torch.no_grad()
    def nll(self, move_to: int | None = None) -> float:
        """The loss of the whole text, from `start` to the end of the model as it is now.

        With `move_to` the walk moves on to that layer by the way, at no cost of its own.
        """
        losses = torch.zeros(self.num_batches, dtype=torch.float64, device=self._device)
        stop = self.start if move_to is None else move_to
        for number, ids in self._mine():
            with self._resumed(number), self._remembered(number), self._output_of(stop) as output:
                losses[number] = nll_sum(logits_of(self._moe.model, ids), ids)
            self._keep(number, output)
        self._arrive(stop)
        # summed in the order of the batches, so that any number of ranks gives the same bits
        return float(self._ranks.sum(losses).cpu().sum())

    @torch.no_grad()
    def peek(self, stop: int) -> None:
        """Run layers `start`..`stop`-1 for whoever observes them; the walk stays where it is."""
        for number, ids in self._mine():
            self._run_until(number, ids, stop)

    @torch.no_grad()
    def advance(self, stop: int) -> None:
        """Run layers `start`..`stop`-1 of the model as it is now, and stop there."""
        if stop == self.start:
            return
        for number, ids in self._mine():
            self._keep(number, self._run_until(number, ids, stop))
        self._arrive(stop)

    def _keep(self, number: int, output: list[LayerOutput]) -> None:
        if output:
            state = output[0]
            self._states[number] = _moved(state, torch.device("cpu")) if self._offload else state

    def _arrive(self, stop: int) -> None:
        if stop != self.start:
            self.start = stop
            self._attention = {}

    def _mine(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number, ids in enumerate(self._batches):
            if self._ranks.mine(number):
                yield number, ids.to(self._device)

    def _run_until(self, number: int, ids: torch.Tensor, stop: int) -> list[LayerOutput]:
        """What layer `stop` - 1 returns. The layers after it pass that on, untouched."""
        later = self._moe.decoder_layers[stop:]
        with self._resumed(number), self._output_of(stop) as output:
            with _forwards_replaced(later, lambda *args, **kwargs: output[0]):
                self._moe.model(input_ids=ids, use_cache=False, **self._few_logits)
        return output

    @contextmanager
    def _output_of(self, stop: int) -> Iterator[list[LayerOutput]]:
        """A list that will hold what layer `stop` - 1 returns; empty if the walk is there."""
        output: list[LayerOutput] = []
        if stop == self.start:
            yield output
            return
        last = self._moe.decoder_layers[stop - 1]
        hook = last.register_forward_hook(lambda module, args, result: output.append(result))
        try:
            yield output
        finally:
            hook.remove()

    @contextmanager
    def _resumed(self, number: int) -> Iterator[None]:
        if self.start == 0:
            yield
            return
        state = self._states[number]
        if self._offload:
            state = _moved(state, self._device)
        with _forwards_replaced(
            self._moe.decoder_layers[: self.start], lambda *args, **kwargs: state
        ):
            yield

    @contextmanager
    def _remembered(self, number: int) -> Iterator[None]:
        """Keep what the parts of layer `start` before its experts return, and return it again.

        These are the attention or whatever mixes tokens; norms are cheap enough to run again. A
        part that only runs after the experts has other inputs each time and is left alone.
        """
        block = next((m.block for m in self._moe.layers if m.decoder_index == self.start), None)
        if block is None or self._offload:
            yield
            return
        experts_ran = False

        def see_block(*_: Any) -> None:
            nonlocal experts_ran
            experts_ran = True

        def remember(part: nn.Module) -> Any:
            original = part.forward
            calls = itertools.count()

            def forward(*args: Any, **kwargs: Any) -> Any:
                key = (number, part, next(calls))
                if key in self._attention:
                    return self._attention[key]
                output = original(*args, **kwargs)
                if not experts_ran:
                    self._attention[key] = output
                return output

            return forward

        with ExitStack() as stack:
            stack.callback(block.register_forward_pre_hook(see_block).remove)
            for part in self._moe.decoder_layers[self.start].children():
                if part is not block and any(p.dim() > 1 for p in part.parameters()):
                    stack.enter_context(_forwards_replaced([part], remember(part)))
            yield


def can_walk(moe: MoEModel, ids_NS: torch.Tensor) -> bool:
    """Whether starting in the middle gives what a whole forward gives, tried at every MoE layer.

    It does not where a layer hands its successors more than a hidden state.
    """
    walk = LayerWalk(moe, ids_NS[:1, :8], 1)
    whole = walk.nll()
    if not math.isfinite(whole):
        return True  # the profile itself says where that comes from
    for layer in moe.layers:
        walk.advance(layer.decoder_index)
        try:
            resumed = walk.nll()
        except (RuntimeError, KeyError, AttributeError, TypeError, ValueError):
            return False
        if not abs(resumed - whole) <= 1e-5 * abs(whole):
            return False
    return True


@contextmanager
def _forwards_replaced(layers: Any, forward: Any) -> Iterator[None]:
    """Give each module another `forward`, as an instance attribute, for a while."""
    saved: list[tuple[nn.Module, Any]] = [(m, m.__dict__.get("forward")) for m in layers]
    try:
        for module, _ in saved:
            module.forward = forward
        yield
    finally:
        for module, own in saved:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = own


def _moved(output: LayerOutput, device: torch.device) -> LayerOutput:
    if isinstance(output, torch.Tensor):
        return output.to(device)
    if isinstance(output, tuple):
        return tuple(_moved(item, device) for item in output)
    return output
