"""The master stops, dies, comes back: what calls come to, and for how long.

Times are bounds with room for a busy machine; what was measured stands in the
docstring of ``akv.store.mooncake.store``. ``rpc_timeout`` is one second here.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from mooncake_master import BlackHole, free_port

from akv.core.errors import StoreError, StoreUnavailableError
from akv.store.base import Failure, Status
from akv.store.mooncake import MissingMooncakeError, MooncakeStore
from akv.testing.values import empty_buffer, is_value_of, key_of, value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mooncake_master import Master

    from akv.core.keys import BlockKey

SIZE = 4096
HANGS = 2.5
"""Seconds that a call may hang while the master is stopped: one RPC timeout."""


def joined(master: Master, *, lend: bool = True, **settings: object) -> MooncakeStore:
    return MooncakeStore.open(
        master.url(**settings), slot_bytes=SIZE, lend_memory=lend, environment={}
    )


def put(store: MooncakeStore, keys: list[BlockKey]) -> None:
    outcomes = store.put_from(keys, [value_of(key, SIZE) for key in keys])
    assert outcomes == [Status.STORED] * len(keys)


def until(answered: Callable[[], bool], seconds: float) -> float:
    """Seconds until ``answered`` is true, asked again and again; errors are no."""
    started = time.monotonic()
    while time.monotonic() < started + seconds:
        try:
            if answered():
                return time.monotonic() - started
        except StoreError:
            pass
        time.sleep(0.05)
    msg = f"not within {seconds} s"
    raise AssertionError(msg)


@pytest.fixture
def keys() -> list[BlockKey]:
    return [key_of(number) for number in range(8)]


@pytest.fixture
def store(master: Master, keys: list[BlockKey]) -> Iterator[MooncakeStore]:
    with closing(joined(master)) as store:
        put(store, keys)
        yield store


def test_a_stopped_master_makes_calls_end_at_their_timeout_and_loses_nothing(
    master: Master, store: MooncakeStore, keys: list[BlockKey]
) -> None:
    buffers = [empty_buffer(SIZE) for _ in keys]
    master.stop()
    stopped = time.monotonic()
    try:
        with pytest.raises(StoreUnavailableError, match="-901"):
            store.exists(keys)
        assert time.monotonic() - stopped < HANGS
        begun = time.monotonic()
        outcomes = store.get_into(keys, buffers)
        assert time.monotonic() - begun < HANGS
        assert {
            outcome.code for outcome in outcomes if isinstance(outcome, Failure)
        } == {-901}
        assert len(outcomes) == len(keys)
        begun = time.monotonic()
        new = [key_of(100)]
        (outcome,) = store.put_from(new, [value_of(new[0], SIZE)])
        assert isinstance(outcome, Failure)
        assert time.monotonic() - begun < HANGS
        time.sleep(max(0.0, stopped + 5 - time.monotonic()))
    finally:
        master.cont()
    assert until(lambda: store.exists(keys) == [Status.HIT] * len(keys), 5) < HANGS
    assert store.get_into(keys, buffers) == [Status.HIT] * len(keys)
    assert all(map(is_value_of, keys, buffers))
    assert store.losses == 0


def test_a_long_call_is_cut_short_when_the_master_is_silent(
    master: Master, store: MooncakeStore
) -> None:
    keys = [key_of(number) for number in range(2000)]
    buffers = [empty_buffer(SIZE) for _ in keys]
    master.stop()
    try:
        begun = time.monotonic()
        outcomes = store.get_into(keys, buffers)
        assert time.monotonic() - begun < HANGS
    finally:
        master.cont()
    assert all(isinstance(outcome, Failure) for outcome in outcomes)


def test_a_killed_master_that_comes_back_is_found_again_without_a_restart(
    master: Master, store: MooncakeStore, keys: list[BlockKey]
) -> None:
    memory = memoryview(mmap.mmap(-1, 1 << 20))
    store.register(memory)
    master.kill()
    with pytest.raises(StoreUnavailableError):
        store.exists(keys)
    (outcome,) = store.get_into(keys[:1], [empty_buffer(SIZE)])
    assert isinstance(outcome, Failure)
    time.sleep(3)
    master.start()
    assert until(lambda: store.exists(keys) == [Status.MISS] * len(keys), 15) < 12
    place = memory[:SIZE]
    place[:] = value_of(keys[0], SIZE)

    def stored() -> bool:
        (outcome,) = store.put_from(keys[:1], [place])
        return outcome in (Status.STORED, Status.EXISTS)

    until(stored, 5)
    place[:] = bytes(SIZE)
    assert store.get_into(keys[:1], [place]) == [Status.HIT]
    assert is_value_of(keys[0], place)
    until(lambda: bool(store.exists(keys)) and store.losses == 1, 5)


def test_a_restart_between_two_heartbeats_is_noticed(
    master: Master, store: MooncakeStore, keys: list[BlockKey]
) -> None:
    """M10: nobody re-registers when both heartbeats succeed."""
    with closing(joined(master, lend=False)) as other:
        assert store.raise_generation(b"s" * 24) == 1
        assert other.generation(b"s" * 24) == 1
        put(store, [key_of(50)])
        assert store.exists(keys)
        assert store.losses == 0
        master.restart()
        for each in (store, other):
            until(lambda each=each: each.exists(keys) == [Status.MISS] * 8, 5)  # type: ignore[misc]
            assert each.losses == 1 or not each._token.placed
        # The segment is mounted again, and the generation was not forgotten.
        until(
            lambda: (
                store.put_from(keys, [value_of(key, SIZE) for key in keys])
                == [Status.STORED] * 8
            ),
            5,
        )
        until(lambda: store.generation(b"s" * 24) == 1, 5)
        with closing(joined(master, lend=False)) as third:
            assert third.generation(b"s" * 24) == 1
            assert third.exists(keys) == [Status.HIT] * 8


@pytest.mark.parametrize("lend", [True, False])
def test_a_black_hole_is_given_up_on_soon_and_never_holds_the_interpreter(
    lend: bool,
) -> None:
    with BlackHole() as hole, _Ticks() as ticks:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=f"127.0.0.1:{hole.port}"):
            _open_at(hole.port, lend=lend)
        assert time.monotonic() - begun < 3
    assert ticks.longest < 0.5


def test_a_port_where_nobody_listens_is_given_up_on_at_once() -> None:
    begun = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="mooncake_master"):
        _open_at(free_port(), lend=True)
    assert time.monotonic() - begun < 1


def test_closing_does_not_hang_on_a_silent_master(master: Master) -> None:
    store = joined(master)
    master.stop()
    try:
        with _Ticks() as ticks:
            begun = time.monotonic()
            store.close()
            assert time.monotonic() - begun < 3
        assert ticks.longest < 0.5
        with pytest.raises(StoreError, match="closed"):
            store.exists([key_of(1)])
    finally:
        master.cont()


def test_the_end_of_a_process_that_holds_objects_gives_misses_and_no_wrong_byte(
    master: Master,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, master.url()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "stored\n"
            _lose(master, holder)
        finally:
            holder.kill()


def _lose(master: Master, holder: subprocess.Popen[str]) -> None:
    keys = [key_of(number) for number in range(20)]
    buffers = [empty_buffer(SIZE) for _ in keys]
    with closing(joined(master, lend=False)) as store:
        assert store.get_into(keys, buffers) == [Status.HIT] * len(keys)
        holder.kill()
        holder.wait()
        begun = time.monotonic()
        outcomes = store.get_into(keys, buffers)
        # A refused connection fails after 1 s, a silent one after 10.
        assert time.monotonic() - begun < 15
        for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
            assert outcome is not Status.HIT or is_value_of(key, buffer)
        until(lambda: store.exists(keys) == [Status.MISS] * len(keys), 20)


_HOLDER = """
import sys
from akv.store.mooncake import MooncakeStore
from akv.testing.values import key_of, value_of
store = MooncakeStore.open(sys.argv[1], slot_bytes=4096, environment={})
keys = [key_of(number) for number in range(20)]
store.put_from(keys, [value_of(key, 4096) for key in keys])
print("stored", flush=True)
sys.stdin.read()
"""


def _open_at(port: int, *, lend: bool) -> None:
    url = f"mooncake://127.0.0.1:{port}?segment=16MiB&rpc_timeout=1"
    try:
        MooncakeStore.open(url, slot_bytes=SIZE, lend_memory=lend, environment={})
    except MissingMooncakeError as error:
        pytest.skip(str(error))


class _Ticks:
    """Measures for how long no other thread could run.

    :ivar longest: seconds
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._go = True
        self._thread = threading.Thread(target=self._tick)

    def __enter__(self) -> _Ticks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._go = False
        self._thread.join()

    def _tick(self) -> None:
        last = time.monotonic()
        while self._go:
            time.sleep(0.002)
            now = time.monotonic()
            self.longest = max(self.longest, now - last)
            last = now
