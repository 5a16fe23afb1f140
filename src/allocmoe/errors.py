"""The one exception type meant for users, and what to quote of others."""

from __future__ import annotations


class AllocMoEError(ValueError):
    """Something the user can act on. The command line prints it as one line and exits with 2."""


def first_line(error: Exception) -> str:
    """What a library's exception says, short enough for a line of our own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
