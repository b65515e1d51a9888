"""Memory that the CPU can reach: blocks are copied by numpy, without the GIL.

One copy for each object and run of regions. Regions that lie behind one
another are one run of bytes, and runs at even distances in one piece of memory
are one strided copy: where all layers share a piece, a whole object is one
call, which costs a microsecond and lets go of the interpreter's lock once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from akv.core.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.geometry import Geometry, Group, Region
    from akv.core.plan import Window
    from akv.device.base import Staged

__all__ = ("HostBlock", "HostDevice")

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of every block that lie behind one another, and of an object too."""

    memory: int
    address: int
    stride: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Copies:
    """Runs that one strided copy moves.

    :ivar blocks: the engine's memory as ``[num_blocks, runs, size]``
    :ivar first: where in an object the first of these bytes is
    :ivar last: where the bytes behind them begin
    """

    blocks: Memory
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _GroupMemory:
    runs: tuple[_Run, ...]
    copies: tuple[_Copies, ...]
    object_bytes: int


class HostBlock:
    """One block of the engine's memory as a store's buffer.

    A :class:`~akv.core.buffers.ScatteredBuffer`. Good as long as the device.
    """

    __slots__ = ("_block", "_group")

    def __init__(self, group: _GroupMemory, block: int) -> None:
        self._group = group
        self._block = block

    @property
    def nbytes(self) -> int:
        """Bytes of the whole object."""
        return self._group.object_bytes

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Address and bytes of each run."""
        block = self._block
        return [
            (run.address + block * run.stride, run.size) for run in self._group.runs
        ]

    def fill(self, source: memoryview) -> None:
        """Copy an object into the block."""
        whole = np.frombuffer(source, dtype=np.uint8)
        for copies in self._group.copies:
            target = copies.blocks[self._block]
            part = whole[copies.first : copies.last].reshape(target.shape)
            np.copyto(target, part)

    def drain(self, target: memoryview) -> None:
        """Copy the block into an object."""
        whole = np.frombuffer(target, dtype=np.uint8)
        for copies in self._group.copies:
            source = copies.blocks[self._block]
            part = whole[copies.first : copies.last].reshape(source.shape)
            np.copyto(part, source)


class HostDevice:
    """Copies between staging and memory on the host.

    The engine owns ``memory`` (flat byte arrays, in the order of the
    geometry's memory numbers) and must keep it until the session is closed.
    """

    def __init__(self, geometry: Geometry, memory: Sequence[Memory]) -> None:
        self._geometry = geometry
        self._memory = tuple(memory)
        self._groups = tuple(self._group(group) for group in geometry.groups)

    @property
    def memory(self) -> tuple[memoryview, ...]:
        """The engine's memory, piece by piece."""
        return tuple(piece.data for piece in self._memory)

    @property
    def run_bytes(self) -> int:
        """The length of a run of a block's bytes, on the average."""
        total = sum(group.object_bytes for group in self._groups)
        return total // sum(len(group.runs) for group in self._groups)

    def blocks(self, window: Window) -> list[HostBlock]:
        """The window's blocks, for a store that reads and writes them itself."""
        group = self._groups[window.group]
        return [HostBlock(group, block) for block in window.block_ids]

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
        for block, row in zip(self.blocks(window), staged, strict=True):
            block.drain(row.data)

    def scatter(
        self,
        window: Window,
        staged: Staged,
        rows: npt.NDArray[np.intp] | None,
        mark: Any,  # noqa: ARG002
    ) -> None:
        """Copy ``staged`` into the window's blocks."""
        blocks = self.blocks(window)
        for row in range(len(blocks)) if rows is None else rows.tolist():
            blocks[row].fill(staged[row].data)

    def _group(self, group: Group) -> _GroupMemory:
        runs: list[_Run] = []
        for region, offset in zip(group.regions, group.object_offsets, strict=True):
            address = self._address(region)
            run = _Run(region.memory, address, region.stride, region.size, offset)
            before = runs[-1] if runs else None
            if before is not None and _continues(before, run):
                runs[-1] = replace(before, size=before.size + run.size)
            else:
                runs.append(run)
        copies: list[_Copies] = []
        first = 0
        while first < len(runs):
            last = _even_run(runs, first)
            copies.append(self._copies(runs[first:last]))
            first = last
        return _GroupMemory(tuple(runs), tuple(copies), group.object_bytes)

    def _address(self, region: Region) -> int:
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
        return int(memory.ctypes.data) + region.offset

    def _copies(self, runs: Sequence[_Run]) -> _Copies:
        """``runs``, which lie at even distances in one piece, as one array.

        Never over two pieces, though they may lie evenly too: numpy takes what
        is between them for part of the array, and a buffer there for overlapping.
        """
        first = runs[0]
        distance = runs[1].address - first.address if len(runs) > 1 else first.size
        start = self._memory[first.memory]
        blocks = np.lib.stride_tricks.as_strided(
            start[first.address - start.ctypes.data :],
            shape=(self._geometry.num_blocks, len(runs), first.size),
            strides=(first.stride, distance, 1),
        )
        last = runs[-1]
        return _Copies(blocks, first.offset, last.offset + last.size)


def _continues(before: _Run, run: _Run) -> bool:
    """Whether ``run`` lies behind ``before`` in the memory of every block."""
    same = (run.memory, run.stride) == (before.memory, before.stride)
    return same and run.address == before.address + before.size


def _even_run(runs: Sequence[_Run], first: int) -> int:
    """The end of the longest row of equal runs at even distances from ``first``."""
    shape = _shape(runs[first])
    last = first + 1
    while last < len(runs) and _shape(runs[last]) == shape:
        distance = runs[last].address - runs[last - 1].address
        if last > first + 1 and distance != (
            runs[first + 1].address - runs[first].address
        ):
            break
        last += 1
    return last


def _shape(run: _Run) -> tuple[int, int, int]:
    return run.memory, run.stride, run.size
