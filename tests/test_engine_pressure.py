"""akv in the engine without a model, while stores fail and clients hang up.

A few hundred requests are given up at random moments over stores whose calls take up
to half a second, hang, fail or bring half an object: every byte that is used is right,
no wait is longer than its deadline, and at the end everything that is bounded is back
at its starting number. `python3 noxfile.py -s soak` and `-s bench -- --only pressure`
do the same for longer.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mooncake_master import make_master

from akv.store import MemoryStore
from engine.engine import Engine
from engine.pressure import (
    Faults,
    Pressure,
    Trouble,
    holdings,
    percentile,
    process_holdings,
    run_pressure,
    seed_store,
    settle,
    through,
)
from engine.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOKUP_DEADLINE = 0.8
LOAD_DEADLINE = 2.0
SETTINGS: dict[str, Any] = {
    "max_load_bytes": "1MiB",
    "max_save_bytes": "1MiB",
    "max_pinned_fraction": 0.5,
    "lookup_deadline": LOOKUP_DEADLINE,
    "load_deadline": LOAD_DEADLINE,
    "save_deadline": 4.0,
    # The engine without a model computes faster than any store brings blocks.
    "load_or_compute": False,
}
ROUGH = Faults(latency=0.5, hang=0.02, hang_seconds=60.0, error=0.04, short=0.04)
"""Hangs, errors and short reads more often than in life: there are few calls here."""

BUSY = 1.5
"""Seconds that a busy machine may keep this process from running."""


@contextmanager
def store_of(kind: str) -> Iterator[str]:
    """The address of a store of this kind, which is gone afterwards."""
    match kind:
        case "memory":
            name = uuid.uuid4().hex
            keeper = MemoryStore(name=name)
            yield f"memory:{name}"
            keeper.close()
        case "local":
            root = Path("/dev/shm")
            folder = tempfile.mkdtemp(
                prefix="akv-pressure-", dir=root if root.is_dir() else None
            )
            yield f"local:{folder}/store?capacity=16MiB"
            shutil.rmtree(folder)
        case _:
            with make_master() as master:
                yield master.url(protocol="tcp", segment="64MiB", hostname="127.0.0.1")


def akv_engine(
    url: str, shape: Shape, settings: dict[str, Any] | None = None, **options: Any
) -> Engine:
    extra = {**SETTINGS, "store": url, **(settings or {})}
    return Engine(
        extra_config=extra, num_blocks=160, max_num_seqs=16, **shape.options, **options
    )


SYNC = Shape(hook_order="v1", async_scheduling=False, worker="inline")
ASYNC = Shape(hook_order="v2", async_scheduling=True, worker="inline")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """vLLM says each time that a prefix cache in use was not reset."""
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def warm_up(url: str, shape: Shape) -> None:
    """What libraries keep after their first use is no leak."""
    with akv_engine(url, shape) as engine:
        engine.add_request(range(100), 2)
        engine.run()
        engine.idle_until_quiet()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("memory", ASYNC), ("local", SYNC), ("mooncake", SYNC)],
    ids=["memory", "local", "mooncake"],
)
def test_random_aborts_over_a_rough_store_see_no_wrong_byte_and_leave_nothing(
    kind: str, shape: Shape
) -> None:
    pressure = Pressure(aborts=300)
    trouble = Trouble(seed=7)
    with store_of(kind) as url:
        warm_up(url, shape)
        outside = process_holdings()
        with through(trouble), akv_engine(url, shape) as engine:
            seed_store(engine, 7, pressure)
            inside = holdings(engine)
            trouble.begin(ROUGH)
            try:
                report = run_pressure(engine, 7, pressure)
            finally:
                trouble.calm()
            settle(engine, inside)
            engine.assert_clean()
        del engine
        left = process_holdings()
    for moment in ("being looked up", "loading", "decoding", "being saved"):
        assert report.aborted[moment], report.aborted
    assert report.loads_landed, report
    assert trouble.happened["hang"], trouble.happened
    assert trouble.happened["error"], trouble.happened
    assert max(report.load_seconds) < 1.1 * LOAD_DEADLINE + BUSY
    # The engine gives a lookup up after two deadlines, whatever becomes of it.
    assert max(report.lookup_seconds) < 2 * LOOKUP_DEADLINE + BUSY
    # Half of the calls take longer than this alone, and some a minute.
    assert percentile(report.abort_seconds, 90) < 0.25
    assert max(report.abort_seconds) < BUSY
    assert left["descriptors"] <= outside["descriptors"]
    # Mooncake's library starts a thread by and by, and keeps it.
    assert left["threads"] <= outside["threads"] + (2 if kind == "mooncake" else 0)


def test_requests_that_want_nothing_of_hung_gets_are_served_meanwhile() -> None:
    """64 loads hang; lookups are answered, cold requests run, aborts free blocks."""
    trouble = Trouble(seed=1)
    trouble.verbs = frozenset({"get_into"})
    prompts = [[1 + number, *range(40)] for number in range(64)]
    with (
        store_of("memory") as url,
        through(trouble),
        akv_engine(url, SYNC, {"load_deadline": 60, "lookup_deadline": 30}) as engine,
    ):
        for number, prompt in enumerate(prompts):
            engine.add_request(prompt, 1, f"seed-{number}")
            engine.run()
            engine.idle_until_quiet()
        assert engine.reset_prefix_cache()
        inside = holdings(engine)
        trouble.begin(Faults(hang=1.0, hang_seconds=60.0))
        try:
            for number, prompt in enumerate(prompts):
                engine.add_request(prompt, 1, f"hung-{number}")
            while len(engine.monitor.outstanding) < 50:
                engine.run_steps(1)
            hung = set(engine.monitor.outstanding)
            # More of them than the pool has room for would wait for blocks, in order.
            waiting = [name for name in engine.unfinished() if name not in hung]
            for name in waiting:
                engine.abort(name)
            for number in range(10):
                engine.add_request([500 + number, *range(30)], 3, f"cold-{number}")
            while any(f"cold-{n}" not in engine.finish_reasons for n in range(10)):
                engine.run_steps(1)
            assert set(engine.monitor.outstanding) == hung
            for name in hung:
                engine.abort(name)
            engine.idle_until_quiet()
            assert not engine.monitor.outstanding
            assert engine.num_free_blocks() == engine.num_free_blocks_at_start
        finally:
            trouble.calm()
        settle(engine, inside)
        engine.assert_clean()
        engine.assert_outputs()
    assert trouble.happened["hang"] == 2, "one for each thread of the pool"


def test_puts_that_hang_pin_no_more_than_allowed_and_saving_goes_on_afterwards() -> (
    None
):
    trouble = Trouble(seed=1)
    trouble.verbs = frozenset({"put_from"})
    most = 0
    with (
        store_of("memory") as url,
        through(trouble),
        akv_engine(
            url, SYNC, {"max_pinned_fraction": 0.1, "save_deadline": 0.5}
        ) as engine,
    ):
        side = engine.scheduler.get_kv_connector()._s
        inside = holdings(engine)
        trouble.begin(Faults(hang=1.0, hang_seconds=60.0))
        try:
            for number in range(60):
                engine.add_request([1 + number, *range(60)], 2, f"slow-{number}")
                while f"slow-{number}" not in engine.finish_reasons:
                    engine.run_steps(1)
                    most = max(most, side.debug_state()["pinned blocks"])
        finally:
            trouble.calm()
        assert 0 < most <= 0.1 * engine.config.num_blocks
        settle(engine, inside)
        engine.assert_clean()
        engine.assert_outputs()
        loaded = 0
        for number in range(200):
            # The breaker's probe comes some seconds after the puts are well again.
            prompt = [700 + number, *range(60)]
            for name in (f"save-{number}", f"load-{number}"):
                engine.add_request(prompt, 2, name)
                engine.run()
                engine.idle_until_quiet()
                assert engine.reset_prefix_cache()
            loaded = engine.external_tokens(f"load-{number}")
            if loaded:
                break
            engine.worker.debug_state()
            for _ in range(50):
                engine.step_empty()
        assert loaded == 48
        engine.assert_outputs()
