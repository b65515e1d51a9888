"""Memory that the CPU can reach: blocks are copied by numpy, without the GIL.

One call of numpy for each series of runs (see ``Group.series``) moves all of a
window's blocks. A call costs a microsecond and takes the interpreter's lock
twice, so that copies block by block would stand in each other's way.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import eq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from akv.core.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from akv.core.geometry import Geometry, Group, Series
    from akv.core.plan import Window
    from akv.device.base import Staged

__all__ = ("HostBlock", "HostDevice")

Memory = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Copies:
    """Runs that one copy moves, for any number of blocks.

    Blocks that are evenly apart go as bytes, since numpy keeps the lock for
    less than 500 elements; any others each run as one element, which is faster
    and for which it does not.

    :ivar blocks: the engine's memory as ``[num_blocks, runs, size]``
    :ivar address: where that begins
    :ivar first: where in an object the first of these bytes is
    :ivar last: where the bytes behind them begin
    """

    blocks: Memory
    address: int
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
    copies: tuple[_Copies, ...]
    object_bytes: int

    @property
    def runs(self) -> int:
        """How many runs of bytes a block is."""
        return sum(copies.blocks.shape[1] for copies in self.copies)

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
        return [
            (copies.address + self._block * stride + run * distance, size)
            for copies in self._group.copies
            for _, runs, size in (copies.blocks.shape,)
            for stride, distance, _ in (copies.blocks.strides,)
            for run in range(runs)
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

    :raises PlanError: an array is not flat, not of bytes, read-only or too short
    """

    def __init__(self, geometry: Geometry, memory: Sequence[Memory]) -> None:
        self._geometry = geometry
        for number, piece in enumerate(memory):
            flags = piece.flags
            if piece.dtype != np.uint8 or piece.ndim != 1 or not flags.c_contiguous:
                raise PlanError(
                    f"memory {number} is {piece.dtype} of shape {piece.shape}, stride "
                    f"{piece.strides}: give flat bytes, as array.reshape(-1).view("
                    f"np.uint8) of a contiguous array"
                )
            if not flags.writeable:
                raise PlanError(f"memory {number} cannot be written")
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
        return total // sum(group.runs for group in self._groups)

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
        copies = tuple(self._copies(series) for series in group.series)
        return _GroupMemory(copies, group.object_bytes)

    def _copies(self, series: Series) -> _Copies:
        if series.memory >= len(self._memory):
            raise PlanError(
                f"bytes {series.first} to {series.last} of an object lie in memory "
                f"{series.memory}, {len(self._memory)} were given"
            )
        memory = self._memory[series.memory]
        shape = (self._geometry.num_blocks, series.count, series.size)
        strides = (series.stride, series.distance, 1)
        end = series.offset + 1
        for length, stride in zip(shape, strides, strict=True):
            end += (length - 1) * stride
        if end > memory.nbytes:
            raise PlanError(
                f"bytes {series.first} to {series.last} of the objects end at byte "
                f"{end} of {memory.nbytes} in memory {series.memory}"
            )
        blocks = np.lib.stride_tricks.as_strided(
            memory[series.offset :], shape, strides
        )
        return _Copies(blocks, blocks.ctypes.data, series.first, series.last)


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
