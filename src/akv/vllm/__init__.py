"""akv inside vLLM: the connector class and the plugin that registers it.

The only place that imports vllm, and it does so when the connector is asked
for, not before.
"""

from __future__ import annotations

from typing import Any

__all__ = ("AkvConnector", "register")


def register() -> None:
    """Make ``"kv_connector": "AkvConnector"`` known to vLLM.

    The entry point ``vllm.general_plugins``; vLLM calls it in each of its
    processes, in some of them twice.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    if "AkvConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "AkvConnector", "akv.vllm.connector", "AkvConnector"
        )


def __getattr__(name: str) -> Any:
    if name == "AkvConnector":
        from akv.vllm.connector import AkvConnector

        return AkvConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
