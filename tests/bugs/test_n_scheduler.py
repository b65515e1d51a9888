"""N of the bug log: many requests, one cold prefix; and whether a load is worth it.

One of them loads, the others wait for that load and find its blocks in the engine's own
prefix cache. Whoever leads may leave or fail at any moment.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from bugs.rig import CountingStore, Rig, Watch, serve, step_until

from akv.core.events import LoadDeclined, LoadJoined, LoadPromised
from akv.core.worth import Experience
from akv.store.base import Failure
from akv.testing.stores import Fault, FaultyStore, GatedStore
from akv.vllm.pace import Pace
from engine.shapes import INLINE_SHAPES, Shape
from harness import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey
    from engine.engine import Engine

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)

LONG = range(1601)
"""A hundred blocks, and a token."""

ROOM: dict[str, Any] = {"num_blocks": 320, "max_model_len": 2048}


def seed_long(rig: Rig) -> None:
    """Save ``LONG``."""
    with rig.engine({"max_pinned_fraction": 1}, **ROOM) as engine:
        serve(engine, LONG, "seed", max_tokens=1)


def recorded(engine: Engine) -> Recorder:
    """What the scheduler's side decides from now on."""
    recorder = Recorder([])
    engine.scheduler.get_kv_connector()._s._observer = recorder
    return recorder


def finish(engine: Engine) -> None:
    """Run everything to its end, and look whether all is well."""
    engine.run()
    engine.idle_until_quiet()
    engine.assert_outputs()
    engine.assert_clean()


def has_waited(engine: Engine, name: str) -> bool:
    """Whether a request waits, or has waited, for another one's load."""
    tracked = engine.scheduler.get_kv_connector()._s._requests.get(name)
    return tracked is not None and tracked.follower.flight is not None


@every_shape
def test_many_requests_with_one_cold_prefix_fetch_and_probe_each_object_once(
    rig: Rig, shape: Shape
) -> None:
    """N3: 8 requests, the same 100 cold blocks: 100 gets, 8 requests served."""
    seed_long(rig)
    rig.through(CountingStore)
    with rig.engine(**ROOM, **shape.options) as engine:
        recorder = recorded(engine)
        names = [engine.add_request([*LONG, n], 3, f"r{n}") for n in range(8)]
        finish(engine)
        got = rig.worker(CountingStore).keys("get_into")
        asked = rig.scheduler(CountingStore).keys("exists")
        assert engine.monitor.loads == {"r0": [1600]}
        for name in names[1:]:
            assert engine.prefill_stats[name].num_local_cached_tokens == 1600
    assert len(got) == len(set(got)) == 100
    assert len(asked) == len(set(asked)) == 100
    joined = [e for e in recorder.events if isinstance(e, LoadJoined)]
    assert [e.request_id for e in joined] == names[1:]
    assert {(e.leader, e.local, e.usable) for e in joined} == {("r0", 0, 1600)}
    (promised,) = (e for e in recorder.events if isinstance(e, LoadPromised))
    assert (promised.request_id, promised.queued_bytes) == ("r0", 0)
    reasons = {e.reason for e in recorder.events if isinstance(e, LoadDeclined)}
    assert reasons == {"the load of r0 brought it"}


@every_shape
def test_who_wants_more_loads_the_rest_itself(rig: Rig, shape: Shape) -> None:
    """N3: the shared beginning comes by one load, each other object by another."""
    rig.seed(range(65), range(129))
    rig.through(CountingStore)
    with rig.engine(**shape.options) as engine:
        engine.add_request(range(65), 3, "short")
        engine.add_request(range(129), 3, "long")
        finish(engine)
        assert engine.monitor.loads == {"short": [64], "long": [64]}
        assert len(rig.worker(CountingStore).keys("get_into")) == 8


@every_shape
@pytest.mark.parametrize("caching", [True, False])
def test_nobody_waits_for_what_it_does_not_want_or_would_not_get(
    rig: Rig, shape: Shape, *, caching: bool
) -> None:
    """A load of more than is wanted is not waited for; without a cache none is."""
    rig.seed(range(129))
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine(prefix_caching=caching, **shape.options) as engine:
        watch = Watch(engine)
        engine.add_request(range(129), 3, "long")
        engine.add_request(range(65 if caching else 129), 3, "short")
        step_until(engine, lambda: len(watch.loads) == 2)
        assert not has_waited(engine, "short")
        rig.worker(GatedStore).open()
        finish(engine)


