"""How long-running stages tell what they do, without knowing who listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Bar(Protocol):
    """One running task."""

    def advance(self, work: float, note: str = "") -> None:
        """`work` more is done; `note` says what, such as `row 3/16`."""


class Progress:
    """Silent. The command line hands in one that draws."""

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Bar]:
        yield _Silent()

    def note(self, line: str) -> None:
        """A line worth telling, once."""


class _Silent:
    def advance(self, work: float, note: str = "") -> None:
        pass
