"""L of the bug log: a store that is full or slow costs the engine nothing but saves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest
from bugs.rig import CountingStore, Rig, Watch, serve, step_until

from akv.core.shed import Marks
from akv.pipeline.shed import Shedder
from akv.store import Status
from akv.testing.stores import Fault, FaultyStore, GatedStore
from engine.shapes import INLINE_SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.core.keys import BlockKey
    from akv.store import BlockStore

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)


@dataclass
class Clock:
    """A clock that the test puts forward."""

    now: float = 1000.0

    def __call__(self) -> float:
        """What time it is."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which saves are shed; what has no room is not tried again."""
    clock = Clock()
    monkeypatch.setattr(
        "akv.pipeline.save.Shedder",
        partial(Shedder, clock=clock, marks=Marks(retries=())),
    )
    return clock


class FullStore(FaultyStore):
    """Has no room for anything while it is full."""

    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner, self._refuse)
        self.full = True

    def _refuse(self, verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        if verb == "put_from" and self.full:
            return Fault(outcomes=dict.fromkeys(range(len(keys)), Status.NO_ROOM))
        return None


def pinned(side: Callable[[], dict[str, int]]) -> int:
    """Blocks that saves hold."""
    return side()["pinned blocks"]


@every_shape
def test_a_full_store_is_put_to_once_a_pause_and_loads_go_on(
    rig: Rig, clock: Clock, shape: Shape
) -> None:
    """L7: -200 for 60 s: puts and the saves' exists at a probe rate, hits as ever."""
    rig.seed(range(65))
    stores: list[FullStore] = []

    def wrap(inner: BlockStore) -> CountingStore:
        stores.append(FullStore(inner))
        return CountingStore(stores[-1])

    rig.through(wrap)
    with rig.engine(**shape.options) as engine:
        worker, (full, _) = rig.worker(CountingStore), stores
        for number in range(4):
            serve(
                engine, range(1000 * number + 1000, 1000 * number + 1065), f"{number}"
            )
            clock.now += 1
        worker.calls.clear()
        for number in range(60):
            start = 100_000 + 100 * number
            serve(engine, range(start, start + 65), f"full-{number}", max_tokens=1)
            clock.now += 1
            if number % 20 == 0:
                assert engine.reset_prefix_cache()
                assert serve(engine, range(65), f"hit-{number}", max_tokens=1) == 64
        verbs = [verb for verb, _ in worker.calls]
        assert 28 <= verbs.count("put_from") <= 31
        # One small question before each of those puts, and none else.
        assert verbs.count("exists") == verbs.count("put_from")
        assert rig.store.statistics().objects == 4
        full.full = False
        clock.now += 2
        for name in ("try", "all"):
            assert engine.reset_prefix_cache()
            start = 200_000 if name == "try" else 210_000
            serve(engine, range(start, start + 65), name, max_tokens=1)
        assert rig.store.statistics().objects == 12
    rig.plain()
    with rig.engine() as engine:
        assert serve(engine, range(210_000, 210_065), "reader") == 64


@every_shape
def test_puts_that_stand_still_hold_no_more_blocks_than_they_may_and_then_none(
    rig: Rig, clock: Clock, shape: Shape
) -> None:
    """F5, L: steps go on, pins are bounded, soon free, and saves come back alone."""
    rig.through(lambda inner: GatedStore(inner, gated=("put_from",)))
    settings = {"max_save_bytes": "8KiB", "max_pinned_fraction": 0.25}
    with rig.engine(settings, num_blocks=64, **shape.options) as engine:
        watch = Watch(engine)
        side = engine.scheduler.get_kv_connector()._s.debug_state
        most = 0
        for number in range(12):
            start = 1000 * number
            name = f"r-{number}"
            engine.add_request(range(start, start + 65), 1, name)
            step_until(engine, partial(engine.finish_reasons.__contains__, name))
            # Each is computed in the one step that it takes on an idle engine.
            assert watch.scheduled[name] == [65]
            most = max(most, pinned(side))
            assert pinned(side) <= 16
        assert most > 4
        store = rig.worker(GatedStore)
        store.wait_until_held(2)
        clock.now += 3
        # No pins are left for a save that could notice; it is noticed all the same.
        step_until(engine, lambda: not pinned(side), steps=100_000)
        assert store.held == 2
        saved = sum(len(spec) for spec in watch.saves)
        assert saved < 12 * 4
        store.open()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        clock.now += 2
        for name in ("try", "all"):
            assert engine.reset_prefix_cache()
            start = 60_000 if name == "try" else 70_000
            serve(engine, range(start, start + 65), name, max_tokens=1)
        assert engine.reset_prefix_cache()
        assert serve(engine, range(70_000, 70_065), "again", max_tokens=1) == 64
