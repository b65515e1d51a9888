"""Several processes share one store, and each sees only whole values."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from store.nursery import KEYS, SLOT_BYTES, check_readable, hold_open, work

from akv.store import LocalStore, Status
from akv.testing import key_of, value_of

if TYPE_CHECKING:
    from pathlib import Path

    from store.nursery import Nursery

SLOTS = 20


def test_two_processes_that_write_read_and_evict_see_no_wrong_byte(
    shared_memory: Path, tmp_path: Path, nursery: Nursery
) -> None:
    url = f"local:{shared_memory}?capacity={SLOTS * SLOT_BYTES}"
    reports = [tmp_path / f"{number}.json" for number in range(2)]
    children = [
        nursery.fork(work, url=url, seed=at, seconds=2.0, report=str(report))
        for at, report in enumerate(reports)
    ]
    assert [nursery.wait(child) for child in children] == [0, 0]
    for report in reports:
        numbers = json.loads(report.read_text())
        assert numbers["hits"] > 100
        assert numbers["evictions"] > 100
    store = LocalStore.open(url, slot_bytes=SLOT_BYTES)
    try:
        assert store.verify() == []
        assert check_readable(store, list(range(KEYS))) > 0
    finally:
        store.close()
    assert list((shared_memory / "owners").iterdir()) == []


def test_what_one_process_promised_another_does_not_evict(
    shared_memory: Path, tmp_path: Path, nursery: Nursery
) -> None:
    url = f"local:{shared_memory}?capacity={SLOTS * SLOT_BYTES}"
    store = LocalStore.open(url, slot_bytes=SLOT_BYTES, lease=60.0)
    try:
        keys = [key_of(number) for number in range(1000, 1005)]
        store.put_from(keys, [value_of(key, 100) for key in keys])
        store.exists(keys, promise=True)
        report = tmp_path / "report"
        child = nursery.fork(work, url=url, seed=1, seconds=0.5, report=str(report))
        assert nursery.wait(child) == 0
        assert json.loads(report.read_text())["evictions"] > 0
        assert store.exists(keys) == [Status.HIT] * 5
    finally:
        store.close()


def test_a_generation_that_one_process_raised_another_sees(
    shared_memory: Path, tmp_path: Path, nursery: Nursery
) -> None:
    url = f"local:{shared_memory}?capacity={SLOTS * SLOT_BYTES}"
    ready = tmp_path / "ready"
    child = nursery.fork(hold_open, url=url, ready=str(ready))
    while not ready.exists():
        time.sleep(0.001)
    store = LocalStore.open(url, slot_bytes=SLOT_BYTES)
    assert store.raise_generation(b"scope") == 1
    store.close()
    store = LocalStore.open(url, slot_bytes=SLOT_BYTES)
    assert store.generation(b"scope") == 1
    store.close()
    nursery.kill(child)
