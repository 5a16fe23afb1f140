"""The one exception type meant for users."""

from __future__ import annotations


class AllocMoEError(ValueError):
    """Something the user can act on. The command line prints it as one line and exits with 2."""
