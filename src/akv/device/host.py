"""Memory that the CPU can reach: blocks are copied by numpy, without the GIL.

One call of numpy for each run of regions moves all of a window's blocks. Regions
that lie behind one another are one run, and runs at even distances in one piece
of memory are one array: where all layers share a piece, a window is one call,
and where each has its own, a call for each layer. A call costs a microsecond and
takes the interpreter's lock twice, so that copies block by block would stand in
each other's way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import eq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from akv.core.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from akv.core.geometry import Geometry, Group, Region
    from akv.core.plan import Window
    from akv.device.base import Staged

__all__ = ("HostBlock", "HostDevice")

Memory = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


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
    """Runs that one copy moves, for any number of blocks.

    Blocks that are evenly apart go as bytes, since numpy keeps the lock for
    less than 500 elements; any others each run as one element, which is faster
    and for which it does not.

    :ivar blocks: the engine's memory as ``[num_blocks, runs, size]``
    :ivar first: where in an object the first of these bytes is
    :ivar last: where the bytes behind them begin
    """

    blocks: Memory
    first: int
    last: int

    def pair(self, rows: Memory, *, even: bool) -> tuple[Array, Array]:
        """The same runs of objects, by row, and of blocks, by number."""
        _, runs, size = self.blocks.shape
        part = rows[:, self.first : self.last].reshape(len(rows), runs, size)
        if even:
            return part, self.blocks
        element = np.dtype((np.void, size))
        return part.view(element)[..., 0], self.blocks.view(element)[..., 0]


@dataclass(frozen=True, slots=True)
class _GroupMemory:
    runs: tuple[_Run, ...]
    copies: tuple[_Copies, ...]
    object_bytes: int

    def scatter(
        self, rows: Memory, numbers: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Copy some rows, each an object, into as many blocks."""
        source, target = _selection(numbers), _selection(blocks)
        even = isinstance(source, slice) and isinstance(target, slice)
        for copies in self.copies:
            objects, memory = copies.pair(rows, even=even)
            memory[target] = objects[source]

    def gather(
        self, rows: Memory, numbers: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Copy blocks into as many rows."""
        source, target = _selection(blocks), _selection(numbers)
        even = isinstance(source, slice) and isinstance(target, slice)
        for copies in self.copies:
            objects, memory = copies.pair(rows, even=even)
            objects[target] = memory[source]


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

    @staticmethod
    def fill(
        buffers: Sequence[HostBlock], rows: Memory, numbers: Sequence[int]
    ) -> None:
        """Copy objects, some rows of an array, into as many blocks."""
        for group, pairs in _by_group(buffers, numbers):
            group.scatter(rows, *pairs)

    @staticmethod
    def drain(
        buffers: Sequence[HostBlock], rows: Memory, numbers: Sequence[int]
    ) -> None:
        """Copy blocks into as many rows of an array."""
        for group, pairs in _by_group(buffers, numbers):
            group.gather(rows, *pairs)

    @property
    def place(self) -> tuple[_GroupMemory, int]:
        """The group's memory, and the block's number in it."""
        return self._group, self._block


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
        group = self._groups[window.group]
        group.gather(staged, range(len(window)), window.block_ids)

    def scatter(
        self,
        window: Window,
        staged: Staged,
        rows: npt.NDArray[np.intp] | None,
        mark: Any,  # noqa: ARG002
    ) -> None:
        """Copy ``staged`` into the window's blocks."""
        numbers = range(len(window)) if rows is None else rows.tolist()
        blocks = [window.block_ids[number] for number in numbers]
        self._groups[window.group].scatter(staged, numbers, blocks)

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


def _selection(numbers: Sequence[int]) -> slice | npt.NDArray[np.intp]:
    """An index for ``numbers``: a slice where they are evenly apart.

    A slice selects without a copy on the way.
    """
    count = len(numbers)
    first = numbers[0] if count else 0
    step = numbers[1] - first if count > 1 else 1
    end = first + count * step
    if step and all(map(eq, numbers, range(first, end, step))):
        return slice(first, end if end >= 0 else None, step)
    return np.fromiter(numbers, dtype=np.intp, count=count)


def _by_group(
    buffers: Sequence[HostBlock], numbers: Sequence[int]
) -> Iterable[tuple[_GroupMemory, tuple[list[int], list[int]]]]:
    """For each group the rows' numbers and the blocks' numbers."""
    found: dict[int, tuple[_GroupMemory, tuple[list[int], list[int]]]] = {}
    for buffer, number in zip(buffers, numbers, strict=True):
        group, block = buffer.place
        pairs = found.setdefault(id(group), (group, ([], [])))[1]
        pairs[0].append(number)
        pairs[1].append(block)
    return found.values()


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
