"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import os

from allocmoe.errors import AllocMoEError

_RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def register() -> None:
    """Put our runner in the place of vLLM's. Calling it twice does no harm.

    vLLM only logs what goes wrong while a plugin loads, and would then serve the unmodified model.
    So nothing is read or checked here: that happens when the first layer is built, where an error
    stops the engine. A vLLM without our seams is refused even without a plan, since one given later
    would be ignored.
    """
    try:
        from allocmoe.runtime.vllm.runner import register_runners
        from allocmoe.runtime.vllm.served import VARIABLE
    except ImportError as error:
        raise AllocMoEError(
            f"allocmoe needs vLLM 0.26 to 0.32 ({error}): take such a version, or set VLLM_PLUGINS "
            "to the plugins you want without allocmoe"
        ) from error
    register_runners()
    if os.environ.get(VARIABLE):
        # Ray's workers get only the variables that are named
        copied = os.environ.get(_RAY_COPIES, "").split(",")
        os.environ[_RAY_COPIES] = ",".join(dict.fromkeys(filter(None, [*copied, VARIABLE])))
