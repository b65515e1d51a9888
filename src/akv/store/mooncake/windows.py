"""Cutting one call into calls that Mooncake can take.

Over TCP a client queues at most 2,048 segments for one peer, all its calls
together; what is beyond fails and can break the client for good. A segment is
a run of bytes on this side: one for an object in akv's staging, several for one
in the engine's memory. So a call carries 256 of them at most (or one object of
more), and eight calls run at once. Bytes are bounded so that a call ends long
before its lease does, and scratch by the size of its piece. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from akv.store.base import Buffer

__all__ = ("CALLS_AT_ONCE", "MOST_SEGMENTS", "Part", "Runs", "windows")

MOST_SEGMENTS = 256
CALLS_AT_ONCE = 4
"""Gets, and as many puts."""
_MOST_BYTES = 32 << 20


Runs: TypeAlias = "Sequence[tuple[int, int]]"
"""Address and bytes of each run that an object's bytes are in, in order."""


@dataclass(frozen=True, slots=True)
class Part:
    """One key of a call, and where its bytes are.

    ``runs`` are address and bytes of each run of a registered buffer; None
    where it is not registered, and its bytes go by way of scratch.
    """

    at: int
    key: str
    buffer: Buffer
    runs: Runs | None


def windows(
    parts: Sequence[Part], *, piece_bytes: int, most_bytes: int = _MOST_BYTES
) -> Iterator[list[Part]]:
    """Runs of parts for one call each: all registered, or all through scratch."""
    window: list[Part] = []
    size = segments = 0
    for part in parts:
        direct = part.runs is not None
        most = most_bytes if direct else piece_bytes
        more = 1 if part.runs is None else len(part.runs)
        if window and (
            segments + more > MOST_SEGMENTS
            or size + part.buffer.nbytes > most
            or direct != (window[0].runs is not None)
        ):
            yield window
            window, size, segments = [], 0, 0
        window.append(part)
        size += part.buffer.nbytes
        segments += more
    if window:
        yield window
