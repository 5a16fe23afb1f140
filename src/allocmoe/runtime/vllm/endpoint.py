"""GET /allocmoe on a served model: the plan, and the activations that were realised."""

from __future__ import annotations

from typing import Any

from allocmoe.runtime.vllm.served import check_layers


class StatusEndpoint:
    """For vLLM's entry point group `vllm.endpoint_plugins`."""

    name = "allocmoe"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.add_api_route("/allocmoe", self._status, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self._engine = engine_client
        # here an engine that does not follow its plan stops the server
        await self._status()

    async def _status(self) -> dict[str, Any]:
        workers = await self._engine.collective_rpc("allocmoe_status")
        layers: dict[int, dict[str, int]] = {}
        for worker in workers:  # pipeline stages have layers of their own, others repeat them
            layers.update({int(index): activity for index, activity in worker["layers"].items()})
        plan = workers[0]["plan"]
        check_layers(plan, layers)
        ran = [layers[index] for index in sorted(layers)]
        return {
            "plan": plan,
            "tokens": max((layer["tokens"] for layer in ran), default=0),
            "realised_per_layer": [
                layer["activations"] / layer["tokens"] if layer["tokens"] else None for layer in ran
            ],
        }
