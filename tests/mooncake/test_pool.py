"""One pool and several stores: memory, other people's keys, generations, room."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from akv.core.errors import StoreError, StoreUnavailableError
from akv.core.keys import BlockKey, KeySpace, make_keys
from akv.store.base import Failure, RegistersMemory, Status
from akv.store.mooncake import MooncakeStore
from akv.testing.values import empty_buffer, is_value_of, key_of, value_of

if TYPE_CHECKING:
    from mooncake_master import Master

SLOT = 64 * 1024


def joined(master: Master, *, lend: bool = True, **settings: object) -> MooncakeStore:
    return MooncakeStore.open(
        master.url(**settings), slot_bytes=SLOT, lend_memory=lend, environment={}
    )


def put(store: MooncakeStore, keys: list[BlockKey], size: int = 1000) -> None:
    outcomes = store.put_from(keys, [value_of(key, size) for key in keys])
    assert outcomes == [Status.STORED] * len(keys)


def test_what_one_store_puts_another_gets(master: Master) -> None:
    keys = [key_of(number) for number in range(40)]
    with closing(joined(master)) as one, closing(joined(master, lend=False)) as other:
        put(one, keys)
        assert other.exists(keys, promise=True) == [Status.HIT] * len(keys)
        buffers = [empty_buffer(1000) for _ in keys]
        assert other.get_into(keys, buffers) == [Status.HIT] * len(keys)
        assert all(map(is_value_of, keys, buffers))


def test_a_scheduler_brings_no_memory(master: Master) -> None:
    with closing(joined(master, lend=False)) as store:
        assert store.statistics().bytes_capacity == 0
        assert store.exists([key_of(1)]) == [Status.MISS]
        assert store.put_from([key_of(1)], [value_of(key_of(1), 9)]) == [Status.NO_ROOM]
        with closing(joined(master)):
            assert store.statistics().bytes_capacity == 64 << 20


def test_registered_memory_is_used_as_it_is(master: Master) -> None:
    with closing(joined(master)) as store:
        assert isinstance(store, RegistersMemory)
        memory = memoryview(mmap.mmap(-1, 1 << 20))
        store.register(memory)
        keys = [key_of(number) for number in range(8)]
        places = [memory[at * SLOT : (at + 1) * SLOT] for at in range(16)]
        for key, place in zip(keys, places, strict=False):
            place[:] = value_of(key, SLOT)
        assert store.put_from(keys, places[:8]) == [Status.STORED] * 8
        assert store.get_into(keys, places[8:]) == [Status.HIT] * 8
        assert all(map(is_value_of, keys, places[8:]))
        mixed = [places[8], empty_buffer(SLOT), places[9], empty_buffer(SLOT)]
        assert store.get_into(keys[4:], mixed) == [Status.HIT] * 4
        assert all(map(is_value_of, keys[4:], mixed))
        store.unregister(memory)
        assert store.get_into(keys[:1], places[:1]) == [Status.HIT]


def test_memory_that_cannot_be_registered_is_refused_with_code_size_and_causes(
    master: Master,
) -> None:
    """M1: going on without would be a false normal state."""
    with closing(joined(master)) as store:
        memory = memoryview(mmap.mmap(-1, 1 << 20))
        store.register(memory)
        with pytest.raises(StoreUnavailableError) as caught:
            store.register(memory[4096:])
        for said in ("-600", "1020KiB", "ulimit -l", "overlaps"):
            assert said in str(caught.value)
        assert store.exists([key_of(1)]) == [Status.MISS]


def test_more_keys_than_a_peer_can_queue_come_through_between_processes(
    master: Master,
) -> None:
    """Upstream lost 63 of 128 blocks beyond 2,048 segments in one call."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, master.url()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "stored\n"
            _get_in_four_threads(master)
        finally:
            holder.kill()


def _get_in_four_threads(master: Master) -> None:
    keys = [key_of(number) for number in range(3000)]
    buffers = [empty_buffer(512) for _ in keys]
    with closing(joined(master, lend=False)) as store:

        def get(start: int) -> set[object]:
            return set(store.get_into(keys[start::4], buffers[start::4]))

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(get, range(4))) == [{Status.HIT}] * 4
    assert all(map(is_value_of, keys, buffers))


