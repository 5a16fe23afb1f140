"""Several processes that share one job, as started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True)
class Ranks:
    """This process among all of them. The batches are dealt out in turn."""

    rank: int = 0
    world: int = 1

    def mine(self, batch: int) -> bool:
        return batch % self.world == self.rank

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks. Each entry comes from one rank only, so no rounding is added."""
        if self.world > 1:
            distributed.all_reduce(values)
        return values

    def wait(self) -> None:
        if self.world > 1:
            distributed.barrier()


def current_ranks() -> Ranks:
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return Ranks()


@contextmanager
def torchrun_ranks() -> Iterator[Ranks]:
    """Join the process group that torchrun describes; alone, do nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield current_ranks()
    finally:
        distributed.destroy_process_group()
