"""Copies between a store's memory and callers' buffers, in one run or several.

Without the interpreter's lock while bytes move. Any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from akv.core.buffers import ScatteredBuffer
    from akv.store.base import Buffer

__all__ = ("copy_in", "copy_out", "copy_rows_in", "copy_rows_out")

Rows: TypeAlias = npt.NDArray[np.uint8]
"""``[rows, row_bytes]``, each row in one run and as long as an object at least."""


def copy_in(buffer: Buffer, source: memoryview) -> None:
    """Copy ``source`` into the caller's buffer, which is as long."""
    copy_rows_in([buffer], _flat(source)[np.newaxis], [0])


def copy_out(buffer: Buffer, target: memoryview) -> None:
    """Copy the caller's buffer into ``target``, which is as long."""
    copy_rows_out([buffer], _flat(target)[np.newaxis], [0])


def copy_rows_in(buffers: Sequence[Buffer], rows: Rows, numbers: Sequence[int]) -> None:
    """Copy rows, those with these numbers, into as many callers' buffers."""
    scattered: list[tuple[ScatteredBuffer, int]] = []
    for buffer, number in zip(buffers, numbers, strict=True):
        if isinstance(buffer, memoryview):
            np.copyto(_flat(buffer), rows[number, : buffer.nbytes])
        else:
            scattered.append((buffer, number))
    for kind, some, of in _kinds(scattered):
        kind.fill(some, rows, of)


def copy_rows_out(
    buffers: Sequence[Buffer], rows: Rows, numbers: Sequence[int]
) -> None:
    """Copy callers' buffers into as many rows, those with these numbers."""
    scattered: list[tuple[ScatteredBuffer, int]] = []
    for buffer, number in zip(buffers, numbers, strict=True):
        if isinstance(buffer, memoryview):
            np.copyto(rows[number, : buffer.nbytes], _flat(buffer))
        else:
            scattered.append((buffer, number))
    for kind, some, of in _kinds(scattered):
        kind.drain(some, rows, of)


def _flat(memory: memoryview) -> npt.NDArray[np.uint8]:
    if not memory.nbytes:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(memory, dtype=np.uint8)


def _kinds(
    scattered: Sequence[tuple[ScatteredBuffer, int]],
) -> Iterator[tuple[type[ScatteredBuffer], list[ScatteredBuffer], list[int]]]:
    """Buffers that one call copies, with their rows' numbers."""
    for kind in dict.fromkeys(type(buffer) for buffer, _ in scattered):
        pairs = [pair for pair in scattered if type(pair[0]) is kind]
        yield kind, [buffer for buffer, _ in pairs], [number for _, number in pairs]
