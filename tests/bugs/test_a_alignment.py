"""A of the bug log: hits that end in a block, cover the prompt, or are shorter.

A1 and A3 are the seed of akv: nothing is promised but whole blocks that end before
the last token, and what is not promised leaves no state and costs no call.
"""

from __future__ import annotations

import pytest
from bugs.rig import CountingStore, Rig, Watch, serve, until_answered

from akv.core.events import LoadDeclined, LoadPromised
from engine.shapes import INLINE_SHAPES, Shape

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)


@every_shape
def test_a_full_hit_behind_a_local_hit_loads_whole_blocks_before_the_last_token(
    rig: Rig, shape: Shape
) -> None:
    """A1 (the seed): 48 tokens stored, 16 local: 16 to load, 16..32, one key."""
    rig.through(CountingStore)
    rig.seed(range(48))
    with rig.engine(**shape.options) as engine:
        serve(engine, range(17), "local", max_tokens=1)
        watch = Watch(engine)
        gets_before = len(rig.worker(CountingStore).keys("get_into"))
        assert serve(engine, range(48), "full") == 16
        assert engine.monitor.answers["full"][-1] == (16, True)
        (spec,) = watch.loads
        assert (spec.local, spec.usable, len(spec)) == (16, 32, 1)
        assert len(rig.worker(CountingStore).keys("get_into")) == gets_before + 1
        # The last block is computed, not loaded.
        assert watch.scheduled["full"][0] == 16


@every_shape
def test_a_full_hit_behind_a_full_local_hit_leaves_nothing_to_load(
    rig: Rig, shape: Shape
) -> None:
    """A1 (b, the seed): 48 stored, 32 local: 0, no LoadSpec, no call, never 15."""
    rig.through(CountingStore)
    rig.seed(range(48))
    with rig.engine(**shape.options) as engine:
        serve(engine, range(33), "local", max_tokens=1)
        watch = Watch(engine)
        asked = len(rig.scheduler(CountingStore).calls)
        got = len(rig.worker(CountingStore).keys("get_into"))
        assert serve(engine, range(48), "full") == 0
        assert set(engine.monitor.answers["full"]) == {(0, False)}
        assert watch.loads == []
        assert len(rig.scheduler(CountingStore).calls) == asked
        assert len(rig.worker(CountingStore).keys("get_into")) == got
        # Of three blocks two are local and the third was never asked for.
        assert watch.scheduled["full"][0] == 16


@every_shape
def test_a_full_hit_without_a_local_hit_stops_before_the_last_block(
    rig: Rig, shape: Shape
) -> None:
    """A1 (a): 48 stored, none local: lookup 32, two keys, the rest computed."""
    rig.through(CountingStore)
    rig.seed(range(48))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        assert serve(engine, range(48), "full") == 32
        (spec,) = watch.loads
        assert (spec.local, spec.usable) == (0, 32)
        assert len(rig.worker(CountingStore).keys("get_into")) == 2
        assert watch.scheduled["full"][0] == 16


@every_shape
@pytest.mark.parametrize("length", [15, 16])
def test_a_prompt_of_at_most_one_block_is_never_looked_up(
    rig: Rig, shape: Shape, length: int
) -> None:
    """A3 (the seed): the whole prompt is one stored block: (0, False), no state."""
    rig.through(CountingStore)
    rig.seed(range(16))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        assert serve(engine, range(length), "one block") == 0
        assert set(engine.monitor.answers["one block"]) == {(0, False)}
        assert watch.loads == []
        assert rig.scheduler(CountingStore).calls == []
        assert rig.worker(CountingStore).keys("get_into") == []


@every_shape
def test_asking_again_while_no_block_can_be_had_leaves_no_hole_in_what_is_saved(
    rig: Rig, shape: Shape
) -> None:
    """A7: asked at every step until there is room; then 32..96 is saved whole."""
    rig.seed(range(32))
    rig.through(CountingStore)
    with rig.engine(
        {"max_pinned_fraction": 1}, num_blocks=9, **shape.options
    ) as engine:
        engine.add_request(range(500, 600), 25, "in the way")
        engine.run_steps(4)
        engine.add_request(range(96), 3, "waiting")
        until_answered(engine, "waiting")
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        answers = [a for a in engine.monitor.answers["waiting"] if a[0] is not None]
        assert len(answers) >= 3
        assert set(answers) == {(32, True)}
    with rig.engine() as engine:
        assert serve(engine, range(97), "after") == 96


def test_a_local_hit_longer_than_the_external_one_promises_nothing(rig: Rig) -> None:
    """A8: 64 in the store, 80 local: (0, False), and the numbers say so."""
    rig.seed(range(64))
    rig.through(CountingStore)
    with rig.engine() as engine:
        # Block 4 was computed and saved here; the store loses it again.
        serve(engine, range(81), "local", max_tokens=1)
        rig.store.remove(rig.worker(CountingStore).keys("put_from"))
        events: list[object] = []
        engine.scheduler.get_kv_connector()._s._observer = _Keeping(events)
        watch = Watch(engine)
        assert serve(engine, range(113), "longer") == 0
        assert set(engine.monitor.answers["longer"]) <= {(None, False), (0, False)}
        assert watch.loads == []
        assert engine.prefill_stats["longer"].num_local_cached_tokens == 80
        assert engine.prefill_stats["longer"].num_external_cached_tokens == 0
    (declined,) = (e for e in events if isinstance(e, LoadDeclined))
    assert (declined.local, declined.hit) == (80, 80)
    assert not any(isinstance(e, LoadPromised) for e in events)


class _Keeping:
    def __init__(self, events: list[object]) -> None:
        self._events = events

    def on(self, event: object) -> None:
        self._events.append(event)
