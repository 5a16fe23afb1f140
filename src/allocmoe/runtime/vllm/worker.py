"""What a running engine can be asked and told, by `collective_rpc` in all of its workers."""

from __future__ import annotations

from typing import Any

from allocmoe.artifacts import Plan
from allocmoe.codec import encode
from allocmoe.errors import AllocMoEError

# for vLLM's --worker-extension-cls
EXTENSION = "allocmoe.runtime.vllm.worker.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker."""

    vllm_config: Any

    def allocmoe_status(self) -> dict[str, Any]:
        """The plan, and what ran in the MoE layers of this worker since the start or a reset."""
        served = self._allocmoe()
        return {
            "plan": served.plan.to_json(),
            "layers": {
                str(index): encode(runner.activity())
                for index, runner in sorted(served.runners.items())
            },
        }

    def allocmoe_reset(self) -> None:
        for runner in self._allocmoe().runners.values():
            runner.reset()

    def allocmoe_follow(self, plan: dict[str, Any]) -> None:
        """Another plan, without reloading the model."""
        if not self.vllm_config.model_config.enforce_eager:
            raise AllocMoEError("only an engine with --enforce-eager can change its plan")
        self._allocmoe().follow(Plan.from_json(plan, "the plan"))

    def _allocmoe(self) -> Any:
        from allocmoe.runtime.vllm.runner import served_by

        served = served_by(self.vllm_config)
        if served is None:
            raise AllocMoEError("this engine was started without a plan")
        return served
