"""Memory that the CPU can reach: blocks are copied by numpy, without the GIL.

One copy for each region and window, whatever the number of blocks: a region
is looked at as a matrix of machine words, one row a block, and rows are
picked by the block ids. Words are as wide as the alignment of the region
allows, since copying by bytes is four times slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from akv.core.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.geometry import Geometry, Region
    from akv.core.plan import Window
    from akv.device.base import Staged

__all__ = ("HostDevice",)

Memory = npt.NDArray[np.uint8]
_WORDS = (np.uint64, np.uint32, np.uint16, np.uint8)


class HostDevice:
    """Copies between staging and memory on the host.

    The engine owns ``memory`` (flat byte arrays, in the order of the
    geometry's memory numbers) and must keep it until the session is closed.
    """

    def __init__(self, geometry: Geometry, memory: Sequence[Memory]) -> None:
        self._geometry = geometry
        self._memory = tuple(memory)
        self._blocks = tuple(
            tuple(
                self._view(region, offset, group.object_bytes)
                for region, offset in zip(
                    group.regions, group.object_offsets, strict=True
                )
            )
            for group in geometry.groups
        )

    def _view(
        self, region: Region, object_offset: int, object_bytes: int
    ) -> npt.NDArray[Any]:
        if region.memory >= len(self._memory):
            raise PlanError(
                f"region {region.name!r} lies in memory {region.memory}, "
                f"{len(self._memory)} were given"
            )
        memory = self._memory[region.memory]
        last = region.offset + (self._geometry.num_blocks - 1) * region.stride
        if last + region.size > memory.nbytes:
            raise PlanError(
                f"region {region.name!r} ends at byte {last + region.size} of "
                f"{memory.nbytes}"
            )
        address = memory.ctypes.data + region.offset
        for word in _WORDS:
            width = np.dtype(word).itemsize
            parts = (address, region.stride, region.size, object_offset, object_bytes)
            if all(part % width == 0 for part in parts):
                return np.ndarray(
                    (self._geometry.num_blocks, region.size // width),
                    dtype=word,
                    buffer=memory.data,
                    offset=region.offset,
                    strides=(region.stride, width),
                )
        raise AssertionError("a byte divides everything")

    def allocate(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory from the allocator, aligned to 64 bytes, touched once."""
        raw = np.zeros(num_bytes + 64, dtype=np.uint8)
        raw[::4096] = 1
        start = -raw.ctypes.data % 64
        return raw[start : start + num_bytes]

    def mark(self) -> Any:
        """Nothing: when the engine's thread goes on, the CPU has written."""
        return None

    def gather(self, window: Window, staged: Staged, mark: Any) -> None:  # noqa: ARG002
        """Copy the window's blocks into ``staged``."""
        group = self._geometry.groups[window.group]
        ids = np.asarray(window.block_ids, dtype=np.intp)
        for offset, blocks in zip(
            group.object_offsets, self._blocks[window.group], strict=True
        ):
            size = blocks.shape[1] * blocks.dtype.itemsize
            part = staged[:, offset : offset + size].view(blocks.dtype)
            part[...] = blocks[ids]

    def scatter(
        self,
        window: Window,
        staged: Staged,
        rows: npt.NDArray[np.intp] | None,
        mark: Any,  # noqa: ARG002
    ) -> None:
        """Copy ``staged`` into the window's blocks."""
        group = self._geometry.groups[window.group]
        ids = np.asarray(window.block_ids, dtype=np.intp)
        if rows is not None:
            ids = ids[rows]
            staged = staged[rows]
        for offset, blocks in zip(
            group.object_offsets, self._blocks[window.group], strict=True
        ):
            size = blocks.shape[1] * blocks.dtype.itemsize
            blocks[ids] = staged[:, offset : offset + size].view(blocks.dtype)
