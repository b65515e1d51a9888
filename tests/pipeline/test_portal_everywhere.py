"""A load cancelled, or its portal closed, at every await: reported exactly once."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from pipeline.scenes import OTHERS, fill
from pipeline.seams import Steps

import akv
from akv.portal import CancelLoad, Ended, LoadEnded, Portal, PostLoad
from akv.session import Session
from akv.store import MemoryStore
from akv.testing import GatedStore
from harness import OBJECT, Memory, load_spec, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.seams import Place

HASHES = prompt(1, 8)
CONFIG = akv.Config(
    store="memory:", max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT
)


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_a_load_is_reported_once_wherever_it_is_ended(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are another request's as soon as the report is there."""
    plain = Session.load
    acts: list[Callable[[int], None]] = []

    async def load(self: Session, spec: akv.LoadSpec, *, mark: Any = None) -> Any:
        if spec.load_id != 1:
            return await plain(self, spec, mark=mark)
        seen = 0

        def at(places: list[Place]) -> None:
            nonlocal seen
            acts[-1](seen)
            seen += 1

        return await Steps(plain(self, spec, mark=mark), at)

    monkeypatch.setattr(Session, "load", load)
    number = 0
    reached = True
    while reached:
        reached = False
        memory = Memory()
        inner = MemoryStore(slot_bytes=OBJECT)
        fill(inner, HASHES)
        store = GatedStore(inner, gated=())
        portal = Portal.start(CONFIG, memory.geometry, memory.device, store=store)
        closing = threading.Event()

        def act(step: int, here: int = number) -> None:
            nonlocal reached
            if step != here:
                return
            reached = True
            if way == "cancel":
                portal.post([CancelLoad(1)])  # noqa: B023
            else:
                closing.set()  # noqa: B023

        acts.append(act)
        portal.post(
            [
                PostLoad(load_spec(HASHES, range(8), load_id=1)),
                PostLoad(load_spec(HASHES, range(8, 16), load_id=2)),
            ]
        )
        ended: list[Ended] = []
        deadline = time.monotonic() + 10
        while len(ended) < 2 and time.monotonic() < deadline:
            if closing.is_set():
                assert portal.close()
            for one in portal.drain():
                ended.append(one)
                assert isinstance(one, LoadEnded)
                if one.spec.load_id == 1 and one.failed_blocks:
                    for block in range(8):
                        memory.write(block, OTHERS)
        assert portal.close()
        assert portal.drain() == []
        reports = {e.spec.load_id: e for e in ended if isinstance(e, LoadEnded)}
        assert sorted(reports) == [1, 2]
        assert len(ended) == 2
        if reports[1].failed_blocks:
            assert all(memory.holds(block, OTHERS) for block in range(8))
        else:
            assert all(memory.holds(n, HASHES[n]) for n in range(8))
        if way == "cancel":
            assert reports[2].failed_blocks == ()
        if not reports[2].failed_blocks:
            assert all(memory.holds(8 + n, HASHES[n]) for n in range(8))
        assert all(memory.untouched(block) for block in range(16, 32))
        number += 1
    assert number > 3
