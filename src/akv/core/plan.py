"""Which keys to ask for, and which bytes go where. Two pure planners.

``probe_windows`` cuts a lookup into calls that grow, so that a miss near the
start of a long prompt costs one small call. ``transfer_windows`` cuts a load
or a save into windows bounded by bytes and by objects; between two windows a
cancellation or a deadline may act. Nothing here touches memory: a device
carries a window out, and ``moves`` spells one out byte by byte for checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from akv.core.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from akv.core.geometry import Geometry
    from akv.core.spec import Span

__all__ = ("Move", "Window", "moves", "probe_windows", "transfer_windows")


def probe_windows(
    first: int, last: int, *, start: int = 64, most: int = 4096
) -> Iterator[range]:
    """Cut blocks ``[first, last)`` into ranges of ``start``, doubling to ``most``."""
    size = start
    while first < last:
        end = min(first + size, last)
        yield range(first, end)
        first = end
        size = min(size * 2, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Objects that are moved together: one call of a store, one copy.

    :ivar first: the place of the first object in its spec, counted over all
        spans; failures are reported by this place
    """

    first: int
    group: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    object_bytes: int

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of all objects of this window."""
        return self.object_bytes * len(self.block_ids)


def transfer_windows(
    spans: tuple[Span, ...],
    geometry: Geometry,
    *,
    max_bytes: int,
    max_objects: int = 1024,
) -> tuple[Window, ...]:
    """Cut ``spans`` into windows; each has at least one object.

    :raises PlanError: a group or a block that the geometry does not have, or
        the same block twice in one group
    """
    windows: list[Window] = []
    place = 0
    seen: set[tuple[int, int]] = set()
    for span in spans:
        if not 0 <= span.group < len(geometry.groups):
            raise PlanError(
                f"group {span.group} of a spec; there are {len(geometry.groups)}"
            )
        for block_id in span.block_ids:
            if not 0 <= block_id < geometry.num_blocks:
                raise PlanError(f"block {block_id} of {geometry.num_blocks}")
            if (span.group, block_id) in seen:
                raise PlanError(f"block {block_id} twice in one spec")
            seen.add((span.group, block_id))
        object_bytes = geometry.groups[span.group].object_bytes
        most = max(1, min(max_objects, max_bytes // object_bytes))
        for begin in range(0, len(span), most):
            end = min(begin + most, len(span))
            windows.append(
                Window(
                    first=place + begin,
                    group=span.group,
                    hashes=span.hashes[begin:end],
                    block_ids=span.block_ids[begin:end],
                    object_bytes=object_bytes,
                )
            )
        place += len(span)
    return tuple(windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """``size`` bytes: object and offset in it, memory and address in it."""

    object: int
    object_offset: int
    memory: int
    address: int
    size: int


def moves(window: Window, geometry: Geometry) -> Iterator[Move]:
    """Every run of bytes that ``window`` moves; the reference for devices."""
    group = geometry.groups[window.group]
    for number, block_id in enumerate(window.block_ids):
        for offset, region in zip(group.object_offsets, group.regions, strict=True):
            yield Move(
                object=number,
                object_offset=offset,
                memory=region.memory,
                address=region.offset + block_id * region.stride,
                size=region.size,
            )
