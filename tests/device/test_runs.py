"""Every way of moving a block moves the bytes that the plan spells out, no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from akv.core.geometry import Geometry, Group, Region
from akv.core.plan import Window, moves
from akv.device.base import ReachableMemory
from akv.device.cuda import CudaDevice
from akv.device.host import HostDevice
from akv.store.buffers import copy_out

if TYPE_CHECKING:
    import numpy.typing as npt

    from akv.device.base import Device

    Memories = list[npt.NDArray[np.uint8]]

BLOCKS = 5


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Layers in pieces of their own, packed in one, padded, with gaps, or mixed."""
    regions: list[Region] = []
    for memory in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, 3))
        packed = draw(st.integers(1, 4))
        same = draw(st.booleans())
        size = draw(st.integers(1, 9))
        gap = draw(st.integers(0, 2))
        inside: list[tuple[int, int]] = []
        for _ in range(packed):
            inside.append((position, size))
            position += size + gap
            if not same:
                size = draw(st.integers(1, 9))
        stride = position + draw(st.integers(0, 4))
        regions += [
            Region(
                name=f"{memory}.{number}",
                memory=memory,
                offset=offset,
                stride=stride,
                size=size,
            )
            for number, (offset, size) in enumerate(inside)
        ]
    regions = draw(st.permutations(regions))
    return Geometry(
        num_blocks=BLOCKS,
        hash_unit=1,
        groups=(Group(block_size=1, regions=tuple(regions)),),
    )


def _memories(geometry: Geometry, fill: int | None) -> Memories:
    pieces: Memories = []
    for number in range(4):
        ends = [
            region.offset + BLOCKS * region.stride
            for region in geometry.groups[0].regions
            if region.memory == number
        ]
        size = max(ends, default=1)
        if fill is None:
            pieces.append(
                np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)
            )
        else:
            pieces.append(np.full(size, fill, dtype=np.uint8))
    return pieces


def _window(geometry: Geometry, ids: list[int]) -> Window:
    return Window(
        first=0,
        group=0,
        hashes=tuple(bytes([number]) for number in ids),
        block_ids=tuple(ids),
        object_bytes=geometry.groups[0].object_bytes,
    )


ids = st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1)
both = pytest.mark.parametrize("kind", [HostDevice, CudaDevice])


def _device(kind: type[Any], geometry: Geometry, memory: Memories) -> Device:
    """A device on ``memory``: the code for CUDA moves bytes of the host as well."""
    if kind is CudaDevice:
        return CudaDevice(geometry, [torch.from_numpy(piece) for piece in memory])
    return HostDevice(geometry, memory)


@both
@settings(max_examples=200, deadline=None)
@given(geometry=geometries(), numbers=ids)
def test_gathering_takes_the_planned_bytes_in_their_order(
    kind: type[Any], geometry: Geometry, numbers: list[int]
) -> None:
    memory = _memories(geometry, None)
    device = _device(kind, geometry, memory)
    window = _window(geometry, numbers)
    staged = device.allocate(window.num_bytes).reshape(len(window), -1)
    device.gather(window, staged, None)
    for move in moves(window, geometry):
        part = staged[move.object, move.object_offset :][: move.size]
        taken = memory[move.memory][move.address :][: move.size]
        assert part.tobytes() == taken.tobytes()


@both
@settings(max_examples=200, deadline=None)
@given(geometry=geometries(), numbers=ids)
def test_scattering_writes_the_planned_bytes_and_not_one_beside_them(
    kind: type[Any], geometry: Geometry, numbers: list[int]
) -> None:
    memory, reference = _memories(geometry, 0xA5), _memories(geometry, 0xA5)
    device = _device(kind, geometry, memory)
    window = _window(geometry, numbers)
    objects = np.random.default_rng(7).integers(
        0, 255, (len(window), window.object_bytes), dtype=np.uint8
    )
    device.scatter(window, objects, None, None)
    for move in moves(window, geometry):
        part = objects[move.object, move.object_offset :][: move.size]
        reference[move.memory][move.address : move.address + move.size] = part
    for piece, wanted in zip(memory, reference, strict=True):
        assert piece.tobytes() == wanted.tobytes()


@settings(max_examples=200, deadline=None)
@given(geometries(), ids)
def test_the_runs_of_a_block_are_its_bytes_in_the_order_of_an_object(
    geometry: Geometry, numbers: list[int]
) -> None:
    """What a store is told of addresses is what the copies move."""
    memory = _memories(geometry, None)
    device = HostDevice(geometry, memory)
    assert isinstance(device, ReachableMemory)
    window = _window(geometry, numbers)
    for block in device.blocks(window):
        whole = bytearray(block.nbytes)
        copy_out(block, memoryview(whole))
        assert sum(size for _, size in block.runs) == block.nbytes
        assert b"".join(_at(memory, *run) for run in block.runs) == bytes(whole)


def _at(memory: Memories, address: int, size: int) -> bytes:
    """The bytes at an address, which lies in one of the pieces."""
    for piece in memory:
        start = address - piece.ctypes.data
        if start >= 0 and start + size <= piece.nbytes:
            return piece[start : start + size].tobytes()
    raise AssertionError("a run that lies in no piece of memory")


def test_packed_regions_are_one_run_and_even_layers_one_copy() -> None:
    """What vLLM's layouts come to: few calls, whatever the number of layers."""
    packed = Geometry(
        num_blocks=BLOCKS,
        hash_unit=1,
        groups=(
            Group(
                block_size=1,
                regions=tuple(
                    Region(
                        name=str(n), memory=0, offset=n * 1024, stride=8192, size=1024
                    )
                    for n in range(8)
                ),
            ),
        ),
    )
    device = HostDevice(packed, [np.zeros(8192 * BLOCKS, dtype=np.uint8)])
    (block,) = device.blocks(_window(packed, [3]))
    assert len(block.runs) == 1
    assert device.run_bytes == 8192
    assert [series.count for series in _even(apart=False).groups[0].series] == [8]
    assert [series.count for series in _even(apart=True).groups[0].series] == [1] * 8


def _even(*, apart: bool) -> Geometry:
    """Eight layers one after the other, in one piece of memory or in eight."""
    return Geometry(
        num_blocks=BLOCKS,
        hash_unit=1,
        groups=(
            Group(
                block_size=1,
                regions=tuple(
                    Region(
                        name=str(n),
                        memory=n if apart else 0,
                        offset=0 if apart else n * 4096 * BLOCKS,
                        stride=4096,
                        size=4096,
                    )
                    for n in range(8)
                ),
            ),
        ),
    )


def test_a_buffer_between_two_layers_is_no_part_of_them() -> None:
    """Layers at even distances with staging between them: copied, not confused."""
    apart = 1 << 20
    whole = np.zeros(8 * apart, dtype=np.uint8)
    layers = [whole[n * apart :][: 4096 * BLOCKS] for n in range(8)]
    for n, layer in enumerate(layers):
        layer[:] = n + 1
    geometry = _even(apart=True)
    device = HostDevice(geometry, layers)
    window = _window(geometry, [2])
    staged = whole[apart - 8 * 4096 : apart].reshape(1, -1)
    device.gather(window, staged, None)
    assert staged.reshape(8, -1)[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    staged[:] = 9
    device.scatter(window, staged, None, None)
    assert [int(layer[2 * 4096]) for layer in layers] == [9] * 8
    assert [int(layer[3 * 4096]) for layer in layers] == [1, 2, 3, 4, 5, 6, 7, 8]
