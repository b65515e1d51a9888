"""Making a lent segment ready before the first put pays for it.

Mooncake maps the memory of a segment and leaves it untouched, so each first
put into a page costs a page fault: 1.6 GB/s against 7 GB/s measured later.
The segment is what has come during the set-up and has its size (the kernel
makes one mapping of neighbours, so it may be part of an older one); its pages
are asked for in portions, in the thread that opens the store, without
the GIL (about 0.25 s a GiB). Where that cannot be done nothing is lost.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from akv.store.local.filesystem import available_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("mappings", "prefault")

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PORTION = 64 << 20
_SLACK = 64 << 20
"""How much larger than the segment its mapping may be."""


def mappings() -> dict[int, int]:
    """The private writable mappings of this process: start to size."""
    found: dict[int, int] = {}
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        span, access, *_ = line.split()
        if access == "rw-p":
            start, end = (int(text, 16) for text in span.split("-"))
            found[start] = end - start
    return found


def prefault(before: dict[int, int], size: int) -> int:
    """Ask for the pages of a new mapping of ``size`` bytes; how many bytes came.

    :param before: the mappings before the set-up
    """
    if not size or size > available_memory():
        return 0
    fitting = [
        (start, end - start)
        for start, end in _new(before, mappings())
        if size <= end - start <= size + _SLACK
    ]
    if len(fitting) != 1:
        return 0
    ((start, length),) = fitting
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    while done < length:
        portion = min(_PORTION, length - done)
        if madvise(start + done, portion, _POPULATE_WRITE) != 0:
            break
        done += portion
    return done


def _new(before: dict[int, int], after: dict[int, int]) -> Iterator[tuple[int, int]]:
    """The spans, start to end, that are mapped now and were not before."""
    old = sorted((start, start + size) for start, size in before.items())
    for start, size in after.items():
        at = start
        for other_start, other_end in old:
            if other_end <= at or other_start >= start + size:
                continue
            if other_start > at:
                yield at, other_start
            at = max(at, other_end)
        if at < start + size:
            yield at, start + size
