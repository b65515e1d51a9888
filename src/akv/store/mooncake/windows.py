"""Cutting one call into calls that Mooncake can take.

Over TCP a client queues at most 2,048 segments for one peer, all its calls
together; what is beyond fails and can break the client for good. akv's
objects are one segment each, so a call carries 256 of them at most, and eight
calls run at once. Bytes are bounded so that a call ends long before its lease
does, and scratch by the size of its piece. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from akv.store.base import Buffer

__all__ = ("CALLS_AT_ONCE", "MOST_KEYS", "Part", "windows")

MOST_KEYS = 256
CALLS_AT_ONCE = 4
"""Gets, and as many puts."""
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """One key of a call, and where its bytes are.

    ``address`` is None where the buffer is not registered.
    """

    at: int
    key: str
    buffer: Buffer
    address: int | None


def windows(
    parts: Sequence[Part], *, piece_bytes: int, most_bytes: int = _MOST_BYTES
) -> Iterator[list[Part]]:
    """Runs of parts for one call each: all registered, or all through scratch."""
    window: list[Part] = []
    size = 0
    for part in parts:
        direct = part.address is not None
        most = most_bytes if direct else piece_bytes
        if window and (
            len(window) == MOST_KEYS
            or size + part.buffer.nbytes > most
            or direct != (window[0].address is not None)
        ):
            yield window
            window, size = [], 0
        window.append(part)
        size += part.buffer.nbytes
    if window:
        yield window
