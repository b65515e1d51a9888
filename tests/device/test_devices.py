"""Both devices move the same bytes; what needs a GPU is in ``tests/gpu``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from akv.core.geometry import Geometry, Group, Region
from akv.core.plan import Window
from akv.device.cuda import CudaDevice
from akv.device.host import HostDevice

if TYPE_CHECKING:
    from akv.device.base import Device

BLOCKS = 8
SIZES = (24, 7, 64)


def geometry() -> Geometry:
    """Three regions of two memories, one of them of an odd size, with padding."""
    return Geometry(
        num_blocks=BLOCKS,
        hash_unit=16,
        groups=(
            Group(
                block_size=16,
                regions=(
                    Region(name="a", memory=0, offset=8, stride=32, size=SIZES[0]),
                    Region(name="b", memory=1, offset=3, stride=11, size=SIZES[1]),
                    Region(name="c", memory=0, offset=512, stride=64, size=SIZES[2]),
                ),
            ),
        ),
    )


def device(kind: str, memory: list[torch.Tensor]) -> Device:
    """One of the two, over the same memory."""
    if kind == "host":
        return HostDevice(geometry(), [flat.numpy() for flat in memory])
    return CudaDevice(geometry(), memory)


@pytest.mark.parametrize("rows", [None, [0, 2]])
@pytest.mark.parametrize("kind", ["host", "cuda code on the host"])
def test_gather_and_scatter_move_the_same_bytes(
    kind: str, rows: list[int] | None
) -> None:
    """Block by block, and not a byte beside them."""
    source = [torch.randint(0, 255, (1024,), dtype=torch.uint8) for _ in range(2)]
    target = [torch.zeros(1024, dtype=torch.uint8) for _ in range(2)]
    window = Window(
        first=0,
        group=0,
        hashes=(b"a", b"b", b"c"),
        block_ids=(5, 0, 7),
        object_bytes=sum(SIZES),
    )
    writer, reader = device(kind, source), device(kind, target)
    staged = writer.allocate(3 * sum(SIZES)).reshape(3, sum(SIZES))
    writer.gather(window, staged, writer.mark())
    chosen = None if rows is None else np.array(rows, dtype=np.intp)
    reader.scatter(window, staged, chosen, reader.mark())
    expected = [torch.zeros(1024, dtype=torch.uint8) for _ in range(2)]
    for row in range(3) if rows is None else rows:
        block = window.block_ids[row]
        for region in geometry().groups[0].regions:
            begin = region.offset + block * region.stride
            expected[region.memory][begin : begin + region.size] = source[
                region.memory
            ][begin : begin + region.size]
    for got, wanted in zip(target, expected, strict=True):
        assert torch.equal(got, wanted)
