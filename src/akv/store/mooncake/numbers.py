"""The pool's numbers, from the master's HTTP port.

Mooncake's client cannot count objects; the master shows what it has in the
text format of Prometheus. If nobody answers there the numbers are zero: they
are for people, nothing depends on them. Blocks for half a second at most.
"""

from __future__ import annotations

import http.client
from dataclasses import dataclass

__all__ = ("PoolNumbers", "read_numbers")

_PATIENCE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNumbers:
    """Of all clients and namespaces together.

    :ivar shown: the master says what its capacity is; else a 0 means nothing
    """

    shown: bool = False
    objects: int = 0
    bytes_used: int = 0
    bytes_capacity: int = 0
    evictions: int = 0


def read_numbers(host: str, port: int) -> PoolNumbers:
    """What the master says now; zeros if it says nothing. Port 0 is not asked."""
    if not port:
        return PoolNumbers()
    connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException, ValueError):
        return PoolNumbers()
    finally:
        connection.close()
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            values[name] = int(value)
    capacity = values.get("master_total_capacity_bytes")
    return PoolNumbers(
        shown=capacity is not None,
        objects=values.get("master_key_count", 0),
        bytes_used=values.get("master_allocated_bytes", 0),
        bytes_capacity=capacity or 0,
        evictions=values.get("master_evicted_key_count", 0),
    )