_HOLDER = """
import sys
from akv.store.mooncake import MooncakeStore
from akv.testing.values import key_of, value_of
store = MooncakeStore.open(sys.argv[1], slot_bytes=512, environment={})
keys = [key_of(number) for number in range(3000)]
store.put_from(keys, [value_of(key, 512) for key in keys])
print("stored", flush=True)
sys.stdin.read()
store.close()
"""


def test_a_full_pool_is_backpressure_and_no_error(master: Master) -> None:
    with closing(joined(master, segment="16MiB")) as store:
        keys = [key_of(number) for number in range(600)]
        outcomes = store.put_from(keys, [value_of(key, SLOT) for key in keys])
        assert set(outcomes) == {Status.STORED, Status.NO_ROOM}
        assert outcomes.index(Status.NO_ROOM) > 100
        assert store.statistics().no_room == outcomes.count(Status.NO_ROOM)
        assert store.statistics().failures == 0


def test_what_a_writer_has_not_ended_is_a_miss_and_no_put_counts_as_stored(
    master: Master,
) -> None:
    """L8: put says it exists, get says it is not ready."""
    key = key_of(1)
    with closing(joined(master)) as one, closing(joined(master)) as other:
        with other._link.use() as client:
            begun = client._native.batch_put_session_start(["akv:" + key.hex()], [9])
            assert begun == [0]
        assert one.exists([key]) == [Status.MISS]
        assert one.get_into([key], [empty_buffer(9)]) == [Status.MISS]
        (outcome,) = one.put_from([key], [value_of(key, 9)])
        assert isinstance(outcome, Failure)
        assert outcome.code == -703
        with other._link.use() as client:
            client._native.batch_put_session_revoke(["akv:" + key.hex()])
        assert one.put_from([key], [value_of(key, 9)]) == [Status.STORED]


def test_a_key_twice_in_one_get_fills_both_buffers(master: Master) -> None:
    """Mooncake itself fills one of them and reports both."""
    with closing(joined(master)) as store:
        key = key_of(1)
        put(store, [key])
        buffers = [empty_buffer(1000), empty_buffer(1000), empty_buffer(999)]
        first, second, short = store.get_into([key] * 3, buffers)
        assert (first, second) == (Status.HIT, Status.HIT)
        assert isinstance(short, Failure)
        assert all(is_value_of(key, buffer) for buffer in buffers[:2])


def test_clearing_touches_nobody_elses_keys(master: Master) -> None:
    with closing(joined(master)) as store:
        with store._link.use() as client:
            page = store._memory.page.address
            theirs = ["theirs", "akv", "akvx:00", b"tenant-a".hex()]
            assert client.put(theirs, [[(page, 8)]] * 4) == [0] * 4
        put(store, [key_of(number) for number in range(5)])
        store.raise_generation(b"s" * 24)
        assert store.clear(b"") == 5
        with store._link.use() as client:
            assert client.exist(theirs) == [1] * 4
        assert store.generation(b"s" * 24) == 1


