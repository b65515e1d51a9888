"""akv in a plain asyncio program: the host knows nothing of anyio."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import akv
from harness import OBJECT, Memory, load_spec, lookup_spec, prompt, save_spec

HASHES = prompt(1, 4)
CONFIG = akv.Config(
    store="memory:", max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT
)


@pytest.mark.asyncio
async def test_it_works_in_a_plain_asyncio_host() -> None:
    """No anyio in the host at all."""
    memory = Memory()
    async with akv.open_session(CONFIG, memory.geometry, memory.device) as session:
        memory.write(0, HASHES[0])
        outcome = await session.save(save_spec(HASHES[:1], (0,)))
        assert outcome.stored == 1
        loaded = await session.load(load_spec(HASHES[:1], (5,)))
        assert loaded.landed
    assert np.array_equal(memory.block(0), memory.block(5))


@pytest.mark.asyncio
async def test_lookups_can_be_gathered_and_cancelled_like_any_task() -> None:
    """asyncio's own gather and cancel, nothing else."""
    memory = Memory()
    async with akv.open_session(CONFIG, memory.geometry, memory.device) as session:
        tasks = [
            asyncio.create_task(session.lookup(lookup_spec(prompt(n, 4))))
            for n in range(20)
        ]
        tasks[3].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[3], asyncio.CancelledError)
        assert [r for n, r in enumerate(results) if n != 3] == [0] * 19
