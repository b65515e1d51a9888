"""F of the bug log: no call that hangs, and no pool that is full, stops the engine."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from bugs.rig import OBJECT, CountingStore, Rig, Watch, serve, step_until

import akv
from akv.core.spec import LoadSpec
from akv.portal import Answer, LoadEnded, Portal, PostLoad, PostLookup, PostSave
from akv.store import MemoryStore
from akv.testing.stores import GatedStore, WrappedStore
from engine.shapes import INLINE_SHAPES, Shape
from harness import Memory, lookup_spec, prompt, save_spec

if TYPE_CHECKING:
    from akv.store.base import BlockStore, Outcome

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)


def test_a_load_of_nothing_is_reported_at_once_with_nothing_failed() -> None:
    """F1, X1: a spec whose every block is masked out ends without a call."""
    store = CountingStore(MemoryStore())
    memory = Memory()
    portal = Portal.start(
        akv.Config(max_load_bytes=8 << 10, max_save_bytes=8 << 10),
        memory.geometry,
        memory.device,
        store=store,
    )
    try:
        for load_id, spans in enumerate(
            ((), (akv.Span(first_block=2, hashes=(), block_ids=()),))
        ):
            spec = LoadSpec(
                request_id="r",
                space=b"s",
                load_id=load_id,
                local=32,
                usable=32,
                spans=spans,
            )
            portal.post([PostLoad(spec)])
            portal.call(lambda session: session.flush(), timeout=5)
            (ended,) = portal.drain()
            assert isinstance(ended, LoadEnded)
            assert (ended.failed_blocks, ended.reason) == ((), "")
        assert store.calls == []
    finally:
        assert portal.close()


@pytest.mark.parametrize("shape", INLINE_SHAPES[::3], ids=str)
def test_a_get_that_never_returns_costs_its_request_the_deadline_and_others_nothing(
    rig: Rig, shape: Shape
) -> None:
    """F3, P4, X7: one get hangs; ten others land, the one is computed."""
    prompts = [range(1000 * n, 1000 * n + 65) for n in range(11)]
    rig.seed(*prompts)
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine({"load_deadline": 2}, **shape.options) as engine:
        watch = Watch(engine)
        engine.add_request(prompts[0], 3, "unlucky")
        step_until(engine, lambda: watch.loads)
        store = rig.worker(GatedStore)
        store.wait_until_held()
        store._gated = frozenset()
        for number in range(1, 11):
            engine.add_request(prompts[number], 3, f"lucky-{number}")
        lucky = {f"lucky-{number}" for number in range(1, 11)}
        step_until(engine, lambda: lucky <= engine.finish_reasons.keys())
        engine.run()
        assert all(engine.external_tokens(name) == 64 for name in lucky)
        assert all(watch.scheduled[name][0] == 1 for name in lucky)
        assert watch.scheduled["unlucky"][0] == 65
        assert set(engine.monitor.reports.values()) == {1}
        store.open()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()


@every_shape
def test_a_put_that_never_returns_holds_neither_blocks_nor_steps(
    rig: Rig, shape: Shape
) -> None:
    """F5: steps go on, saves are dropped, blocks are free; later it works again."""
    rig.through(lambda inner: GatedStore(inner, gated=("put_from",)))
    settings = {"save_deadline": 0.2, "max_save_bytes": 8 * OBJECT}
    with rig.engine(settings, **shape.options) as engine:
        for number in range(12):
            engine.add_request(range(1000 * number, 1000 * number + 100), 3)
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        # Every block is free though not one put has returned.
        assert engine.num_free_blocks() == engine.num_free_blocks_at_start
        store = rig.worker(GatedStore)
        store.wait_until_held()
        store.open()
        engine.assert_clean()
        # A store that kept puts this long is tried with one window each pause.
        serve(engine, range(60_000, 60_100), "try", max_tokens=1)
        before = store.statistics().objects
        for attempt in range(2000):
            engine.reset_prefix_cache()
            serve(engine, range(50_000, 50_100), f"after {attempt}", max_tokens=1)
            engine.idle_until_quiet()
            if store.statistics().objects >= before + 6:
                break
    rig.plain()
    with rig.engine() as engine:
        assert serve(engine, range(50_000, 50_100), "later") == 96


@every_shape
def test_two_full_hits_that_fill_the_pool_both_end(rig: Rig, shape: Shape) -> None:
    """F6: each is parked as a load, together they are the pool, none has a spare."""
    first, second = range(256), range(1000, 1240)
    rig.seed(first, second)
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine(num_blocks=32, **shape.options) as engine:
        engine.add_request(first, 3, "first")
        engine.add_request(second, 3, "second")
        engine.run_steps(20)
        rig.worker(GatedStore).open()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()


@every_shape
def test_loads_of_prompts_that_go_on_behind_them_do_not_block_each_other(
    rig: Rig, shape: Shape
) -> None:
    """F7: A loads 512 of 1600 tokens, B 736 of 1200, in a pool of 2048."""
    first, second = range(1600), range(10_000, 11_200)
    rig.seed(first[:512], second[:736])
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine(num_blocks=129, max_model_len=2048, **shape.options) as engine:
        engine.add_request(first, 3, "first")
        engine.add_request(second, 3, "second")
        engine.run_steps(20)
        rig.worker(GatedStore).open()
        engine.run(max_steps=5000)
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()


@every_shape
def test_a_load_larger_than_all_of_staging_goes_through_in_windows(
    rig: Rig, shape: Shape
) -> None:
    """F8: staging for 4 blocks, loads of 6, several at once: no spin, no failure."""
    prompts = [range(1000 * n, 1000 * n + 97) for n in range(4)]
    rig.seed(*prompts)
    rig.through(CountingStore)
    with rig.engine({"max_load_bytes": 4 * OBJECT}, **shape.options) as engine:
        watch = Watch(engine)
        for number, tokens in enumerate(prompts):
            engine.add_request(tokens, 3, f"r-{number}")
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert all(engine.external_tokens(f"r-{n}") == 96 for n in range(4))
        assert watch.failed_blocks == []
        gets = [keys for verb, keys in rig.worker(CountingStore).calls if "get" in verb]
        assert sum(len(keys) for keys in gets) == 24
        assert max(len(keys) for keys in gets) <= 4


class _ShortAnswers(WrappedStore):
    """Answers for fewer keys than it was asked for, or for more."""

    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner)
        self.off = 0

    def exists(self, keys: object, *, promise: bool = False) -> list[Outcome]:
        """One outcome too few or too many."""
        outcomes = self.inner.exists(keys, promise=promise)  # type: ignore[arg-type]
        return outcomes[: self.off] if self.off < 0 else outcomes + outcomes[: self.off]


@pytest.mark.parametrize("off", [-1, 1])
def test_an_answer_that_makes_no_sense_ends_one_lookup_and_not_the_loop(
    off: int,
) -> None:
    """F10, X5: the thread lives, the next request works."""
    memory, store = Memory(), _ShortAnswers(MemoryStore())
    hashes = prompt(1, 8)
    portal = Portal.start(
        akv.Config(max_load_bytes=8 << 10, max_save_bytes=8 << 10),
        memory.geometry,
        memory.device,
        store=store,
    )

    def found() -> int | None:
        answer = Answer()
        portal.post([PostLookup(lookup_spec(hashes), answer)])
        while answer.found is None:
            portal.call(lambda session: session.statistics(), timeout=5)
        return answer.found

    try:
        portal.post([PostSave(save_spec(hashes, range(8)), None)])
        while portal.call(lambda s: s.statistics(), timeout=5).saves:
            pass
        assert found() == 8
        store.off = off
        assert found() == 0
        portal.post([PostSave(save_spec(prompt(2, 8), range(8), chain=2), None)])
        portal.call(lambda session: session.flush(), timeout=5)
        assert portal.alive
        store.off = 0
        assert found() == 8
        # Nothing was put on the strength of that answer.
        assert store.statistics().objects == 8
    finally:
        assert portal.close()


@every_shape
def test_the_engine_steps_on_until_the_last_saves_blocks_are_free(
    rig: Rig, shape: Shape
) -> None:
    """F14: the last request has ended, one save holds pins: pushing till it is done."""
    gate = rig.gate_copies_out()
    with rig.engine(**shape.options) as engine:
        connector = engine.scheduler.get_kv_connector()
        assert not connector.has_pending_push_work()
        engine.add_request(range(65), 1, "last")
        engine.run()
        gate.wait_until_held()
        engine.run_steps(20)
        assert engine.unfinished() == []
        assert connector.has_pending_push_work()
        assert engine.has_work()
        assert engine.num_free_blocks() == engine.num_free_blocks_at_start - 4
        gate.open()
        engine.idle_until_quiet()
        assert not connector.has_pending_push_work()
        assert engine.num_free_blocks() == engine.num_free_blocks_at_start
        engine.assert_clean()


@pytest.mark.parametrize("shape", INLINE_SHAPES[-1:], ids=str)
def test_five_hundred_short_requests_all_end(rig: Rig, shape: Shape) -> None:
    """F15: requests of one block, saves on: all end, the queues are empty."""
    roll = random.Random(15)
    with rig.engine(max_num_seqs=32, **shape.options) as engine:
        for number in range(500):
            start = 100 * roll.randrange(300)
            engine.add_request(range(start, start + roll.choice((16, 17, 31))), 1)
            if number % 8 == 0:
                engine.step()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert len(engine.finish_reasons) == 500
