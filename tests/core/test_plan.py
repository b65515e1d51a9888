"""Plans move each byte of each block once, and none besides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.core.errors import PlanError
from akv.core.geometry import Geometry, Group, Region
from akv.core.plan import moves, probe_windows, transfer_windows
from akv.core.spec import Span


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """One group of a few regions that do not overlap, with gaps and padding."""
    num_blocks = draw(st.integers(1, 12))
    regions = []
    ends: dict[int, int] = {}
    for number in range(draw(st.integers(1, 5))):
        memory = draw(st.integers(0, 2))
        size = draw(st.integers(1, 24))
        stride = size + draw(st.integers(0, 8))
        offset = ends.get(memory, 0) + draw(st.integers(0, 8))
        ends[memory] = offset + stride * num_blocks
        regions.append(
            Region(
                name=f"layer {number}",
                memory=memory,
                offset=offset,
                stride=stride,
                size=size,
            )
        )
    group = Group(block_size=16, regions=tuple(regions))
    return Geometry(num_blocks=num_blocks, hash_unit=16, groups=(group,))


@given(geometry=geometries(), data=st.data())
def test_each_byte_of_each_block_moves_once_and_none_outside(
    geometry: Geometry, data: st.DataObject
) -> None:
    """Over all windows: exactly the bytes of the blocks, exactly once."""
    ids = data.draw(
        st.lists(st.integers(0, geometry.num_blocks - 1), unique=True), label="ids"
    )
    span = Span(
        first_block=0,
        hashes=tuple(b"%d" % block for block in ids),
        block_ids=tuple(ids),
    )
    windows = transfer_windows(
        (span,),
        geometry,
        max_bytes=data.draw(st.integers(1, 400), label="max_bytes"),
        max_objects=data.draw(st.integers(1, 5), label="max_objects"),
    )
    group = geometry.groups[0]
    moved: list[tuple[int, int]] = []
    for window in windows:
        objects: list[tuple[int, int]] = []
        for move in moves(window, geometry):
            moved += [(move.memory, move.address + n) for n in range(move.size)]
            objects += [(move.object, move.object_offset + n) for n in range(move.size)]
        assert sorted(objects) == [
            (number, byte)
            for number in range(len(window))
            for byte in range(group.object_bytes)
        ]
    expected = {
        (region.memory, region.offset + block * region.stride + byte)
        for region in group.regions
        for block in ids
        for byte in range(region.size)
    }
    assert len(moved) == len(set(moved))
    assert set(moved) == expected
    assert [window.first for window in windows] == [
        sum(len(before) for before in windows[:n]) for n in range(len(windows))
    ]


@given(first=st.integers(0, 900), count=st.integers(0, 9000))
def test_probe_windows_cover_the_range_once_and_begin_small(
    first: int, count: int
) -> None:
    """A miss near the start costs one small call; nothing is asked twice."""
    windows = list(probe_windows(first, first + count))
    assert [n for window in windows for n in window] == list(
        range(first, first + count)
    )
    assert not windows or len(windows[0]) <= 64


def _geometry() -> Geometry:
    region = Region(name="a", memory=0, offset=0, stride=8, size=8)
    group = Group(block_size=16, regions=(region,))
    return Geometry(num_blocks=4, hash_unit=16, groups=(group,))


@pytest.mark.parametrize(
    ("ids", "group", "word"),
    [
        ((4,), 0, "block 4 of 4"),
        ((-1,), 0, "block -1"),
        ((1, 1), 0, "twice"),
        ((1,), 1, "group 1"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused_before_anything_moves(
    ids: tuple[int, ...], group: int, word: str
) -> None:
    """The error names what is wrong."""
    span = Span(first_block=0, hashes=(b"x",) * len(ids), block_ids=ids, group=group)
    with pytest.raises(PlanError, match=word):
        transfer_windows((span,), _geometry(), max_bytes=64, max_objects=4)


def test_a_span_needs_a_hash_for_each_block() -> None:
    """A block table shorter than the hit is noticed where the span is made."""
    with pytest.raises(PlanError, match="2 hashes for 1 blocks"):
        Span(first_block=0, hashes=(b"a", b"b"), block_ids=(1,))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"stride": 7}, "overlap"),
        ({"size": 0}, "no bytes"),
        ({"offset": -1}, "before 0"),
    ],
)
def test_a_region_that_cannot_be_is_refused(change: dict[str, int], word: str) -> None:
    """Blocks of a region neither overlap nor lie outside of memory."""
    numbers = {"memory": 0, "offset": 0, "stride": 8, "size": 8} | change
    with pytest.raises(PlanError, match=word):
        Region(name="a", **numbers)
