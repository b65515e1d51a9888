"""Q of the bug log: a reset hides everything of before, and nothing of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from bugs.rig import Rig, Watch, serve, step_until

from akv.core.errors import StoreError, StoreUnavailableError
from akv.store import BlockStore, open_store
from akv.testing.stores import GatedStore, WrappedStore
from engine.shapes import INLINE_SHAPES, Shape

if TYPE_CHECKING:
    from pathlib import Path

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)


class _NoReset(WrappedStore):
    """Cannot raise a generation."""

    def raise_generation(self, scope: bytes) -> int:
        """Fail as a store that cannot be reached."""
        raise StoreError("nobody answers")


@every_shape
@pytest.mark.parametrize("local", [True, False], ids=["local store", "memory store"])
def test_after_a_reset_what_was_saved_before_is_a_miss_for_everybody(
    rig: Rig, shape: Shape, tmp_path: Path, local: bool
) -> None:
    """Q1: save, reset, look up: a miss here and in the next process; then anew."""
    store = f"local:{tmp_path / 'store'}?capacity=1MiB"
    settings = {"store": store} if local else {}
    with rig.engine(settings, **shape.options) as engine:
        serve(engine, range(65), "before")
        assert engine.reset_prefix_cache(reset_connector=True)
        assert serve(engine, range(65), "after") == 0
        assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "later") == 64
    with rig.engine(settings) as engine:
        assert serve(engine, range(65), "another process") == 0


@every_shape
def test_a_reset_that_the_store_did_not_confirm_is_not_said_to_be_done(
    rig: Rig, shape: Shape
) -> None:
    """Q1, X8b: False, and still a miss here: old weights are never served."""
    rig.through(_NoReset)
    with rig.engine(**shape.options) as engine:
        serve(engine, range(65), "before")
        assert not engine.reset_prefix_cache(reset_connector=True)
        assert serve(engine, range(65), "after") == 0


@every_shape
def test_what_was_on_its_way_at_the_reset_is_saved_again_after_it(
    rig: Rig, shape: Shape
) -> None:
    """Q1: a put of before ends after the reset: it says nothing about after."""
    rig.through(lambda inner: GatedStore(inner, gated=("put_from",)))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        engine.add_request(range(65), 1, "before")
        engine.run()
        engine.idle_until_quiet()
        rig.worker(GatedStore).wait_until_held()
        assert engine.reset_prefix_cache(reset_connector=True)
        rig.worker(GatedStore).open()
        connector = engine.scheduler.get_kv_connector()
        step_until(engine, lambda: not connector._s._ending)
        # No lookup is made for this one that could tell what is missing.
        engine.add_request(range(65), 1, "after", skip_reading_prefix_cache=True)
        engine.run()
        engine.idle_until_quiet()
        engine.assert_clean()
        assert [len(spec) for spec in watch.saves] == [4, 4]
        assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "later") == 64


@every_shape
def test_a_reset_before_the_first_request_counts(rig: Rig, shape: Shape) -> None:
    """Q1: weights were changed before anybody asked: what is stored is of before."""
    rig.seed(range(65))
    with rig.engine(**shape.options) as engine:
        assert engine.reset_prefix_cache(reset_connector=True)
        assert serve(engine, range(65), "first") == 0
    with rig.engine() as engine:
        assert serve(engine, range(65), "another process") == 0


@pytest.mark.parametrize("shape", INLINE_SHAPES[:1], ids=str)
def test_a_reset_before_the_store_has_come_is_not_lost(
    rig: Rig, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q1: the store cannot be reached at start; when it comes, it is of before."""
    rig.seed(range(65))
    there = False
    keeper = open_store

    def late(url: str, **options: Any) -> BlockStore:
        if not there:
            raise StoreUnavailableError("not yet")
        return keeper(url, **options)

    monkeypatch.setattr("akv.session.open_store", late)
    with rig.engine(**shape.options) as engine:
        assert not engine.reset_prefix_cache(reset_connector=True)
        there = True
        soon = engine.scheduler.get_kv_connector()._s._space_soon
        assert soon.known.wait(20)
        assert serve(engine, range(65), "first") == 0
    assert rig.store.statistics().objects >= 4


@every_shape
def test_a_reset_of_one_namespace_leaves_the_others_alone(
    rig: Rig, shape: Shape
) -> None:
    """Q3: two deployments in one store; A resets, B finds what it saved."""
    for name in "AB":
        with rig.engine({"namespace": name}, **shape.options) as engine:
            assert serve(engine, range(65), "cold") == 0
    with rig.engine({"namespace": "A"}, **shape.options) as engine:
        assert engine.reset_prefix_cache(reset_connector=True)
        assert serve(engine, range(65), "warm") == 0
    with rig.engine({"namespace": "B"}, **shape.options) as engine:
        assert serve(engine, range(65), "warm") == 64


@every_shape
def test_a_reset_while_a_load_is_under_way_serves_nothing_old(
    rig: Rig, shape: Shape
) -> None:
    """Q1: vLLM refuses as the load holds blocks; what is found later is right."""
    rig.seed(range(65))
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine(**shape.options) as engine:
        engine.add_request(range(65), 3, "r")
        step_until(engine, lambda: "r" in engine.monitor.loads)
        assert not engine.reset_prefix_cache(reset_connector=True)
        rig.worker(GatedStore).open()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert engine.reset_prefix_cache(reset_connector=True)
        assert serve(engine, range(65), "after") == 0
