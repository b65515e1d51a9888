"""Where the bytes of a block lie in the engine's memory, as plain numbers.

A geometry is built once, from tensors, by the device floor, and is then only
read. One object in a store is one block of one group: the group's regions
one after the other, in order. Units are bytes, and blocks are numbered as
the engine numbers them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from akv.core.align import common_block
from akv.core.errors import PlanError

__all__ = ("Geometry", "Group", "Region", "Series")


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One run of bytes that every block has, in one piece of memory.

    Block ``b`` lies at ``offset + b * stride`` of memory ``memory`` and is
    ``size`` bytes long. A stride larger than the size is padding or another
    layer's page; it is never touched.
    """

    name: str
    memory: int
    offset: int
    stride: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.offset < 0 or self.memory < 0:
            raise PlanError(f"region {self.name!r} has no bytes or lies before 0")
        if self.stride < self.size:
            raise PlanError(
                f"region {self.name!r}: blocks of {self.size} bytes overlap "
                f"at a stride of {self.stride}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Equal runs of bytes at even distances, which one copy can move.

    Run ``r`` of block ``b`` lies at ``offset + b * stride + r * distance`` of
    memory ``memory``. In an object the runs lie behind one another from
    ``first`` on.
    """

    memory: int
    offset: int
    stride: int
    size: int
    first: int
    count: int = 1
    distance: int = 0

    @property
    def last(self) -> int:
        """Where in an object the bytes behind these begin."""
        return self.first + self.count * self.size

    def longer(self, run: Series) -> Series | None:
        """These runs and one more; None where it does not lie evenly."""
        if (run.memory, run.stride, run.size) != (self.memory, self.stride, self.size):
            return None
        distance = run.offset - self.offset - (self.count - 1) * self.distance
        if distance <= 0 or (self.count > 1 and distance != self.distance):
            return None
        return replace(self, count=self.count + 1, distance=distance)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share a block table.

    :ivar block_size: tokens of a block of this group
    :ivar regions: the bytes of a block, in the order they have in an object
    """

    block_size: int
    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise PlanError(f"block_size is {self.block_size}, at least 1 is needed")
        if not self.regions:
            raise PlanError("a group without regions has nothing to store")

    @cached_property
    def object_bytes(self) -> int:
        """Bytes of one block: the length of one stored object."""
        return sum(region.size for region in self.regions)

    @cached_property
    def object_offsets(self) -> tuple[int, ...]:
        """Where in an object each region begins, in bytes."""
        offsets: list[int] = []
        position = 0
        for region in self.regions:
            offsets.append(position)
            position += region.size
        return tuple(offsets)

    @cached_property
    def series(self) -> tuple[Series, ...]:
        """The regions in as few copies as there can be, in the order of an object.

        Regions that lie behind one another in every block are one run, and runs
        at even distances in one piece of memory are one series: one for all layers
        that share a piece, and one for each layer where each has its own.
        """
        runs: list[Series] = []
        for region, first in zip(self.regions, self.object_offsets, strict=True):
            run = Series(
                memory=region.memory,
                offset=region.offset,
                stride=region.stride,
                size=region.size,
                first=first,
            )
            if runs and _behind(runs[-1], run):
                runs[-1] = replace(runs[-1], size=runs[-1].size + run.size)
            else:
                runs.append(run)
        series = runs[:1]
        for run in runs[1:]:
            longer = series[-1].longer(run)
            if longer is None:
                series.append(run)
            else:
                series[-1] = longer
        return tuple(series)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """All that a plan needs to know about the engine's KV memory.

    :ivar num_blocks: blocks that the engine's pool has; ids are below it
    :ivar hash_unit: tokens of a block hash; divides each group's block size
    """

    num_blocks: int
    hash_unit: int
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise PlanError(f"num_blocks is {self.num_blocks}, at least 1 is needed")
        if not self.groups:
            raise PlanError("a geometry needs at least one group")
        for number, group in enumerate(self.groups):
            if self.hash_unit < 1 or group.block_size % self.hash_unit:
                raise PlanError(
                    f"hash unit {self.hash_unit} does not divide block size "
                    f"{group.block_size} of group {number}"
                )

    @cached_property
    def block(self) -> int:
        """Tokens that are whole blocks in each group: the unit of a promise."""
        return common_block(group.block_size for group in self.groups)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of the largest object: what one slot of staging must hold."""
        return max(group.object_bytes for group in self.groups)


def _behind(before: Series, run: Series) -> bool:
    """Whether ``run`` lies behind ``before`` in the memory of every block."""
    same = (run.memory, run.stride) == (before.memory, before.stride)
    return same and run.offset == before.offset + before.size
