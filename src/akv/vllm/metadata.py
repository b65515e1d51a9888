"""What crosses between the scheduler's process and the worker's, frozen.

The scheduler side alone decides keys and numbers; the worker side carries
out and reports. Both directions are pickled by vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from akv.core.spec import LoadSpec, SaveSpec

__all__ = (
    "AkvHandshake",
    "AkvMetadata",
    "AkvWorkerMetadata",
    "LoadReport",
    "SaveReport",
)


@dataclass(frozen=True, slots=True)
class AkvMetadata(KVConnectorMetadata):
    """One step's work, from the scheduler to the worker."""

    loads: tuple[LoadSpec, ...] = ()
    cancelled_loads: tuple[int, ...] = ()
    saves: tuple[SaveSpec, ...] = ()
    traces: tuple[tuple[str, Mapping[str, str]], ...] = ()
    """The trace context of those requests above that came with one."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A save job: first that its blocks are free, later how it ended."""

    job_id: int
    ended: bool
    dropped: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load of a request has ended, after so many seconds in the worker."""

    request_id: str
    seconds: float
    failed: bool


@dataclass(frozen=True, slots=True)
class AkvWorkerMetadata(KVConnectorWorkerMetadata):
    """What has become of earlier work, from the worker to the scheduler."""

    saves: tuple[SaveReport, ...] = ()
    unreadable: tuple[bytes, ...] = ()
    loads: tuple[LoadReport, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> AkvWorkerMetadata:
        """Put the reports of two workers of one step together."""
        if not isinstance(other, AkvWorkerMetadata):
            return self
        return AkvWorkerMetadata(
            saves=self.saves + other.saves,
            unreadable=self.unreadable + other.unreadable,
            loads=self.loads + other.loads,
        )


@dataclass(frozen=True, slots=True)
class AkvHandshake(KVConnectorHandshakeMetadata):
    """What only a worker knows of its KV memory, and the scheduler must.

    ``facts`` become part of the fingerprint; ``pid`` is the worker's process.
    """

    object_bytes: int
    pid: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
