"""Bad input gives a clear error or a miss, and never a wrong byte."""

from __future__ import annotations

import os
import random
import shutil
import struct
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from akv.core.errors import (
    ConfigError,
    StoreCorruptError,
    StoreError,
    StoreMismatchError,
    StoreUnavailableError,
)
from akv.store import Failure, LocalStore, Status, open_store
from akv.testing import empty_buffer, is_value_of, key_of, value_of

if TYPE_CHECKING:
    from pathlib import Path

SLOT = 4096
KEYS = [key_of(number) for number in range(40)]


def _open(directory: Path, options: str = "", slot_bytes: int = SLOT) -> LocalStore:
    url = f"local:{directory}?capacity={64 * SLOT}{options}"
    return LocalStore.open(url, slot_bytes=slot_bytes)


def _fill(directory: Path) -> None:
    with closing(_open(directory)) as store:
        store.put_from(KEYS, [value_of(key, SLOT) for key in KEYS])


def _contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in ("lock", "lock.mdb")
    }


# The address.


@pytest.mark.parametrize(
    "url",
    [
        "local:",
        "local:relative/path",
        "local://host/path",
        "local:/dev/shm/x?size=4GiB",
        "local:/dev/shm/x?capacity=4G",
        "local:/dev/shm/x?capacity=",
        "local:/dev/shm/x?checksum=maybe",
        "local:/dev/shm/x#y",
        "memory:?size=3",
        "unknown:/x",
        "/dev/shm/x",
        "",
    ],
)
def test_an_address_that_cannot_be_meant_is_refused_with_a_right_one(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, slot_bytes=SLOT)
    assert caught.value.fix


def test_an_unknown_option_names_the_nearest_known_one(shared_memory: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'capacity'"):
        open_store(f"local:{shared_memory}?capasity=4GiB", slot_bytes=SLOT)
    assert not shared_memory.exists()


@pytest.mark.parametrize("lease", [-1.0, 1e9])
def test_a_lease_out_of_bounds_is_refused(shared_memory: Path, lease: float) -> None:
    with pytest.raises(ConfigError, match="lease"):
        open_store(f"local:{shared_memory}", slot_bytes=SLOT, lease=lease)
    assert not shared_memory.exists()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("mine")
    with pytest.raises(ConfigError, match="a store is a directory"):
        _open(place)
    assert place.read_text() == "mine"


def test_a_directory_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "holiday.jpg").write_text("mine")
    with pytest.raises(ConfigError, match=r"holiday\.jpg"):
        _open(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"index", "holiday.jpg"}


def test_a_parent_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="is no directory"):
        _open(tmp_path / "not mounted" / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_said_so() -> None:
    with pytest.raises(StoreUnavailableError, match="/proc/akv"):
        LocalStore.open("local:/proc/akv?capacity=1MiB", slot_bytes=SLOT)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_directory_without_write_permission_is_said_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreUnavailableError, match="cannot be written"):
            _open(tmp_path / "store")
        with pytest.raises(StoreUnavailableError, match="cannot be written"):
            _open(tmp_path)
    finally:
        tmp_path.chmod(0o700)


# Too little room.


def test_a_capacity_below_two_objects_is_refused(shared_memory: Path) -> None:
    with pytest.raises(ConfigError, match="8192 bytes"):
        LocalStore.open(f"local:{shared_memory}?capacity=8191", slot_bytes=SLOT)
    assert not shared_memory.exists()


def test_more_than_is_free_is_refused_before_anything_is_made(
    shared_memory: Path,
) -> None:
    with pytest.raises(StoreUnavailableError) as caught:
        LocalStore.open(f"local:{shared_memory}?capacity=900TiB", slot_bytes=1 << 30)
    text = str(caught.value)
    for word in ("900TiB", "are free", "?capacity=", "--shm-size", "--ipc=host"):
        assert word in text
    assert not shared_memory.exists()


def test_a_small_filesystem_is_refused_with_its_size(tiny_filesystem: Path) -> None:
    place = tiny_filesystem / "store"
    with pytest.raises(StoreUnavailableError, match=r"8\.0MiB|8MiB") as caught:
        LocalStore.open(f"local:{place}?capacity=16MiB", slot_bytes=SLOT)
    assert "?capacity=" in str(caught.value)
    assert list(tiny_filesystem.iterdir()) == []


