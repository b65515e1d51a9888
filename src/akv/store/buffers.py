"""Copies between a store's memory and a caller's buffer, in one run or several.

Without the interpreter's lock while bytes move. Any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from akv.store.base import Buffer

__all__ = ("copy_in", "copy_out")


def copy_in(buffer: Buffer, source: memoryview) -> None:
    """Copy ``source`` into the caller's buffer, which is as long."""
    if not isinstance(buffer, memoryview):
        buffer.fill(source)
    elif source.nbytes:
        np.copyto(
            np.frombuffer(buffer, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8)
        )


def copy_out(buffer: Buffer, target: memoryview) -> None:
    """Copy the caller's buffer into ``target``, which is as long."""
    if isinstance(buffer, memoryview):
        copy_in(target, buffer)
    else:
        buffer.drain(target)
