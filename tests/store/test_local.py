"""What the local store does beyond the contract: sharing, order, leases, checks."""

from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store.nursery import SLOT_BYTES, claim_and_leave_a_child, use_after_a_fork

from akv.core.errors import ConfigError
from akv.store import Failure, LocalStore, Status, default_url, open_store
from akv.store.local import filesystem
from akv.store.local.address import default_capacity
from akv.store.local.records import Record
from akv.store.local.slab import SlabState
from akv.store.local.ticks import now_ms
from akv.testing import empty_buffer, is_value_of, key_of, value_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from store.nursery import Nursery

    from akv.core.keys import BlockKey
    from akv.store import Buffer

SLOT = 4096


def _open(
    directory: Path, slots: int = 8, options: str = "", lease: float = 0.0
) -> LocalStore:
    url = f"local:{directory}?capacity={slots * SLOT}{options}"
    return LocalStore.open(url, slot_bytes=SLOT, lease=lease)


def _put(store: LocalStore, keys: list[BlockKey]) -> list[object]:
    outcomes: list[object] = []
    for key in keys:
        # One by one, and never twice in a tick, so that the order is known.
        outcomes += store.put_from([key], [value_of(key, 100)])
        time.sleep(0.002)
    return outcomes


# Opening.


def test_the_scheme_of_the_url_chooses_the_store(shared_memory: Path) -> None:
    with closing(
        open_store(f"local:{shared_memory}?capacity=1MiB", slot_bytes=SLOT)
    ) as store:
        assert isinstance(store, LocalStore)
    with pytest.raises(ConfigError, match="local:") as caught:
        open_store("redis://somewhere", slot_bytes=SLOT)
    assert "memory:" in str(caught.value)


def test_the_url_opens_the_same_store_again(shared_memory: Path) -> None:
    with closing(_open(shared_memory)) as store:
        _put(store, [key_of(1)])
        url = store.url
    assert url == f"local:{shared_memory}?capacity=32KiB&checksum=off"
    with closing(LocalStore.open(url, slot_bytes=SLOT)) as store:
        assert store.exists([key_of(1)]) == [Status.HIT]
        assert store.url == url


def test_what_was_stored_outlives_the_handle(shared_memory: Path) -> None:
    keys = [key_of(number) for number in range(5)]
    with closing(_open(shared_memory)) as store:
        _put(store, keys)
    with closing(_open(shared_memory)) as store:
        buffers = [empty_buffer(100) for _ in keys]
        assert store.get_into(keys, buffers) == [Status.HIT] * 5
        assert all(map(is_value_of, keys, buffers))
        assert store.verify() == []


def test_two_handles_of_one_process_share_what_is_open(shared_memory: Path) -> None:
    first, second = _open(shared_memory), _open(shared_memory)
    _put(first, [key_of(1)])
    assert second.exists([key_of(1)]) == [Status.HIT]
    assert first.statistics().puts == 1
    assert second.statistics().puts == 0
    first.close()
    assert second.exists([key_of(1)]) == [Status.HIT]
    third = _open(shared_memory)
    second.close()
    assert third.exists([key_of(1)]) == [Status.HIT]
    third.close()


