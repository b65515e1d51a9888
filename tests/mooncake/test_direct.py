"""Mooncake reads and writes the engine's own memory, run by run."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

import akv
from akv.core.keys import make_keys
from akv.core.plan import Window, transfer_windows
from akv.pipeline.route import Route
from akv.store import MooncakeStore, Status
from akv.store.mooncake.windows import MOST_SEGMENTS
from harness import BLOCKS, LAYERS, OBJECT, Memory, load_spec, prompt, save_spec

if TYPE_CHECKING:
    from mooncake_master import Master

HASHES = prompt(3, 12)


def config(master: Master, transfer: str) -> akv.Config:
    """One engine that brings the pool's memory, with the way that is asked for."""
    return akv.Config(
        store=master.url(),
        transfer=transfer,
        max_load_bytes=8 * OBJECT,
        max_save_bytes=8 * OBJECT,
    )


@pytest.mark.anyio
@pytest.mark.parametrize("saving", ["direct", "staged"])
@pytest.mark.parametrize("loading", ["direct", "staged"])
async def test_both_ways_store_the_same_objects(
    master: Master, saving: str, loading: str
) -> None:
    """What went straight is found by way of staging, and the other way round."""
    writer, reader = Memory(), Memory()
    for number, block_hash in enumerate(HASHES):
        writer.write(number, block_hash)
    async with (
        akv.open_session(config(master, saving), writer.geometry, writer.device) as one,
        akv.open_session(
            config(master, loading), reader.geometry, reader.device
        ) as other,
    ):
        outcome = await one.save(save_spec(HASHES, range(12)))
        assert (outcome.stored, outcome.dropped) == (12, 0)
        ids = [31, 0, 7, 30, 2, 9, 11, 12, 13, 25, 1, 3]
        assert (await other.load(load_spec(HASHES, ids))).landed
    for number, block_hash in zip(ids, HASHES, strict=True):
        assert reader.holds(number, block_hash)
    for number in set(range(BLOCKS)) - set(ids):
        assert reader.untouched(number)


def test_auto_keeps_a_store_whose_calls_may_hang_out_of_the_engines_memory(
    master: Master,
) -> None:
    """F3: with an engine of the pool that stands still, a get ends when it goes on."""
    memory = Memory()
    with closing(MooncakeStore.open(master.url(), slot_bytes=OBJECT)) as store:
        for transfer, direct in (("auto", False), ("direct", True)):
            route = Route(
                store,
                memory.device,
                memory.geometry,
                transfer=transfer,
                staged_bytes=OBJECT,
            )
            assert route.is_direct() is direct


def test_memory_that_was_registered_is_not_copied_to_scratch(master: Master) -> None:
    """And memory that was not is, with the same bytes in the end."""
    memory = Memory()
    spec = save_spec(HASHES, range(12))
    (span,) = spec.spans
    for number, block_hash in enumerate(HASHES):
        memory.write(number, block_hash)
    keys = make_keys(spec.space, 0, 0, span.hashes)
    (window,) = transfer_windows(
        spec.spans, memory.geometry, max_bytes=1 << 20, max_objects=64
    )
    blocks = memory.device.blocks(window)
    assert all(len(block.runs) == LAYERS for block in blocks)
    with closing(MooncakeStore.open(master.url(), slot_bytes=OBJECT)) as store:
        for piece in memory.device.memory:
            store.register(piece)
        pieces = store._memory._pieces
        assert store.put_from(keys, blocks) == [Status.STORED] * 12
        assert store._memory._pieces == pieces
        for piece in memory.device.memory:
            store.unregister(piece)
        other = Memory()
        assert store.get_into(keys, other.device.blocks(window)) == [Status.HIT] * 12
        assert store._memory._pieces == pieces + 1
    assert all(other.holds(number, HASHES[number]) for number in range(12))


def test_an_object_of_more_runs_than_a_call_may_have_is_moved_alone(
    master: Master,
) -> None:
    """And more objects than one call's worth of runs are moved in several."""
    layers, size, blocks = MOST_SEGMENTS + 44, 24, 3
    geometry = akv.Geometry(
        num_blocks=blocks,
        hash_unit=16,
        groups=(
            akv.Group(
                block_size=16,
                regions=tuple(
                    akv.Region(
                        name=str(n), memory=0, offset=n * 200, stride=size, size=size
                    )
                    for n in range(layers)
                ),
            ),
        ),
    )
    flat = np.random.default_rng(1).integers(0, 255, layers * 200, dtype=np.uint8)
    device = akv.HostDevice(geometry, [flat])
    window = _window(geometry)
    objects = device.blocks(window)
    assert len(objects[0].runs) == layers
    keys = make_keys(b"s" * 24, 0, 0, window.hashes)
    with closing(
        MooncakeStore.open(master.url(), slot_bytes=geometry.slot_bytes)
    ) as store:
        store.register(flat.data)
        assert store.put_from(keys, objects) == [Status.STORED] * blocks
        before = flat.copy()
        flat[:] = 0
        assert store.get_into(keys, objects) == [Status.HIT] * blocks
    touched = np.zeros_like(flat, dtype=bool)
    for block in objects:
        for address, length in block.runs:
            start = address - flat.ctypes.data
            touched[start : start + length] = True
    assert (flat[touched] == before[touched]).all()
    assert not flat[~touched].any()


def _window(geometry: akv.Geometry) -> Window:
    return Window(
        first=0,
        group=0,
        hashes=tuple(bytes([n]) * 32 for n in range(geometry.num_blocks)),
        block_ids=tuple(range(geometry.num_blocks)),
        object_bytes=geometry.slot_bytes,
    )
