"""What a device must do for akv, whatever the memory is.

Every copy blocks and comes from one of akv's copy threads, so that waiting
for it is the pool's business. Only ``mark`` is called by the engine's own
thread and must return at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.buffers import ScatteredBuffer
    from akv.core.plan import Window

__all__ = ("Device", "ReachableMemory", "Staged")

Staged = npt.NDArray[np.uint8]
"""Staging of one window: ``[objects, object_bytes]``, contiguous, akv's own."""


class Device(Protocol):
    """Moves windows between the engine's blocks and staging."""

    def allocate(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Staging memory whose pages are there already; freed with the array."""
        ...

    def mark(self) -> Any:
        """A point in the engine's order of work, for copies to wait for.

        Called on the engine's thread after a forward was launched; must not
        wait.
        """
        ...

    def gather(self, window: Window, staged: Staged, mark: Any) -> None:
        """Copy the window's blocks into ``staged``, not before ``mark``."""
        ...

    def scatter(
        self,
        window: Window,
        staged: Staged,
        rows: npt.NDArray[np.intp] | None,
        mark: Any,
    ) -> None:
        """Copy ``staged`` into the window's blocks: those of ``rows``, or all.

        Not before ``mark``. When it returns no copy can touch the blocks any
        more.
        """
        ...


@runtime_checkable
class ReachableMemory(Protocol):
    """A device whose memory the CPU, and so a store, can reach by itself."""

    @property
    def memory(self) -> Sequence[memoryview]:
        """The engine's memory, piece by piece, for stores that register it."""
        ...

    @property
    def run_bytes(self) -> int:
        """The length of a run of a block's bytes, on the average."""
        ...

    def blocks(self, window: Window) -> Sequence[ScatteredBuffer]:
        """The window's blocks, in its order."""
        ...