def test_generations_are_the_same_for_all_stores_and_taken_once(
    master: Master,
) -> None:
    scope = b"scope"
    with closing(joined(master)) as one, closing(joined(master, lend=False)) as other:
        taken: list[int] = []

        def raise_some(store: MooncakeStore) -> None:
            taken.extend(store.raise_generation(scope) for _ in range(20))

        threads = [
            threading.Thread(target=raise_some, args=(store,)) for store in (one, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(taken) == list(range(1, 41))
        assert one.generation(scope) == other.generation(scope) == 40
        with closing(joined(master, lend=False)) as third:
            assert third.generation(scope) == 40


def test_large_generations_are_found_in_a_few_calls(master: Master) -> None:
    with closing(joined(master)) as store, closing(joined(master)) as other:
        store._generations._seen[b"s"] = 0x01FF
        assert store.generation(b"s") == 0x01FF
        assert other.generation(b"s") == 0x01FF
        assert other.raise_generation(b"s") == 0x0200
        assert store.generation(b"s") == 0x0200


def test_a_generation_outlives_eviction_and_the_end_of_a_segment(
    master: Master,
) -> None:
    with closing(joined(master, segment="16MiB")) as stays:
        with closing(joined(master, segment="16MiB")) as goes:
            assert goes.raise_generation(b"s") == 1
            for start in range(0, 1200, 100):
                keys = [key_of(number) for number in range(start, start + 100)]
                goes.put_from(keys, [value_of(key, SLOT) for key in keys])
        assert stays.generation(b"s") == 1


def test_a_raise_removes_the_older_objects_and_no_others(master: Master) -> None:
    space = KeySpace(namespace="a", fingerprint=bytes(16))  # type: ignore[arg-type]
    other = KeySpace(namespace="b", fingerprint=bytes(16))  # type: ignore[arg-type]
    hashes = [bytes([at]) * 32 for at in range(4)]
    with closing(joined(master)) as store:
        old = list(make_keys(space.prefix, 0, 0, hashes))
        theirs = list(make_keys(other.prefix, 0, 0, hashes))
        put(store, old + theirs)
        number = store.raise_generation(space.scope)
        new = list(make_keys(space.after_reset(number, bytes(8)).prefix, 0, 0, hashes))
        put(store, new)
        assert store.raise_generation(other.scope) == 1
        assert store.exists(old + new + theirs) == [
            *[Status.MISS] * 4,
            *[Status.HIT] * 4,
            *[Status.MISS] * 4,
        ]


def test_a_raise_that_is_not_confirmed_raises(master: Master) -> None:
    """Q1: true only when confirmed."""
    with closing(joined(master)) as store:
        assert store.raise_generation(b"s") == 1
        master.kill()
        with pytest.raises(StoreError):
            store.raise_generation(b"s")
        master.start()


def test_a_raise_over_a_signpost_that_was_begun_and_not_ended_is_not_confirmed(
    master: Master,
) -> None:
    """Q1: neither here nor elsewhere, and in time it is."""
    signpost = "akv.generation:" + b"s".hex() + ":3:0"
    with closing(joined(master)) as one, closing(joined(master)) as other:
        with other._link.use() as client:
            assert client._native.batch_put_session_start([signpost], [8]) == [0]
        for _ in range(2):
            with pytest.raises(StoreError, match="not confirmed: others find 0"):
                one.raise_generation(b"s")
        assert other.generation(b"s") == 0
        with other._link.use() as client:
            client._native.batch_put_session_revoke([signpost])
        number = one.raise_generation(b"s")
        assert number >= 1
        assert other.generation(b"s") == number


def test_a_start_whose_answer_was_lost_does_not_stand_in_the_way_of_the_next(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client remembers what it has begun, and refuses to begin it again."""
    with closing(joined(master)) as store, store._link.use() as client:
        native = client._native

        class Lost:
            """A client one of whose answers never comes."""

            def __getattr__(self, name: str) -> Any:
                return getattr(native, name)

            def batch_put_session_start(self, *args: Any) -> list[int]:
                assert native.batch_put_session_start(*args) == [0]
                return [-901]

        page = store._generations._page.address
        with monkeypatch.context() as patch:
            patch.setattr(client, "_native", Lost())
            assert client.create("akv.odd", page, 8, client.placement()) == -901
        assert client.create("akv.odd", page, 8, client.placement()) == 0


def test_a_removal_spares_what_a_reader_may_be_reading(master: Master) -> None:
    with closing(joined(master)) as one, closing(joined(master)) as other:
        scope, key = b"s" * 24, BlockKey(b"s" * 24 + bytes(4) + b"rest")
        put(one, [key])
        assert other.exists([key], promise=True) == [Status.HIT]
        assert one.raise_generation(scope) == 1
        buffer = empty_buffer(1000)
        assert other.get_into([key], [buffer]) == [Status.HIT]
        assert is_value_of(key, buffer)


def test_opening_and_closing_leaves_nothing_behind(master: Master) -> None:
    """M3: no growth in threads."""
    for _ in range(3):
        joined(master, lend=False).close()
    threads = _native_threads()
    for _ in range(3):
        joined(master, lend=False).close()
    until = time.monotonic() + 5
    while _native_threads() > threads and time.monotonic() < until:
        time.sleep(0.05)
    assert _native_threads() <= threads


def _native_threads() -> int:
    with open("/proc/self/status") as status:  # noqa: PTH123
        line = next(line for line in status if line.startswith("Threads:"))
    return int(line.split()[1])
