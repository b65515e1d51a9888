"""Memory whose pages are there already, and bytes that tell where they come from.

The first touch of fresh memory costs six to ten times a copy, so nothing here is
measured on it. Each page of a source carries its own number and the number of the
round, so that bytes left over from an earlier round, or from another page, are seen.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from measure import Skip

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = (
    "PAGE",
    "Rows",
    "fill",
    "mapped",
    "need_memory",
    "prefaulted",
    "right_rows",
    "stamp",
)

PAGE = 4096
_WORDS = PAGE // 8
_PATTERN = 16 << 20

Rows = npt.NDArray[np.uint8]
"""Objects of one length: ``[objects, bytes]``."""


def prefaulted(rows: int, row_bytes: int) -> Rows:
    """Zeros, one write in each page; begins at a page."""
    size = rows * row_bytes
    raw = np.zeros(size + PAGE, dtype=np.uint8)
    raw[::PAGE] = 0
    start = -raw.ctypes.data % PAGE
    return raw[start : start + size].reshape(rows, row_bytes)


@contextmanager
def mapped(directory: Path, rows: int, row_bytes: int) -> Iterator[Rows]:
    """Zeros in a mapped file, each page there and mapped, as a store's are.

    Private memory may lie in huge pages, which a copy is faster into and out of than
    the small pages of shared memory and files; so a store is compared with this.
    """
    size = rows * row_bytes
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        memory = np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)
    memory[...] = 0
    yield memory.reshape(rows, row_bytes)


def fill(rows: Rows, seed: int) -> None:
    """Random words, and the number of its page in each page."""
    flat = rows.reshape(-1)
    pattern = np.random.default_rng(seed).bytes(min(_PATTERN, flat.nbytes))
    words = np.frombuffer(pattern, dtype=np.uint8)
    for start in range(0, flat.nbytes, words.nbytes):
        part = flat[start : start + words.nbytes]
        part[...] = words[: part.nbytes]
    numbers = flat.view(np.uint64)[::_WORDS]
    numbers[...] = np.arange(len(numbers), dtype=np.uint64) + np.uint64(seed << 32)


def stamp(rows: Rows, number: int) -> None:
    """Write the number of a round into each page."""
    rows.reshape(-1).view(np.uint64)[1::_WORDS] = number


def right_rows(found: Rows, expected: Rows) -> int:
    """How many bytes are in rows that are as they should be, in each byte."""
    return sum(
        expected.shape[1]
        for row, right in zip(found, expected, strict=True)
        if np.array_equal(row.view(np.uint64), right.view(np.uint64))
    )


def need_memory(size: int) -> None:
    """Go without a case for which there is too little memory."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            if free < size * 5 // 4:
                raise Skip(f"it takes {size >> 20} MiB, {free >> 20} MiB are free")
