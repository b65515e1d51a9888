"""A process killed at any moment leaves a store that is whole."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from store.nursery import (
    KEYS,
    SLOT_BYTES,
    check_readable,
    open_once,
    put_for_ever,
    size_of,
)

from akv.store import LocalStore, Status
from akv.testing import key_of, value_of

if TYPE_CHECKING:
    from pathlib import Path

    from store.nursery import Nursery

SLOTS = 24
KILLS = 200


def _open(url: str) -> LocalStore:
    return LocalStore.open(url, slot_bytes=SLOT_BYTES, lease=0.0)


def _url(directory: Path, options: str = "") -> str:
    return f"local:{directory}?capacity={SLOTS * SLOT_BYTES}{options}"


def _assert_no_slot_is_lost(url: str) -> None:
    store = _open(url)
    try:
        store.clear(b"")
        for number in range(1000, 1000 + SLOTS):
            key = key_of(number)
            assert store.put_from([key], [value_of(key, 100)]) == [Status.STORED]
        assert store.statistics().objects == SLOTS
        assert store.statistics().evictions == 0
        assert store.verify() == []
    finally:
        store.close()


def test_killed_at_200_random_moments_it_opens_whole_and_loses_no_slot(
    shared_memory: Path, nursery: Nursery
) -> None:
    rng = random.Random(20261)
    url = _url(shared_memory)
    hits = 0
    for round_ in range(KILLS):
        child = nursery.fork(put_for_ever, url=url, seed=round_)
        time.sleep(rng.uniform(0.0, 0.025))
        nursery.kill(child)
        store = _open(url)
        try:
            assert store.verify() == []
            hits += check_readable(store, list(range(KEYS)))
        finally:
            store.close()
    # Else the children were killed before they did anything.
    assert hits > 10 * KILLS
    _assert_no_slot_is_lost(url)


def test_killed_beside_a_process_that_lives_it_loses_no_slot(
    shared_memory: Path, nursery: Nursery
) -> None:
    rng = random.Random(20262)
    url = _url(shared_memory, "&checksum=on")
    store = _open(url)
    try:
        for round_ in range(40):
            children = [
                nursery.fork(put_for_ever, url=url, seed=100 * round_ + at)
                for at in range(2)
            ]
            time.sleep(rng.uniform(0.0, 0.03))
            for child in children:
                nursery.kill(child)
            assert store.verify() == []
            check_readable(store, list(range(KEYS)))
            keys = [key_of(number) for number in range(4)]
            store.remove(keys)
            values = [value_of(key, size_of(at)) for at, key in enumerate(keys)]
            assert store.put_from(keys, values) == [Status.STORED] * 4
    finally:
        store.close()
    _assert_no_slot_is_lost(url)


def test_killed_while_it_is_made_it_is_made_anew(
    shared_memory: Path, nursery: Nursery
) -> None:
    rng = random.Random(20263)
    url = _url(shared_memory)
    for _ in range(30):
        child = nursery.fork(open_once, url=url)
        time.sleep(rng.uniform(0.0, 0.006))
        nursery.kill(child)
        store = _open(url)
        try:
            assert store.verify() == []
            assert store.statistics().bytes_capacity == SLOTS * SLOT_BYTES
        finally:
            store.close()
        for path in sorted(shared_memory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def test_a_dead_owners_claims_are_taken_and_a_living_ones_are_not(
    shared_memory: Path,
) -> None:
    url = _url(shared_memory)
    store = _open(url)
    try:
        opened = store._opened
        keys = [key_of(number) for number in range(SLOTS)]
        dead = opened.index.new_owner()
        opened.index.claim(keys[:3], dead, opened.is_dead)
        opened.index.claim(keys[3:5], opened.owner.number, opened.is_dead)
        for key in keys:
            store.put_from([key], [value_of(key, 100)])
        # Two are claimed by this process, which lives.
        assert store.statistics().objects == SLOTS - 2
        assert store.verify() == []
    finally:
        store.close()
    _assert_no_slot_is_lost(url)