@every_shape
@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("during", [False, True])
def test_the_others_finish_whenever_the_leader_leaves(
    rig: Rig, shape: Shape, steps: int, *, during: bool
) -> None:
    """One of them leads then, and the others wait for that one."""
    rig.seed(range(129))
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        names = [engine.add_request([*range(129), n], 3, f"r{n}") for n in range(5)]
        step_until(engine, lambda: watch.loads and has_waited(engine, "r4"))
        store = rig.worker(GatedStore)
        store.wait_until_held()
        if steps > 2:
            # From here on the load may have landed in any of the steps.
            store.open()
        engine.run_steps(steps)
        (engine.abort_during_step if during else engine.abort)("r0")
        engine.run_steps(2)
        store.open()
        finish(engine)
        others = {engine.finish_reasons[name] for name in names[1:]}
        assert others == {"length"}
        assert len(watch.loads) <= 2
        assert all(count == 1 for count in engine.monitor.reports.values())


def _count_is(watch: Watch, count: int) -> bool:
    return len(watch.loads) == count


@every_shape
@pytest.mark.parametrize("leaving", [1, 2, 3])
def test_a_row_of_leaders_that_leave_is_followed_by_one_load_at_a_time(
    rig: Rig, shape: Shape, leaving: int
) -> None:
    """Each time exactly one of those who waited makes its own."""
    rig.seed(range(129))
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        names = [engine.add_request([*range(129), n], 3, f"r{n}") for n in range(5)]
        for number in range(leaving):
            step_until(engine, partial(_count_is, watch, number + 1))
            engine.run_steps(3)
            assert len(watch.loads) == number + 1
            engine.abort(watch.loads[-1].request_id)
        step_until(engine, lambda: len(watch.loads) == leaving + 1)
        rig.worker(GatedStore).open()
        finish(engine)
        assert len(watch.loads) == leaving + 1
        ended = [engine.finish_reasons[name] for name in names]
        assert sorted(ended) == ["abort"] * leaving + ["length"] * (5 - leaving)


@every_shape
def test_a_load_that_fails_is_no_storm_of_others(rig: Rig, shape: Shape) -> None:
    """exist -> 1 always, get -> -800 always: at most two of eight try."""
    seed_long(rig)
    calls = 0

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        nonlocal calls
        if verb != "get_into":
            return None
        calls += 1
        failed = dict.fromkeys(range(len(keys)), Failure("transfer failed", -800))
        return Fault(outcomes=failed)

    rig.through(lambda inner: FaultyStore(inner, decide))
    # Small chunks, so that the failed leader does not use up each step's tokens and
    # the others are asked about while it computes.
    with rig.engine(long_prefill_token_threshold=32, **ROOM, **shape.options) as engine:
        for n in range(8):
            engine.add_request([*LONG, n], 3, f"r{n}")
        finish(engine)
        loads = sum(len(loads) for loads in engine.monitor.loads.values())
    assert 1 <= loads <= 2
    assert calls == loads


@every_shape
def test_nobody_waits_longer_than_the_load_deadline(rig: Rig, shape: Shape) -> None:
    """The leader's get hangs: it fails by its deadline, and the others compute."""
    rig.seed(range(129))
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine({"load_deadline": 0.2}, **shape.options) as engine:
        for n in range(5):
            engine.add_request([*range(129), n], 3, f"r{n}")
        engine.run(timeout=5.0)
        rig.worker(GatedStore).open()
        finish(engine)


@every_shape
def test_a_reset_lets_nobody_wait_for_a_load_of_before(rig: Rig, shape: Shape) -> None:
    """What such a load brings is of the old weights."""
    rig.seed(range(129))
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        engine.add_request(range(129), 3, "leader")
        engine.add_request([*range(129), 7], 3, "follower")
        step_until(engine, lambda: watch.loads and has_waited(engine, "follower"))
        engine.scheduler.get_kv_connector().reset_cache()
        step_until(engine, lambda: engine.outputs["follower"])
        assert not engine.outputs["leader"]
        rig.worker(GatedStore).open()
        finish(engine)


