"""What every store must do, as tests that a backend's own tests inherit.

Subclass :class:`StoreContract`, say in ``open_store`` how to open an empty
store of yours, and pytest runs one test for each sentence of the
:class:`~akv.store.base.BlockStore` Protocol. Nothing here needs an event
loop, and nothing is patched::

    class TestMyStore(StoreContract):
        def open_store(self, directory: Path) -> BlockStore:
            return MyStore(directory, slot_bytes=self.slot_bytes)
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from akv.core.errors import AkvError
from akv.core.keys import BlockKey
from akv.store.base import BlockStore, Failure, Status
from akv.testing.values import empty_buffer, is_value_of, key_of, value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

__all__ = ("StoreContract",)


class StoreContract:
    """Inherit, implement :meth:`open_store`, and run with pytest."""

    slot_bytes = 64 * 1024
    """The longest object that the opened store must take."""

    objects = 128
    """How many such objects it must hold at once without losing one."""

    seconds = 0.5
    """For how long tests with several threads go on."""

    def open_store(self, directory: Path) -> BlockStore:
        """A store that is empty and open; ``directory`` is the test's own."""
        msg = f"{type(self).__name__} does not say how to open its store in {directory}"
        raise TypeError(msg)

    # Answers: one for each key, in order.

    def test_a_store_is_a_block_store(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            assert isinstance(store, BlockStore)
            assert store.url
            assert store.lease >= 0

    def test_no_keys_give_no_outcomes(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            assert store.exists([]) == []
            assert store.exists([], promise=True) == []
            assert store.put_from([], []) == []
            assert store.get_into([], []) == []
            assert store.remove([]) == []

    def test_each_key_has_its_own_outcome_in_order(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            keys = [key_of(number) for number in range(6)]
            self._put(store, keys[::2])
            expected = [Status.HIT, Status.MISS] * 3
            assert store.exists(keys) == expected
            assert store.exists(keys[::-1]) == expected[::-1]
            buffers = [empty_buffer(100) for _ in keys]
            assert store.get_into(keys, buffers) == expected
            assert store.remove(keys) == [Status.REMOVED, Status.MISS] * 3

    def test_many_keys_in_one_call_all_get_their_own_bytes(
        self, tmp_path: Path
    ) -> None:
        with closing(self.open_store(tmp_path)) as store:
            keys = [key_of(number) for number in range(self.objects)]
            sizes = [1 + 509 * at % self.slot_bytes for at in range(len(keys))]
            values = [
                value_of(key, size) for key, size in zip(keys, sizes, strict=True)
            ]
            assert store.put_from(keys, values) == [Status.STORED] * len(keys)
            assert store.exists(keys) == [Status.HIT] * len(keys)
            buffers = [empty_buffer(size) for size in sizes]
            assert store.get_into(keys, buffers) == [Status.HIT] * len(keys)
            assert all(map(is_value_of, keys, buffers))
            assert store.remove(keys) == [Status.REMOVED] * len(keys)
            assert store.exists(keys) == [Status.MISS] * len(keys)

    def test_a_key_twice_in_one_put_is_stored_once(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            key = key_of(1)
            first, second = value_of(key, 100), value_of(b"other", 100)
            outcomes = store.put_from([key, key], [first, second])
            assert outcomes == [Status.STORED, Status.EXISTS]
            assert self._get(store, key, 100) == first
            assert store.statistics().objects == 1

    def test_a_key_twice_in_one_call_is_answered_twice(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            here, gone = key_of(1), key_of(2)
            self._put(store, [here])
            assert store.exists([here, gone, here]) == [
                Status.HIT,
                Status.MISS,
                Status.HIT,
            ]
            buffers = [empty_buffer(100), empty_buffer(100)]
            assert store.get_into([here, here], buffers) == [Status.HIT] * 2
            assert all(is_value_of(here, buffer) for buffer in buffers)
            assert store.remove([here, here]) == [Status.REMOVED, Status.MISS]

    # Objects: whole or not at all, and never changed.

    def test_what_was_put_is_got_back_byte_by_byte(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            for number, size in enumerate((1, 7, 4096, 4097, self.slot_bytes)):
                key = key_of(number)
                self._put(store, [key], size)
                assert self._get(store, key, size) == value_of(key, size)

    def test_a_missing_key_is_a_miss_and_no_error(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            assert store.exists([key_of(1)]) == [Status.MISS]
            assert store.get_into([key_of(1)], [empty_buffer(8)]) == [Status.MISS]
            assert store.remove([key_of(1)]) == [Status.MISS]

    def test_another_length_is_a_failure_and_never_a_short_read(
        self, tmp_path: Path
    ) -> None:
        with closing(self.open_store(tmp_path)) as store:
            key = key_of(1)
            self._put(store, [key], 100)
            for size in (0, 1, 99, 101, self.slot_bytes):
                (outcome,) = store.get_into([key], [empty_buffer(size)])
                assert isinstance(outcome, Failure), size
                assert outcome.reason
            assert self._get(store, key, 100) == value_of(key, 100)

    def test_a_failure_of_one_key_leaves_the_others_alone(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            keys = [key_of(number) for number in range(3)]
            self._put(store, keys, 100)
            buffers = [empty_buffer(100), empty_buffer(99), empty_buffer(100)]
            first, second, third = store.get_into(keys, buffers)
            assert (first, third) == (Status.HIT, Status.HIT)
            assert isinstance(second, Failure)
            assert is_value_of(keys[0], buffers[0])
            assert is_value_of(keys[2], buffers[2])

    def test_an_object_that_exists_keeps_its_bytes(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            key = key_of(1)
            self._put(store, [key], 100)
            other = value_of(b"something else", 100)
            assert store.put_from([key], [other]) == [Status.EXISTS]
            assert self._get(store, key, 100) == value_of(key, 100)

    def test_a_removed_key_can_be_put_anew(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            key, other = key_of(1), value_of(b"something else", 50)
            self._put(store, [key], 100)
            assert store.remove([key]) == [Status.REMOVED]
            assert store.put_from([key], [other]) == [Status.STORED]
            assert self._get(store, key, 50) == other

    def test_the_callers_buffers_are_not_kept(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            key = key_of(1)
            source = memoryview(bytearray(value_of(key, 100)))
            store.put_from([key], [source])
            source[:] = bytes(100)
            target = empty_buffer(100)
            store.get_into([key], [target])
            target[:] = bytes(100)
            assert self._get(store, key, 100) == value_of(key, 100)

    def test_read_only_buffers_can_be_stored(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            key = key_of(1)
            source = memoryview(bytes(value_of(key, 100)))
            assert store.put_from([key], [source]) == [Status.STORED]
            assert self._get(store, key, 100) == value_of(key, 100)

    def test_keys_and_buffers_of_different_number_are_refused(
        self, tmp_path: Path
    ) -> None:
        with closing(self.open_store(tmp_path)) as store:
            for call in (store.put_from, store.get_into):
                try:
                    call([key_of(1), key_of(2)], [empty_buffer(8)])
                except ValueError:
                    continue
                msg = "a call with two keys and one buffer was answered"
                raise AssertionError(msg)

    # Promises.

    def test_a_promise_changes_no_answer(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            keys = [key_of(number) for number in range(4)]
            self._put(store, keys[:2])
            expected = [Status.HIT, Status.HIT, Status.MISS, Status.MISS]
            assert store.exists(keys, promise=True) == expected
            assert store.exists(keys) == expected

    def test_a_promised_object_can_still_be_removed(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            key = key_of(1)
            self._put(store, [key])
            store.exists([key], promise=True)
            assert store.remove([key]) == [Status.REMOVED]

    # Clearing and generations.

    def test_clear_takes_a_prefix_and_nothing_else(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            names = (b"tenant-a", b"tenant-b", b"tenant-a-too")
            mine, theirs, near = (
                [BlockKey(name.ljust(16, b".") + bytes([at])) for at in range(8)]
                for name in names
            )
            for keys in (mine, theirs, near):
                self._put(store, keys)
            assert store.clear(b"tenant-a".ljust(16, b".")) == len(mine)
            assert store.exists(mine) == [Status.MISS] * len(mine)
            assert store.exists(theirs) == [Status.HIT] * len(theirs)
            assert store.exists(near) == [Status.HIT] * len(near)
            for key in theirs:
                assert self._get(store, key, 100) == value_of(key, 100)

    def test_clear_of_nothing_counts_nothing(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            self._put(store, [key_of(1)])
            assert store.clear(b"no such prefix") == 0
            assert store.exists([key_of(1)]) == [Status.HIT]

    def test_clear_of_the_empty_prefix_takes_all(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            keys = [key_of(number) for number in range(self.objects)]
            self._put(store, keys)
            assert store.clear(b"") == len(keys)
            assert store.statistics().objects == 0
            assert store.clear(b"") == 0

    def test_a_generation_starts_at_zero_and_is_raised_by_one(
        self, tmp_path: Path
    ) -> None:
        with closing(self.open_store(tmp_path)) as store:
            scope, other = b"s" * 24, b"o" * 24
            assert store.generation(scope) == 0
            assert [store.raise_generation(scope) for _ in range(3)] == [1, 2, 3]
            assert store.generation(scope) == 3
            assert store.generation(other) == 0

    def test_clearing_leaves_generations_alone(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            store.raise_generation(b"s" * 24)
            store.clear(b"")
            assert store.generation(b"s" * 24) == 1

    def test_objects_in_several_runs_are_put_and_read(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            keys = [key_of(number) for number in range(3)]
            lengths = ((100,), (1, 7, 64), (300, 300))
            sources = [
                _Runs(value_of(key, sum(runs)), runs)
                for key, runs in zip(keys, lengths, strict=True)
            ]
            assert store.put_from(keys, sources) == [Status.STORED] * 3
            for key, runs in zip(keys, lengths, strict=True):
                assert self._get(store, key, sum(runs)) == value_of(key, sum(runs))
            targets = [_Runs(empty_buffer(sum(runs)), runs[::-1]) for runs in lengths]
            assert store.get_into([*keys, key_of(9)], [*targets, empty_buffer(8)]) == [
                *[Status.HIT] * 3,
                Status.MISS,
            ]
            for key, target in zip(keys, targets, strict=True):
                assert is_value_of(key, target.value())

    # Several threads.

    def test_a_reader_never_sees_half_a_value(self, tmp_path: Path) -> None:
        """K10: a read beside a write gives a miss or the whole value."""
        with closing(self.open_store(tmp_path)) as store:
            key, size = key_of(1), self.slot_bytes
            variants = [value_of(name, size) for name in (b"one", b"two")]
            whole = [bytes(variant) for variant in variants]
            seen = 0

            def write(until: float) -> None:
                turn = 0
                while time.monotonic() < until:
                    store.put_from([key], [variants[turn % 2]])
                    store.remove([key])
                    turn += 1
                store.put_from([key], [variants[0]])

            def read(until: float) -> None:
                nonlocal seen
                buffer = empty_buffer(size)
                while time.monotonic() < until:
                    (outcome,) = store.get_into([key], [buffer])
                    if outcome is Status.HIT:
                        assert bytes(buffer) in whole
                        seen += 1
                    else:
                        assert outcome is Status.MISS

            self._together([write, write, read, read])
            assert self._get(store, key, size) == variants[0]

    def test_threads_that_put_and_get_the_same_keys_agree(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            keys = [key_of(number) for number in range(32)]

            def work(until: float) -> None:
                turn = 0
                while time.monotonic() < until:
                    turn += 1
                    chosen = keys[turn % 7 :: 1 + turn % 5]
                    values = [value_of(key, self.slot_bytes) for key in chosen]
                    for outcome in store.put_from(chosen, values):
                        assert outcome in (Status.STORED, Status.EXISTS)
                    buffers = [empty_buffer(self.slot_bytes) for _ in chosen]
                    found = store.get_into(chosen, buffers)
                    for key, buffer, outcome in zip(
                        chosen, buffers, found, strict=True
                    ):
                        assert outcome in (Status.HIT, Status.MISS)
                        assert outcome is Status.MISS or is_value_of(key, buffer)
                    if turn % 11 == 0:
                        store.remove(chosen[:3])

            self._together([work] * 4)

    def test_of_many_threads_that_put_one_key_one_has_stored_it(
        self, tmp_path: Path
    ) -> None:
        with closing(self.open_store(tmp_path)) as store:
            threads = 4
            start = threading.Barrier(threads)

            def put(number: int) -> list[object]:
                outcomes: list[object] = []
                for turn in range(10):
                    key = key_of(turn)
                    start.wait(10)
                    value = value_of(b"%d" % number, 1000)
                    outcomes += store.put_from([key], [value])
                return outcomes

            with ThreadPoolExecutor(threads) as pool:
                columns = list(pool.map(put, range(threads)))
            for turn in range(10):
                outcomes = [column[turn] for column in columns]
                assert outcomes.count(Status.STORED) == 1
                assert outcomes.count(Status.EXISTS) == threads - 1
                winner = outcomes.index(Status.STORED)
                expected = value_of(b"%d" % winner, 1000)
                assert self._get(store, key_of(turn), 1000) == expected

    # Numbers, and the end.

    def test_statistics_count_what_happened(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path)) as store:
            before = store.statistics()
            assert before.objects == 0
            keys = [key_of(number) for number in range(5)]
            self._put(store, keys[:3])
            store.put_from(keys[:1], [value_of(keys[0], 100)])
            store.exists(keys)
            store.get_into(keys[:1], [empty_buffer(1)])
            after = store.statistics()
            assert after.url == store.url
            assert after.objects == 3
            assert after.bytes_used >= 300
            assert after.bytes_used <= after.bytes_capacity or not after.bytes_capacity
            assert after.puts - before.puts == 3
            assert after.exists - before.exists == 1
            assert after.hits - before.hits == 3
            assert after.misses - before.misses == 2
            assert after.failures - before.failures == 1

    def test_closing_twice_is_no_error(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        store.close()
        store.close()

    def test_a_closed_store_takes_no_calls(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        key = key_of(1)
        self._put(store, [key])
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.exists([key]),
            lambda: store.get_into([key], [empty_buffer(100)]),
            lambda: store.put_from([key], [value_of(key, 100)]),
            lambda: store.remove([key]),
            lambda: store.clear(b""),
            lambda: store.generation(b"s"),
            lambda: store.raise_generation(b"s"),
            store.statistics,
        ]
        for number, call in enumerate(calls):
            try:
                call()
            except AkvError:
                continue
            msg = f"call {number} was answered by a closed store"
            raise AssertionError(msg)

    def test_a_store_can_be_closed_while_others_call(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        keys = [key_of(number) for number in range(8)]
        values = [value_of(key, self.slot_bytes) for key in keys]

        def call(until: float) -> None:
            buffers = [empty_buffer(self.slot_bytes) for _ in keys]
            while time.monotonic() < until:
                try:
                    store.put_from(keys, values)
                    store.get_into(keys, buffers)
                    store.remove(keys[:4])
                except AkvError:
                    return

        def close(until: float) -> None:
            time.sleep(max(0.0, until - time.monotonic()) / 2)
            store.close()

        self._together([call, call, close])

    # What the tests above are written with.

    def _put(self, store: BlockStore, keys: list[BlockKey], size: int = 100) -> None:
        values = [value_of(key, size) for key in keys]
        assert store.put_from(keys, values) == [Status.STORED] * len(keys)

    def _get(self, store: BlockStore, key: BlockKey, size: int) -> memoryview:
        buffer = empty_buffer(size)
        assert store.get_into([key], [buffer]) == [Status.HIT]
        return buffer

    def _together(self, work: list[Callable[[float], None]]) -> None:
        """Run all of ``work`` at once; what one raises fails the test."""
        until = time.monotonic() + self.seconds
        with ThreadPoolExecutor(len(work)) as pool:
            for done in [pool.submit(each, until) for each in work]:
                done.result()


class _Runs:
    """An object in runs of these lengths, each in memory of its own."""

    def __init__(self, value: memoryview, lengths: tuple[int, ...]) -> None:
        parts, position = [], 0
        for length in lengths:
            part = np.frombuffer(value, dtype=np.uint8, offset=position, count=length)
            parts.append(part.copy())
            position += length
        self._parts = parts
        self.nbytes = position

    @property
    def runs(self) -> list[tuple[int, int]]:
        return [(part.ctypes.data, part.nbytes) for part in self._parts]

    def value(self) -> memoryview:
        return np.concatenate(self._parts).data

    @staticmethod
    def fill(
        buffers: Sequence[_Runs], rows: npt.NDArray[np.uint8], numbers: Sequence[int]
    ) -> None:
        for buffer, number in zip(buffers, numbers, strict=True):
            position = 0
            for part in buffer._parts:
                part[:] = rows[number, position : position + part.nbytes]
                position += part.nbytes

    @staticmethod
    def drain(
        buffers: Sequence[_Runs], rows: npt.NDArray[np.uint8], numbers: Sequence[int]
    ) -> None:
        for buffer, number in zip(buffers, numbers, strict=True):
            rows[number, : buffer.nbytes] = np.concatenate(buffer._parts)