def test_a_default_capacity_fits_a_small_filesystem(tiny_filesystem: Path) -> None:
    place = tiny_filesystem / "store"
    with closing(LocalStore.open(f"local:{place}", slot_bytes=SLOT)) as store:
        assert 1 << 20 <= store.statistics().bytes_capacity <= 4 << 20


def test_a_full_filesystem_fails_puts_and_serves_what_it_has(
    tiny_filesystem: Path,
) -> None:
    place = tiny_filesystem / "store"
    url = f"local:{place}?capacity=2MiB"
    with closing(LocalStore.open(url, slot_bytes=SLOT, lease=0.0)) as store:
        store.put_from(KEYS, [value_of(key, SLOT) for key in KEYS])
        filler = tiny_filesystem / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
        # A reader that stays keeps the index from using its pages again, so
        # it has to grow, and cannot.
        failed = 0
        with store._opened.index._env._env.begin():
            for number in range(1000, 5000):
                key = key_of(number)
                (outcome,) = store.put_from([key], [value_of(key, SLOT)])
                if isinstance(outcome, Failure):
                    assert "cannot grow" in outcome.reason
                    failed += 1
                    if failed == 20:
                        break
            assert failed == 20
            _assert_only_right_bytes(store, [key_of(n) for n in range(900, 5000)])
        assert store.put_from([key_of(7000)], [value_of(key_of(7000), SLOT)]) == [
            Status.STORED
        ]
        assert store.verify() == []
        filler.unlink()
    with closing(LocalStore.open(url, slot_bytes=SLOT)) as store:
        assert store.verify() == []
        _assert_only_right_bytes(store, [key_of(n) for n in range(900, 7001)])
        store.clear(b"")
        many = [key_of(number) for number in range(512)]
        for key in many:
            assert store.put_from([key], [value_of(key, 10)]) == [Status.STORED]
        assert store.statistics().evictions == 0


def _assert_only_right_bytes(store: LocalStore, keys: list[object]) -> None:
    buffers = [empty_buffer(SLOT) for _ in keys]
    outcomes = store.get_into(keys, buffers)  # type: ignore[arg-type]
    hits = 0
    for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        assert outcome in (Status.HIT, Status.MISS)
        if outcome is Status.HIT:
            assert isinstance(key, bytes)
            assert is_value_of(key, buffer)
            hits += 1
    assert hits > 0


def test_a_full_index_fails_puts_and_recovers(shared_memory: Path) -> None:
    with closing(_open(shared_memory)) as store:
        environment = store._opened.index._env._env
        size = environment.info()["map_size"]
        store.put_from(KEYS, [value_of(key, SLOT) for key in KEYS])
        environment.set_mapsize(1)
        outcomes: list[object] = []
        with environment.begin():
            for number in range(100, 160):
                outcomes += store.put_from([key_of(number)], [value_of(b"", 10)])
        failures = [each for each in outcomes if isinstance(each, Failure)]
        assert failures
        assert all("cannot grow" in failure.reason for failure in failures)
        _assert_only_right_bytes(store, list(KEYS))
        environment.set_mapsize(size)
        assert store.put_from([key_of(999)], [value_of(b"", 10)]) == [Status.STORED]
        assert store.verify() == []


# Made for something else.


def test_another_slot_size_is_refused_and_nothing_touched(shared_memory: Path) -> None:
    _fill(shared_memory)
    before = _contents(shared_memory)
    with pytest.raises(StoreMismatchError) as caught:
        _open(shared_memory, slot_bytes=SLOT - 1)
    text = str(caught.value)
    assert "4096" in text
    assert "4095" in text
    assert f"remove the directory {shared_memory}" in text
    assert _contents(shared_memory) == before


def test_another_checksum_setting_is_refused(shared_memory: Path) -> None:
    _fill(shared_memory)
    with pytest.raises(StoreMismatchError, match="checksum=off, not on"):
        _open(shared_memory, "&checksum=on")


def test_another_format_version_is_refused_and_nothing_touched(
    shared_memory: Path,
) -> None:
    _fill(shared_memory)
    with (shared_memory / "slab").open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 99))
    before = _contents(shared_memory)
    with pytest.raises(StoreMismatchError, match=r"version 99.*version 1"):
        _open(shared_memory)
    assert _contents(shared_memory) == before


def test_a_mismatch_is_found_while_it_is_open_too(shared_memory: Path) -> None:
    with closing(_open(shared_memory)) as store:
        with pytest.raises(StoreMismatchError):
            _open(shared_memory, slot_bytes=2 * SLOT)
        assert store.exists(KEYS[:1]) == [Status.MISS]


