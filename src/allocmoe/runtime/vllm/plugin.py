"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Put our runner in the place of vLLM's. Calling it twice does no harm.

    vLLM only logs what goes wrong while a plugin loads, and would then serve the unmodified model.
    So nothing is read or checked here: that happens when the first layer is built, where an error
    stops the engine.
    """
    from allocmoe.runtime.vllm.runner import register_runners

    register_runners()
