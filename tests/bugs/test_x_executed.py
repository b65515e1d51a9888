"""X of the bug log: what upstream's own code did when it was run with bad input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from bugs.rig import CountingStore, CutStore, Rig, Watch, serve, step_until

import akv
from akv.core.errors import StoreError
from akv.core.plan import transfer_windows
from akv.device.host import HostDevice
from akv.testing.stores import Fault, FaultyStore, GatedStore
from engine.shapes import INLINE_SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey
    from akv.store import BlockStore

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)


@every_shape
@pytest.mark.parametrize("part", ["get", "plan", "copy"])
def test_an_exception_anywhere_in_a_load_reports_it_failed_once(
    rig: Rig, shape: Shape, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: raised while it is prepared, fetched or placed: failed, then computed."""
    rig.seed(range(65))
    raised = 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal raised
        raised += 1
        raise RuntimeError("odd")

    def fail_once(*args: Any, **options: Any) -> Any:
        """The save behind the load is cut by the same function."""
        return transfer_windows(*args, **options) if raised else fail()

    if part == "plan":
        monkeypatch.setattr("akv.pipeline.route.transfer_windows", fail_once)
    elif part == "copy":
        monkeypatch.setattr(HostDevice, "scatter", fail)
    else:

        def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
            return fail() if verb == "get_into" else None

        rig.through(lambda inner: FaultyStore(inner, decide))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        serve(engine, range(65), "r")
        assert raised == 1
        assert engine.monitor.loads["r"] == [64]
        assert engine.monitor.reports["r"] == 1
        assert [len(blocks) for blocks in watch.failed_blocks] == [4]
        serve(engine, range(500, 565), "another")


def test_a_block_table_shorter_than_the_hit_is_refused_where_the_spec_is_made() -> None:
    """X3: no spec can name a hash without a block, so no worker ever meets one."""
    with pytest.raises(akv.PlanError, match="3 hashes for 2 blocks"):
        akv.Span(first_block=0, hashes=(b"a", b"b", b"c"), block_ids=(1, 2))


@every_shape
def test_a_lookup_that_raises_is_a_miss_and_the_next_one_works(
    rig: Rig, shape: Shape
) -> None:
    """X5: the thread that answers lookups lives on."""
    rig.seed(range(65))
    faults = [Fault(error=StoreError("gone")), Fault(error=ValueError("odd"))]

    def wrap(inner: BlockStore) -> FaultyStore:
        scheduler = len(rig.opened) % 2 == 1

        def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
            return faults.pop() if scheduler and verb == "exists" and faults else None

        return FaultyStore(inner, decide)

    rig.through(wrap)
    with rig.engine(**shape.options) as engine:
        for number in range(2):
            assert serve(engine, range(65), f"unlucky-{number}") == 0
            assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "lucky") == 64


@every_shape
@pytest.mark.parametrize("kept", [0, 17, 2047])
def test_a_short_object_is_a_failed_load_and_never_a_hit(
    rig: Rig, shape: Shape, kept: int
) -> None:
    """X6, K7: 0, 17 or all but one byte of an object: computed, not served."""
    rig.through(lambda inner: CutStore(inner, kept))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        serve(engine, range(65), "cold")
        assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "warm") == 64
        assert [len(blocks) for blocks in watch.failed_blocks] == [4]
        assert watch.scheduled["warm"][0] == 65


@every_shape
def test_a_waiting_request_is_looked_up_once_however_often_it_is_asked_for(
    rig: Rig, shape: Shape
) -> None:
    """X8, A7, N1: asked at fifty steps while the store thinks: one call."""
    rig.seed(range(65))
    rig.through(lambda inner: GatedStore(inner, gated=("exists",)))
    with rig.engine(**shape.options) as engine:
        engine.add_request(range(65), 3, "r")
        step_until(engine, lambda: len(engine.monitor.answers.get("r", ())) >= 50)
        scheduler = rig.scheduler(GatedStore)
        assert set(engine.monitor.answers["r"]) == {(None, False)}
        assert [verb for verb, _ in scheduler.calls] == ["exists"]
        for store in rig.opened:
            assert isinstance(store, GatedStore)
            store.open()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_clean()
        assert engine.external_tokens("r") == 64
        assert len(scheduler.calls) == 1


@every_shape
def test_only_blocks_beyond_the_local_hit_are_looked_up(rig: Rig, shape: Shape) -> None:
    """N5: of 40 blocks 30 are local: the store is asked for the rest alone."""
    rig.through(CountingStore)
    with rig.engine(**shape.options) as engine:
        serve(engine, range(481), "local", max_tokens=1)
        asked = len(rig.scheduler(CountingStore).keys("exists"))
        serve(engine, range(641), "longer", max_tokens=1)
        assert len(rig.scheduler(CountingStore).keys("exists")) == asked + 10


@every_shape
def test_hooks_of_a_step_do_not_wait_for_a_store_that_hangs(
    rig: Rig, shape: Shape
) -> None:
    """N1, N7: no hook takes as long as the shortest deadline there is."""
    rig.through(lambda inner: GatedStore(inner, gated=("exists", "put_from")))
    settings = {"lookup_deadline": 0.5, "save_deadline": 0.5}
    with rig.engine(settings, num_blocks=256, **shape.options) as engine:
        for number in range(50):
            engine.add_request(range(100 * number, 100 * number + 40), 2)
        engine.run()
        times = engine.hook_times
        for store in rig.opened:
            assert isinstance(store, GatedStore)
            store.open()
        engine.idle_until_quiet()
        engine.assert_outputs()
    for role in times.values():
        for hook, seconds in role.items():
            # The median, as a machine that is shared stops for a while at times.
            if seconds:
                assert sorted(seconds)[len(seconds) // 2] < 0.01, hook


@every_shape
def test_a_request_that_may_not_read_the_cache_is_not_looked_up(
    rig: Rig, shape: Shape
) -> None:
    """O3: skip_reading_prefix_cache: no call, nothing counted; it is saved though."""
    rig.through(CountingStore)
    with rig.engine(**shape.options) as engine:
        engine.add_request(range(65), 3, "r", skip_reading_prefix_cache=True)
        engine.run()
        engine.idle_until_quiet()
        engine.assert_clean()
        assert rig.scheduler(CountingStore).calls == []
        stats = engine.scheduler.get_kv_connector().get_kv_connector_stats()
        counted = {} if stats is None else stats.data
        assert not [name for name in counted if "lookup" in name]
        assert rig.store.statistics().objects == 4
