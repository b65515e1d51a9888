"""How Mooncake is found and reached, and what is said when it is not."""

from __future__ import annotations

import mmap
import os
from contextlib import closing
from typing import TYPE_CHECKING

from mooncake_master import HOST, BlackHole, free_port

from akv.store import open_store
from akv.store.mooncake import MooncakeStore
from akv.store.mooncake.client import _missing_library, master_answers
from akv.store.mooncake.prefault import _new, mappings, prefault

if TYPE_CHECKING:
    import pytest
    from mooncake_master import Master


def test_a_missing_library_is_named_with_its_debian_package() -> None:
    said = _missing_library(
        "libibverbs.so.1: cannot open shared object file: No such file or directory"
    )
    assert "libibverbs.so.1" in said
    assert "apt-get install libibverbs1" in said


def test_a_library_without_a_known_package_is_named() -> None:
    said = _missing_library("libodd.so.3: cannot open shared object file: No such file")
    assert "libodd.so.3" in said
    assert "apt-get" not in said


def test_another_import_error_is_passed_on() -> None:
    assert "undefined symbol: x" in _missing_library("undefined symbol: x")


def test_a_living_master_is_told_from_a_stopped_one_and_from_none(
    master: Master,
) -> None:
    assert master_answers(HOST, master.port)
    master.stop()
    try:
        assert not master_answers(HOST, master.port, 0.3)
    finally:
        master.cont()
    with BlackHole() as hole:
        assert not master_answers(HOST, hole.port, 0.3)
    assert not master_answers(HOST, free_port(), 0.3)


def test_a_url_opens_a_pool(master: Master) -> None:
    for lend in (True, False):
        url = master.url()
        with closing(open_store(url, slot_bytes=4096, lend_memory=lend)) as store:
            assert isinstance(store, MooncakeStore)
            assert f"mooncake://{HOST}:{master.port}?" in store.url
            assert store.lease == 5.0


def test_what_a_person_has_set_for_mooncake_stays(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "2345")
    with closing(open_store(master.url(), slot_bytes=4096)):
        assert os.environ["MC_RPC_TIMEOUT_MS"] == "2345"


def test_the_pages_of_one_new_mapping_of_that_size_are_made_ready() -> None:
    size = 96 << 20
    before = mappings()
    fresh = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert prefault(before, size) in (0, size)  # 0: an older kernel
    assert prefault(mappings(), size) == 0
    assert prefault(before, 0) == 0
    fresh.close()


def test_a_mapping_that_has_grown_onto_its_neighbour_is_made_ready() -> None:
    """The segment of a second pool comes beside the first one's: one mapping."""
    size = 96 << 20
    kept = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
    before = mappings()
    kept.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    assert prefault(before, size) in (0, size)  # 0: an older kernel
    start = 1 << 40
    one, both = {start: size}, {start: 2 * size}
    assert list(_new(one, both)) == [(start + size, start + 2 * size)]
    assert list(_new({start + size: size}, both)) == [(start, start + size)]
    assert list(_new({start + size: 4096}, both)) == [
        (start, start + size),
        (start + size + 4096, start + 2 * size),
    ]
    assert list(_new(both, both)) == list(_new(both, one)) == []
    for mapping in kept:
        mapping.close()
