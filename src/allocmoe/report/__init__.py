"""All artefacts of a folder as one HTML page with plots; knows files and numbers, no model."""

from __future__ import annotations

from allocmoe.report.write import Written, write_report

__all__ = ["Written", "write_report"]