def test_threads_may_open_and_close_at_once(shared_memory: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for number in range(10):
                with closing(_open(shared_memory)) as store:
                    store.put_from([key_of(number)], [value_of(key_of(number), 100)])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_removed_directory_is_made_anew_beside_an_open_handle(
    shared_memory: Path,
) -> None:
    with closing(_open(shared_memory)) as old:
        _put(old, [key_of(1)])
        for path in sorted(shared_memory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        shared_memory.rmdir()
        with closing(_open(shared_memory)) as new:
            assert new.exists([key_of(1)]) == [Status.MISS]
            assert old.exists([key_of(1)]) == [Status.HIT]
            _put(new, [key_of(2)])
            assert old.exists([key_of(2)]) == [Status.MISS]


def test_an_existing_capacity_is_kept_and_said(
    shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(_open(shared_memory, slots=8)):
        pass
    with closing(_open(shared_memory, slots=16)) as store:
        assert store.statistics().bytes_capacity == 8 * SLOT
    assert "32KiB" in caplog.text
    assert "64KiB" in caplog.text


def test_only_its_user_can_read_a_store(shared_memory: Path) -> None:
    with closing(_open(shared_memory)):
        assert shared_memory.stat().st_mode & 0o077 == 0
        for path in shared_memory.rglob("*"):
            assert path.stat().st_mode & 0o077 == 0, path


def test_the_end_of_a_prefix_is_evicted_before_its_beginning(
    shared_memory: Path,
) -> None:
    """Without its beginning the rest could never be found."""
    chain = [key_of(number) for number in range(192)]
    with closing(_open(shared_memory, slots=192)) as store:
        store.put_from(chain, [value_of(key, 100) for key in chain])
        assert store.exists(chain, promise=True) == [Status.HIT] * 192
        time.sleep(0.01)
        fresh = [key_of(number) for number in range(1000, 1064)]
        store.put_from(fresh, [value_of(key, 100) for key in fresh])
        found = store.exists(chain)
    assert found.index(Status.MISS) == 128
    assert found[128:] == [Status.MISS] * 64


def test_the_room_is_really_taken(shared_memory: Path) -> None:
    with closing(_open(shared_memory, slots=1024)):
        facts = (shared_memory / "slab").stat()
        assert facts.st_blocks * 512 >= facts.st_size > 1024 * SLOT


def test_the_default_store_is_half_of_what_is_free_and_4_gib_at_most() -> None:
    assert default_url(12345) == f"local:/dev/shm/akv-{os.geteuid()}-12345"
    free = filesystem.free_bytes(Path("/dev/shm"))
    assert 0 < default_capacity(Path("/dev/shm")) <= min(4 << 30, free // 2)


def test_a_removed_directory_does_not_make_the_living_seem_dead(
    shared_memory: Path,
) -> None:
    """Without the owners' files nobody can tell, so no claim is taken over."""
    with closing(_open(shared_memory)) as store:
        opened = store._opened
        stranger = opened.owner.number + 1000
        assert opened.is_dead(stranger)
        shutil.rmtree(shared_memory / "owners")
        assert not opened.is_dead(stranger)


# A fork.


def test_a_handle_does_not_survive_a_fork(
    shared_memory: Path, nursery: Nursery
) -> None:
    child = nursery.fork(use_after_a_fork, url=f"local:{shared_memory}?capacity=8MiB")
    assert nursery.wait(child) == 0


def test_a_forked_child_does_not_keep_its_dead_parent_alive(
    shared_memory: Path, nursery: Nursery
) -> None:
    url = f"local:{shared_memory}?capacity={8 * SLOT_BYTES}"
    assert nursery.wait(nursery.fork(claim_and_leave_a_child, url=url)) == 0
    with closing(LocalStore.open(url, slot_bytes=SLOT_BYTES)) as store:
        # The claim of the dead process is free again though its child lives.
        keys = [key_of(number) for number in range(8)]
        assert _put(store, keys) == [Status.STORED] * 8
        assert store.statistics().evictions == 0


# Eviction and promises.


def test_the_slots_longest_out_of_use_are_evicted_first(shared_memory: Path) -> None:
    with closing(_open(shared_memory, slots=8)) as store:
        keys = [key_of(number) for number in range(11)]
        assert _put(store, keys[:8]) == [Status.STORED] * 8
        store.get_into(keys[:1], [empty_buffer(100)])
        store.put_from(keys[1:2], [value_of(keys[1], 100)])
        time.sleep(0.002)
        assert _put(store, keys[8:]) == [Status.STORED] * 3
        assert store.exists(keys) == [
            *([Status.HIT] * 2),
            *([Status.MISS] * 3),
            *([Status.HIT] * 6),
        ]
        assert store.statistics().evictions == 3
        assert store.verify() == []


def test_what_is_promised_is_not_evicted_until_the_lease_is_over(
    shared_memory: Path,
) -> None:
    with closing(_open(shared_memory, slots=4, lease=0.3)) as store:
        keys = [key_of(number) for number in range(6)]
        _put(store, keys[:4])
        store.exists(keys[:3], promise=True)
        assert _put(store, keys[4:]) == [Status.STORED] * 2
        assert store.exists(keys[:3]) == [Status.HIT] * 3
        assert store.exists(keys[4:]) == [Status.MISS, Status.HIT]
        store.exists(keys[5:], promise=True)
        assert _put(store, keys[4:5]) == [Status.NO_ROOM]
        assert store.statistics().no_room == 1
        time.sleep(0.3)
        assert _put(store, keys[4:5]) == [Status.STORED]
        assert store.verify() == []


def test_a_get_does_not_end_a_promise(shared_memory: Path) -> None:
    with closing(_open(shared_memory, slots=2, lease=60.0)) as store:
        keys = [key_of(number) for number in range(3)]
        _put(store, keys[:2])
        store.exists(keys[:2], promise=True)
        store.get_into(keys[:2], [empty_buffer(100) for _ in range(2)])
        assert _put(store, keys[2:]) == [Status.NO_ROOM]


def test_a_clock_that_was_set_back_protects_nothing_for_ever(
    shared_memory: Path,
) -> None:
    with closing(_open(shared_memory, slots=2)) as store:
        _put(store, [key_of(1), key_of(2)])
        store._opened.slab.ticks.promise([0, 1], now_ms() + 3_600_000)
        assert _put(store, [key_of(3)]) == [Status.STORED]


def test_a_call_with_more_keys_than_slots_stores_what_it_can(
    shared_memory: Path,
) -> None:
    with closing(_open(shared_memory, slots=8)) as store:
        keys = [key_of(number) for number in range(50)]
        outcomes = store.put_from(keys, [value_of(key, 100) for key in keys])
        assert set(outcomes) <= {Status.STORED, Status.NO_ROOM}
        assert store.statistics().objects == 8
        assert store.verify() == []


# Whole values only.


def test_a_slot_that_changed_hands_during_the_copy_is_a_miss(
    shared_memory: Path,
) -> None:
    with closing(_open(shared_memory, slots=2)) as store:
        key = key_of(1)
        _put(store, [key])
        slab = store._opened.slab
        read = slab.read

        def read_late(slots: Sequence[int], targets: Sequence[Buffer]) -> None:
            store.remove([key])
            store.put_from([key], [value_of(b"another", 100)])
            read(slots, targets)

        slab.read = read_late  # type: ignore[method-assign]
        try:
            assert store.get_into([key], [empty_buffer(100)]) == [Status.MISS]
        finally:
            slab.read = read  # type: ignore[method-assign]


def test_changed_bytes_are_a_failure_once_and_a_miss_from_then_on(
    shared_memory: Path,
) -> None:
    with closing(_open(shared_memory, options="&checksum=on")) as store:
        keys = [key_of(1), key_of(2)]
        _put(store, keys)
        slab = store._opened.slab
        slot = next(at for at in range(8) if is_value_of(keys[0], _slot(slab, at)))
        slab._slots[slot, 50] ^= 1
        buffers = [empty_buffer(100), empty_buffer(100)]
        damaged, good = store.get_into(keys, buffers)
        assert isinstance(damaged, Failure)
        assert damaged.reason.startswith("checksum")
        assert good is Status.HIT
        assert store.exists(keys) == [Status.MISS, Status.HIT]
        assert store.get_into(keys[:1], buffers[:1]) == [Status.MISS]
        assert _put(store, keys[:1]) == [Status.STORED]
        assert store.verify() == []


def _slot(slab: object, at: int) -> memoryview:
    from akv.store.local.slab import Slab

    assert isinstance(slab, Slab)
    buffer = empty_buffer(100)
    slab.read([at], [buffer])
    return buffer


def test_an_exception_in_the_copy_gives_the_slots_back(shared_memory: Path) -> None:
    with closing(_open(shared_memory, slots=4)) as store:
        keys = [key_of(number) for number in range(4)]
        strided = memoryview(bytearray(200))[::2]
        with pytest.raises((ValueError, BufferError)):
            store.put_from(keys[:1], [strided])
        assert store.exists(keys) == [Status.MISS] * 4
        assert _put(store, keys) == [Status.STORED] * 4
        assert store.verify() == []


def test_keys_that_the_index_cannot_hold_fail_alone(shared_memory: Path) -> None:
    from akv.core.keys import BlockKey

    with closing(_open(shared_memory)) as store:
        keys = [BlockKey(b""), key_of(1), BlockKey(b"k" * 600)]
        values = [value_of(b"", 100) for _ in keys]
        first, second, third = store.put_from(keys, values)
        assert isinstance(first, Failure)
        assert second is Status.STORED
        assert isinstance(third, Failure)
        expected = [Status.MISS, Status.HIT, Status.MISS]
        assert store.exists(keys) == expected
        assert store.exists(keys, promise=True) == expected
        assert store.get_into(keys, [empty_buffer(100) for _ in keys]) == expected
        assert store.remove(keys) == [Status.MISS, Status.REMOVED, Status.MISS]


def test_an_object_longer_than_a_slot_is_a_failure(shared_memory: Path) -> None:
    with closing(_open(shared_memory)) as store:
        (outcome,) = store.put_from([key_of(1)], [value_of(b"", SLOT + 1)])
        assert isinstance(outcome, Failure)
        assert store.verify() == []


# Verify sees what is wrong.


def test_verify_sees_a_lost_slot_and_a_wrong_record(shared_memory: Path) -> None:
    with closing(_open(shared_memory)) as store:
        _put(store, [key_of(number) for number in range(3)])
        assert store.verify() == []
        index = store._opened.index
        with index._env.writing() as txn:
            txn.delete(b"\0\0\0\1", db=index._ready)
        assert any("slot 1 is lost" in problem for problem in store.verify())
        with index._env.writing() as txn:
            txn.put(b"\0\0\0\1", b"", db=index._free)
        assert any("not what slot 1 holds" in problem for problem in store.verify())


# A disk, and the end of a boot.


def test_checksums_are_on_for_a_disk_and_off_for_shared_memory(
    shared_memory: Path, tmp_path: Path
) -> None:
    if filesystem.is_memory(tmp_path):
        pytest.skip("the temporary directory is in shared memory")
    with (
        closing(_open(shared_memory)) as memory,
        closing(_open(tmp_path / "s")) as disk,
    ):
        assert not memory.checksum
        assert disk.checksum
        _put(disk, [key_of(1)])
        assert disk.get_into([key_of(1)], [empty_buffer(100)]) == [Status.HIT]


def test_a_disk_store_that_was_closed_is_kept_over_a_boot(tmp_path: Path) -> None:
    if filesystem.is_memory(tmp_path):
        pytest.skip("the temporary directory is in shared memory")
    with closing(_open(tmp_path / "s")) as store:
        _put(store, [key_of(1)])
        slab = store._opened.slab
        assert not slab.state.clean
    # As another boot would find it.
    with closing(_open(tmp_path / "s")) as store:
        slab = store._opened.slab
        slab.write_state(SlabState(clean=True, boot=b"another boot".ljust(36)))
        store._opened.place.owners.joinpath("999").touch()
        store._opened.owner.number += 1000
    with closing(_open(tmp_path / "s")) as store:
        assert store.exists([key_of(1)]) == [Status.HIT]


def _as_left_by_a_power_cut(directory: Path) -> None:
    """The header says: open, in another boot."""
    with (directory / "slab").open("r+b") as file:
        file.seek(1024)
        file.write((0).to_bytes(8, "little") + b"another boot".ljust(36))


@pytest.mark.parametrize("torn", [False, True])
def test_what_is_whole_after_a_power_cut_is_kept_where_checksums_prove_it(
    tmp_path: Path, torn: bool
) -> None:
    if filesystem.is_memory(tmp_path):
        pytest.skip("the temporary directory is in shared memory")
    with closing(_open(tmp_path / "s")) as store:
        _put(store, [key_of(1), key_of(2)])
        (record,) = store._opened.index.find([key_of(2)])
        assert record is not None
        slot = Record.unpack(record).slot
        layout = store._opened.slab.layout
        offset = layout.slots_offset + slot * layout.stride
    _as_left_by_a_power_cut(tmp_path / "s")
    if torn:
        with (tmp_path / "s" / "slab").open("r+b") as file:
            file.seek(offset + 7)
            file.write(b"torn")
    with closing(_open(tmp_path / "s")) as store:
        assert store.get_into([key_of(1)], [empty_buffer(100)]) == [Status.HIT]
        (outcome,) = store.get_into([key_of(2)], [empty_buffer(100)])
        assert (outcome is Status.HIT) is not torn
        assert store.verify() == []


def test_a_torn_index_after_a_power_cut_is_emptied_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if filesystem.is_memory(tmp_path):
        pytest.skip("the temporary directory is in shared memory")
    with closing(_open(tmp_path / "s")) as store:
        _put(store, [key_of(1)])
    _as_left_by_a_power_cut(tmp_path / "s")
    (tmp_path / "s" / "index" / "data.mdb").write_bytes(b"\0" * 32768)
    with closing(_open(tmp_path / "s")) as store:
        assert store.exists([key_of(1)]) == [Status.MISS]
    assert "emptied" in caplog.text


def test_without_checksums_a_disk_store_open_in_another_boot_is_emptied_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if filesystem.is_memory(tmp_path):
        pytest.skip("the temporary directory is in shared memory")
    with closing(_open(tmp_path / "s", options="&checksum=off")) as store:
        _put(store, [key_of(1)])
    _as_left_by_a_power_cut(tmp_path / "s")
    with closing(_open(tmp_path / "s")) as store:
        assert store.exists([key_of(1)]) == [Status.MISS]
        assert store.verify() == []
        _put(store, [key_of(1)])
    assert "emptied" in caplog.text


def test_a_disk_store_whose_process_was_killed_in_this_boot_is_kept(
    tmp_path: Path,
) -> None:
    with closing(_open(tmp_path / "s")) as store:
        _put(store, [key_of(1)])
    slab = tmp_path / "s" / "slab"
    with slab.open("r+b") as file:
        file.seek(1024)
        file.write((0).to_bytes(8, "little") + filesystem.boot_id())
    with closing(_open(tmp_path / "s")) as store:
        assert store.exists([key_of(1)]) == [Status.HIT]
