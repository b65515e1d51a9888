"""What only a GPU can show: bytes across the bus, and order against the engine.

Skipped where there is none; runs as it is where there is one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from akv.core.geometry import Geometry, Group, Region
from akv.core.plan import Window
from akv.device.cuda import CudaDevice
from akv.device.layout import build_geometry, open_device

if TYPE_CHECKING:
    from collections.abc import Callable

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


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: str(layout.name))
def test_blocks_of_every_layout_come_back_in_their_place(layout: KVCacheLayout) -> None:
    """From one cache into another, other block numbers; all views are compared."""
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    names = [f"layer {n}" for n in range(LAYERS)]
    size = LAYERS * BLOCKS * spec.page_size_bytes
    tensor = KVCacheTensor(
        size=size,
        layers=names,
        offset=0,
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    caches = []
    for _ in range(2):
        raw = torch.randint(-128, 127, (size,), dtype=torch.int8, device="cuda")
        views = create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, None)
        caches.append(dict(zip(names, views, strict=True)))
    windows, devices = [], []
    for layers, ids in zip(caches, ((3, 9, 1, 40), (7, 0, 63, 5)), strict=True):
        geometry, memory = build_geometry(
            layers, num_blocks=BLOCKS, block_size=16, hash_unit=16
        )
        devices.append(open_device(geometry, memory))
        windows.append(
            Window(
                first=0,
                group=0,
                hashes=(b"a", b"b", b"c", b"d"),
                block_ids=ids,
                object_bytes=geometry.slot_bytes,
            )
        )
    staged = devices[0].allocate(windows[0].num_bytes).reshape(4, -1)
    devices[0].gather(windows[0], staged, devices[0].mark())
    devices[1].scatter(windows[1], staged, None, devices[1].mark())
    torch.cuda.synchronize()
    for name in names:
        for source, target in zip(*(w.block_ids for w in windows), strict=True):
            saved = caches[0][name][source].view(torch.uint8)
            assert torch.equal(caches[1][name][target].view(torch.uint8), saved)


def test_the_loop_goes_on_while_a_copy_waits_for_the_engine() -> None:
    """A copy's thread waits in CUDA without the interpreter's lock."""
    device, _, window = setup()
    staged = device.allocate(len(window) * LAYERS * PAGE).reshape(len(window), -1)

    async def main() -> int:
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
        mark, turns = device.mark(), 0
        copy = asyncio.ensure_future(
            asyncio.to_thread(device.gather, window, staged, mark)
        )
        while not copy.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert asyncio.run(main()) > 10


def test_a_copy_has_ended_when_its_thread_is_back() -> None:
    """The fence of an aborted load: what is written afterwards stays."""
    device, memory, window = setup()
    staged = device.allocate(len(window) * LAYERS * PAGE).reshape(len(window), -1)
    staged[...] = 9
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    mark = device.mark()
    copy = threading.Thread(target=device.scatter, args=(window, staged, None, mark))
    copy.start()
    copy.join()
    others = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(others):
        for flat in memory:
            flat.fill_(3)
    torch.cuda.synchronize()
    assert all(bool((flat == 3).all()) for flat in memory)


def test_the_rate_across_the_bus_beside_a_plain_copy() -> None:
    """Printed, never judged: a window out and in, and pinned memory in one piece."""
    page, blocks = 1 << 20, 32
    memory = [
        torch.zeros(blocks * page, dtype=torch.uint8, device="cuda")
        for _ in range(LAYERS)
    ]
    regions = tuple(
        Region(name=f"layer {n}", memory=n, offset=0, stride=page, size=page)
        for n in range(LAYERS)
    )
    groups = (Group(block_size=16, regions=regions),)
    geometry = Geometry(num_blocks=blocks, hash_unit=16, groups=groups)
    device = CudaDevice(geometry, memory)
    ids = tuple(range(0, blocks, 2))
    hashes = tuple(bytes([n]) for n in ids)
    window = Window(
        first=0, group=0, hashes=hashes, block_ids=ids, object_bytes=LAYERS * page
    )
    staged = device.allocate(window.num_bytes).reshape(len(window), -1)
    plain = torch.zeros(window.num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(window.num_bytes, dtype=torch.uint8, device="cuda")

    def load() -> None:
        device.scatter(window, staged, None, device.mark())

    def save() -> None:
        device.gather(window, staged, device.mark())

    works: dict[str, Callable[[], object]] = {
        "plain copy in": partial(there.copy_, plain),
        "load": load,
        "plain copy out": partial(plain.copy_, there),
        "save": save,
    }
    for name, work in works.items():
        work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            work()
            torch.cuda.synchronize()
        rate = 10 * window.num_bytes / (time.perf_counter() - start) / 1e9
        print(f"{name}: {rate:.1f} GB/s")
