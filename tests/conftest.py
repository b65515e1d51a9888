"""Settings that must stand before vLLM is imported, in this and in child processes.

vLLM reads its environment at import time. Nothing here may reach the network, and its
log is kept to errors unless somebody asks for more.
"""

from __future__ import annotations

import os
import sys

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The loop of tests marked ``anyio``; those about other loops name theirs."""
    return "asyncio"


def pytest_sessionfinish() -> None:
    """End the worker processes that engines left for the next engine."""
    worker = sys.modules.get("engine.worker")
    if worker is not None:
        worker.end_idle_processes()
