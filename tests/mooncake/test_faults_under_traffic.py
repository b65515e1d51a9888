"""An engine serves steady traffic while its pool's master stops, dies or falls silent.

In each test no request fails or waits longer than its deadlines, every byte is right,
and pins, staging and tasks are back at zero in the end. Once the master is there again,
hits come back by themselves: the breaker probes every 2 s, a master that forgot
everything gets the client's segment back in about 1.5 s, and the traffic must save a
prompt before it can load it.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from mooncake_master import BlackHole
from mooncake_traffic import BLOCKS, SETTINGS, Traffic

from akv.core.errors import StoreError
from akv.store.base import Status
from akv.store.mooncake import MooncakeStore
from akv.testing.values import empty_buffer, is_value_of, key_of, value_of
from engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mooncake_master import Master

PROBE = 2.0
REMOUNT = 1.5
RPC = 1.0
BACK = PROBE + REMOUNT + RPC + 3.0
"""Seconds within which hits are back; 3 of them are for a busy machine."""


def on(master: Master, **settings: Any) -> Engine:
    """An engine on this master's pool."""
    url = master.url(protocol="tcp", segment="64MiB", hostname="127.0.0.1")
    return Engine(
        extra_config={**SETTINGS, "store": url, **settings}, num_blocks=BLOCKS
    )


@contextmanager
def serving(master: Master) -> Iterator[Traffic]:
    """An engine whose traffic is loaded from the pool; judged at the end."""
    with on(master) as engine:
        traffic = Traffic(engine)
        traffic.run_until_loaded(10)
        traffic.run_for(0.5)
        yield traffic
        traffic.end()


def meanwhile(traffic: Traffic, call: Callable[[], None]) -> None:
    """Serve while ``call`` runs in another thread."""
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
        traffic.run_until(called.done, 20)
        called.result()


def hits_are_back(traffic: Traffic) -> None:
    """Soon a prompt is loaded again, and then one after the other."""
    traffic.run_until_loaded(BACK)
    seen = traffic.landed
    traffic.run_until(lambda: traffic.landed > seen + 10, 10)


def test_a_master_that_stands_still_for_five_seconds(master: Master) -> None:
    """SIGSTOP, SIGCONT: what was saved is found again."""
    with serving(master) as traffic:
        with master.stopped():
            traffic.run_for(5)
        hits_are_back(traffic)


def test_a_master_that_is_killed_for_good(master: Master) -> None:
    """SIGKILL: the engine computes."""
    with serving(master) as traffic:
        master.kill()
        traffic.run_for(8)


def test_a_master_that_is_back_ten_seconds_after_its_death(master: Master) -> None:
    """SIGKILL; all that it knew is gone."""
    with serving(master) as traffic:
        master.kill()
        traffic.run_for(10)
        meanwhile(traffic, master.start)
        hits_are_back(traffic)


def test_a_master_that_is_back_within_a_second(master: Master) -> None:
    """SIGKILL and a start at once, between two of the client's pings."""
    with serving(master) as traffic:
        meanwhile(traffic, master.restart)
        hits_are_back(traffic)


def test_a_port_that_swallows_everything_where_a_master_was(master: Master) -> None:
    """The master's port becomes a black hole, and a master again."""
    with serving(master) as traffic:
        master.kill()
        with BlackHole(master.port):
            traffic.run_for(8)
        meanwhile(traffic, master.start)
        hits_are_back(traffic)


def test_an_engine_that_starts_on_a_black_hole_computes_and_ends_in_time(
    master: Master,
) -> None:
    """And one whose pool comes while it serves uses it."""
    master.kill()
    begun = time.monotonic()
    with BlackHole(master.port) as hole, on(master) as engine:
        assert time.monotonic() - begun < 15
        traffic = Traffic(engine)
        traffic.run_for(5)
        assert engine.monitor.reported == []
        hole.close()
        meanwhile(traffic, master.start)
        hits_are_back(traffic)
        traffic.end()


def test_an_engine_on_a_black_hole_ends_in_time(master: Master) -> None:
    """A close does not wait for what never answers."""
    with ExitStack() as stack:
        with on(master) as engine:
            traffic = Traffic(engine)
            traffic.run_until_loaded(10)
            master.kill()
            stack.enter_context(BlackHole(master.port))
            traffic.run_for(2)
            traffic.end()
            begun = time.monotonic()
        assert time.monotonic() - begun < 15


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_master_that_stands_still_for_a_minute(master: Master) -> None:
    """SIGSTOP for longer than anything of Mooncake's waits; one minute for all.

    Beside the traffic: a second engine that is reset meanwhile, an engine that
    starts meanwhile, and calls on a store that hold registered memory.
    """
    keys = [key_of(number) for number in range(8)]
    url = master.url(segment="16MiB")
    with (
        closing(MooncakeStore.open(url, slot_bytes=4096, environment={})) as store,
        on(master, namespace="other") as other,
        serving(master) as traffic,
    ):
        values = [value_of(key, 4096) for key in keys]
        assert store.put_from(keys, values) == [Status.STORED] * 8
        second = Traffic(other, "other")
        second.run_until_loaded(10)
        second.end()
        with master.stopped():
            begun = time.monotonic()
            calls = _Calls(store)
            traffic.run_for(5)
            traffic.end()  # nobody steps it while the others run
            assert not other.reset_prefix_cache(reset_connector=True)
            landed = second.landed
            second.run_for(5)
            second.end()
            assert second.landed == landed
            with on(master, namespace="late") as late:
                third = Traffic(late, "late")
                third.run_for(3)
                third.end()
                assert late.monitor.reported == []
            traffic.run_for(begun + 60 - time.monotonic())
        hits_are_back(traffic)
        calls.end()
        assert calls.longest < 12
        hits_are_back(second)
        second.end()
        buffers = [empty_buffer(4096) for _ in keys]
        assert store.get_into(keys, buffers) == [Status.HIT] * 8
        assert all(map(is_value_of, keys, buffers))


class _Calls:
    """One lookup, get and put after the other, in a thread of their own."""

    def __init__(self, store: MooncakeStore) -> None:
        self.longest = 0.0
        self.wrong = 0
        self._store = store
        self._go = True
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def end(self) -> None:
        """End, and see that nothing came through that was wrong."""
        self._go = False
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert not self.wrong

    def _call(self) -> None:
        keys = [key_of(number) for number in range(4)]
        buffers = [empty_buffer(4096) for _ in keys]
        while self._go:
            begun = time.monotonic()
            with suppress(StoreError):
                self._store.exists(keys)
            outcomes = self._store.get_into(keys, buffers)
            for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
                if outcome is Status.HIT:
                    self.wrong += not is_value_of(key, buffer)
            self.longest = max(self.longest, time.monotonic() - begun)
            time.sleep(0.05)