# Damage.


def _refuse_as_damaged(directory: Path) -> None:
    with pytest.raises(StoreCorruptError) as caught:
        _open(directory)
    assert f"remove the directory {directory}" in str(caught.value)
    shutil.rmtree(directory)
    with closing(_open(directory)) as store:
        assert store.exists(KEYS) == [Status.MISS] * len(KEYS)


def test_a_slab_with_another_beginning_is_refused(shared_memory: Path) -> None:
    _fill(shared_memory)
    with (shared_memory / "slab").open("r+b") as file:
        file.write(b"garbage!")
    _refuse_as_damaged(shared_memory)


@pytest.mark.parametrize("at", [12, 16, 24, 32, 47, 48])
def test_a_slab_with_a_damaged_header_is_refused(shared_memory: Path, at: int) -> None:
    _fill(shared_memory)
    with (shared_memory / "slab").open("r+b") as file:
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 0x40]))
    _refuse_as_damaged(shared_memory)


@pytest.mark.parametrize("size", [0, 100, 4096, 40_000])
def test_a_truncated_slab_is_refused(shared_memory: Path, size: int) -> None:
    _fill(shared_memory)
    os.truncate(shared_memory / "slab", size)
    _refuse_as_damaged(shared_memory)


def test_a_slab_and_an_index_of_two_stores_are_refused(shared_memory: Path) -> None:
    other = shared_memory.with_name(shared_memory.name + "-other")
    try:
        _fill(shared_memory)
        _fill(other)
        shutil.copy(other / "slab", shared_memory / "slab")
        with pytest.raises(StoreCorruptError, match="do not belong together"):
            _open(shared_memory)
    finally:
        shutil.rmtree(other)


def test_a_missing_index_is_refused(shared_memory: Path) -> None:
    _fill(shared_memory)
    (shared_memory / "index" / "data.mdb").unlink()
    _refuse_as_damaged(shared_memory)


@pytest.mark.parametrize("size", [0, 1000, 8192, 20_000])
def test_a_truncated_index_is_refused(shared_memory: Path, size: int) -> None:
    _fill(shared_memory)
    os.truncate(shared_memory / "index" / "data.mdb", size)
    _refuse_as_damaged(shared_memory)


def test_an_index_full_of_garbage_is_refused(shared_memory: Path) -> None:
    _fill(shared_memory)
    data = shared_memory / "index" / "data.mdb"
    data.write_bytes(random.Random(1).randbytes(data.stat().st_size))
    _refuse_as_damaged(shared_memory)


def test_a_damaged_lock_file_of_the_index_harms_nothing(shared_memory: Path) -> None:
    _fill(shared_memory)
    lock = shared_memory / "index" / "lock.mdb"
    lock.write_bytes(random.Random(1).randbytes(lock.stat().st_size))
    try:
        with closing(_open(shared_memory)) as store:
            _assert_only_right_bytes(store, list(KEYS))
    except StoreError:
        return


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_page_of_the_index_is_refused_or_harms_nothing(
    shared_memory: Path, seed: int
) -> None:
    _fill(shared_memory)
    rng = random.Random(seed)
    with (shared_memory / "index" / "data.mdb").open("r+b") as file:
        for _ in range(4):
            at = rng.randrange(20 * 4096)
            file.seek(at)
            file.write(rng.randbytes(rng.choice((1, 8, 200))))
    try:
        with closing(_open(shared_memory)) as store:
            buffers = [empty_buffer(SLOT) for _ in KEYS]
            outcomes = store.get_into(KEYS, buffers)
            for key, buffer, outcome in zip(KEYS, buffers, outcomes, strict=True):
                assert outcome is not Status.HIT or is_value_of(key, buffer)
    except StoreError:
        # Refused, which is as good; that it names the place is tested above.
        return


def test_an_index_that_contradicts_itself_is_refused(shared_memory: Path) -> None:
    with closing(_open(shared_memory)) as store:
        store.put_from(KEYS, [value_of(key, SLOT) for key in KEYS])
        index = store._opened.index
        with index._env.writing() as txn:
            one, two = (txn.get(key, db=index._records) for key in KEYS[:2])
            assert one is not None
            assert two is not None
            txn.put(KEYS[0], two, db=index._records)
            txn.put(KEYS[1], one, db=index._records)
    _refuse_as_damaged(shared_memory)
