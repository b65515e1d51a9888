"""What only a GPU can show: bytes across the bus, and order against the engine.

Skipped where there is none; runs as it is where there is one.
"""

from __future__ import annotations

import pytest
import torch

from akv.core.geometry import Geometry, Group, Region
from akv.core.plan import Window
from akv.device.cuda import CudaDevice

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device in this machine"
)

PAGE = 4096
BLOCKS = 64
LAYERS = 4


def setup() -> tuple[CudaDevice, list[torch.Tensor], Window]:
    """A KV cache of a few layers on the device, and a window of 32 blocks."""
    memory = [
        torch.randint(0, 255, (BLOCKS * PAGE,), dtype=torch.uint8, device="cuda")
        for _ in range(LAYERS)
    ]
    regions = tuple(
        Region(name=f"layer {n}", memory=n, offset=0, stride=PAGE, size=PAGE)
        for n in range(LAYERS)
    )
    geometry = Geometry(
        num_blocks=BLOCKS,
        hash_unit=16,
        groups=(Group(block_size=16, regions=regions),),
    )
    ids = tuple(range(0, BLOCKS, 2))
    window = Window(
        first=0,
        group=0,
        hashes=tuple(bytes([n]) for n in ids),
        block_ids=ids,
        object_bytes=LAYERS * PAGE,
    )
    return CudaDevice(geometry, memory), memory, window


def test_what_was_gathered_is_scattered_byte_for_byte() -> None:
    """Out, wiped, and in again; the other blocks are not touched."""
    device, memory, window = setup()
    before = [flat.clone() for flat in memory]
    staged = device.allocate(len(window) * LAYERS * PAGE).reshape(len(window), -1)
    device.gather(window, staged, device.mark())
    for flat in memory:
        for block in window.block_ids:
            flat[block * PAGE : (block + 1) * PAGE] = 0
    device.scatter(window, staged, None, device.mark())
    torch.cuda.synchronize()
    for flat, old in zip(memory, before, strict=True):
        assert torch.equal(flat, old)


def test_a_save_waits_for_the_forward_that_writes_its_blocks() -> None:
    """A long kernel first, then the bytes: what is saved are the new ones."""
    device, memory, window = setup()
    staged = device.allocate(len(window) * LAYERS * PAGE).reshape(len(window), -1)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    for flat in memory:
        flat.fill_(7)
    device.gather(window, staged, device.mark())
    assert (staged == 7).all()


def test_a_load_waits_for_the_engine_to_zero_its_blocks() -> None:
    """The engine's stream zeroes late; what was loaded is there in the end."""
    device, memory, window = setup()
    staged = device.allocate(len(window) * LAYERS * PAGE).reshape(len(window), -1)
    staged[...] = 9
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    for flat in memory:
        flat.zero_()
    device.scatter(window, staged, None, device.mark())
    torch.cuda.synchronize()
    for flat in memory:
        pages = flat.view(BLOCKS, PAGE)
        assert (pages[list(window.block_ids)] == 9).all()