@every_shape
@pytest.mark.parametrize("load_or_compute", [True, False])
def test_a_load_that_is_not_worth_it_is_declined_with_its_numbers(
    rig: Rig, shape: Shape, *, load_or_compute: bool
) -> None:
    """An engine that computes a billion tokens a second needs no store."""
    prompts = [range(n, n + 65) for n in range(0, 900, 90)]
    rig.seed(*prompts)
    settings = {"load_or_compute": load_or_compute, "prefill_rate": 1e9}
    with rig.engine(settings, **shape.options) as engine:
        recorder = recorded(engine)
        loaded = [serve(engine, p, f"r{p.start}") for p in prompts]
    promised = [e for e in recorder.events if isinstance(e, LoadPromised)]
    if not load_or_compute:
        assert loaded == [64] * 10
        assert {e.land_seconds for e in promised} == {None}
        return
    assert loaded == [64] * 8 + [0] * 2
    assert [e.compute_seconds for e in promised] == [64 / 1e9] * 8
    declined = [e for e in recorder.events if isinstance(e, LoadDeclined)]
    assert len(declined) == 2
    for event in declined:
        assert event.land_seconds is not None
        assert event.land_seconds > (event.compute_seconds or 0) > 0
        assert event.bytes == promised[0].bytes == 4 * 2048
        assert event.reason.startswith("not worth loading: it would land after")


@every_shape
def test_what_is_worth_it_is_loaded_with_its_numbers(rig: Rig, shape: Shape) -> None:
    """An engine that computes ten tokens a second needs one."""
    prompts = [range(n, n + 65) for n in range(0, 900, 90)]
    rig.seed(*prompts)
    with rig.engine({"prefill_rate": 10}, **shape.options) as engine:
        recorder = recorded(engine)
        assert [serve(engine, p, f"r{p.start}") for p in prompts] == [64] * 10
    promised = [e for e in recorder.events if isinstance(e, LoadPromised)]
    assert [e.compute_seconds for e in promised] == [6.4] * 10
    assert [e.land_seconds is None for e in promised] == [True] * 8 + [False] * 2


class _Asked:
    """As much of a vLLM request as counts here."""

    def __init__(self, prompt: int, computed: int = 0) -> None:
        self.num_prompt_tokens = prompt
        self.num_computed_tokens = computed


class _Steps:
    """A pace, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.experience = Experience(block_bytes=1, block_tokens=16, deadline=5.0)
        self.pace = Pace(self.experience, clock=lambda: self.now)

    def begin(self, *scheduled: tuple[_Asked, int]) -> None:
        self.pace.step_began(scheduled)

    def end(self, seconds: float) -> None:
        self.now += seconds
        self.pace.step_ended()


def test_idle_time_and_steps_without_prompts_are_not_the_price_of_a_prompt() -> None:
    """1,000 tokens in 0.2 s, whatever lies between two such steps."""
    steps = _Steps()
    for _ in range(10):
        steps.begin((_Asked(1000), 1000), (_Asked(500, 500), 4))
        steps.end(0.2)
        steps.now += 5.0  # nobody asks for anything
        steps.begin()
        steps.end(3.0)  # decodes only, or waits for a load
    assert steps.experience.prefill_rate == pytest.approx(5000)


def test_a_step_that_was_scheduled_early_counts_from_the_end_of_the_one_before() -> (
    None
):
    """Asynchronous scheduling: two steps are under way, each takes 0.2 s."""
    steps = _Steps()
    steps.begin((_Asked(9000), 1000))
    for number in range(1, 10):
        steps.begin((_Asked(9000, 1000 * number), 1000))
        steps.end(0.2)
    assert steps.experience.prefill_rate == pytest.approx(5000)


def test_what_the_engine_has_begun_is_before_what_comes() -> None:
    """Tokens of prompts that are left after the step, generated ones not."""
    steps = _Steps()
    steps.begin((_Asked(9000, 1000), 2000), (_Asked(300, 100), 200), (_Asked(5, 7), 3))
    assert steps.pace.tokens_ahead == 6000
    steps.begin()
    assert steps.pace.tokens_ahead == 0
