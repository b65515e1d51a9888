"""Lookups against what LMDB alone takes to read as many records.

The bare side reads records of the length that the store's index has, out of a table
of as many, under keys of the same length, in one read transaction.
"""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

import akv
from akv.core.keys import BlockKey, KeySpace, make_keys
from akv.portal import Portal
from akv.store import LocalStore, Status
from measure import Case, Row, Settings, Side, Target, Unit, clock, compare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ("CASES",)

_RECORDS = 8192
_RECORD_BYTES = 32
_OBJECT = 4096
_BLOCK = 16
_TOKENS = 8000
_TARGET = Target(3.0, at_least=False)
_SPACE = KeySpace(namespace="bench", fingerprint=akv.fingerprint({"model": "bench"}))


def _hashes() -> list[bytes]:
    random = np.random.default_rng(2).bytes(32 * _RECORDS)
    return [random[start : start + 32] for start in range(0, len(random), 32)]


class _Bare:
    """An LMDB table of records, and nothing else."""

    def __init__(self, path: Path, keys: Sequence[BlockKey]) -> None:
        path.mkdir()
        self._env = lmdb.open(
            str(path), map_size=64 << 20, max_dbs=1, sync=False, metasync=False
        )
        self._table = self._env.open_db(b"index")
        record = bytes(range(_RECORD_BYTES))
        with self._env.begin(self._table, write=True) as txn:
            for key in keys:
                txn.put(key, record)

    def read(self, keys: Sequence[BlockKey]) -> int:
        """Read records in one transaction; how many were there."""
        with self._env.begin(self._table) as txn:
            get = txn.get
            found = [get(key) for key in keys]
        return len(found) - found.count(None)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


@contextmanager
def _stores(settings: Settings) -> Iterator[tuple[str, LocalStore, _Bare, list[bytes]]]:
    directory = settings.in_memory() / "lookup"
    directory.mkdir()
    hashes = _hashes()
    keys = make_keys(_SPACE.prefix, 0, 0, hashes)
    url = f"local:{directory / 'store'}?capacity={_RECORDS * _OBJECT}"
    store = LocalStore.open(url, slot_bytes=_OBJECT)
    try:
        value = memoryview(bytes(_OBJECT))
        for start in range(0, _RECORDS, 64):
            part = keys[start : start + 64]
            store.put_from(part, [value] * len(part))
        bare = _Bare(directory / "bare", keys)
        try:
            yield url, store, bare, hashes
        finally:
            bare.close()
    finally:
        store.close()
        shutil.rmtree(directory)


def _of_store(settings: Settings) -> list[Row]:
    calls = 100 if settings.quick else 400
    with _stores(settings) as (_, store, bare, hashes):
        keys = make_keys(_SPACE.prefix, 0, 0, hashes)
        asked = [
            list(keys[start : start + 64])
            for start in (n * 64 % (_RECORDS - 64) for n in range(calls))
        ]
        found = [0, 0]

        def ask() -> None:
            hits = 0
            for some in asked:
                hits += store.exists(some, promise=True).count(Status.HIT)
            found[0] = hits

        def read() -> None:
            found[1] = sum(bare.read(some) for some in asked)

        return [
            compare(
                "lookup",
                "64 keys that hit, local store",
                Side(name="akv", run=clock(ask), moved=lambda: found[0]),
                Side(name="LMDB", run=clock(read), moved=lambda: found[1]),
                unit=Unit.MICROSECONDS,
                rounds=settings.rounds(9),
                amount=calls * 64,
                calls=calls,
                target=_TARGET,
            )
        ]


def _of_session(settings: Settings) -> list[Row]:
    blocks = _TOKENS // _BLOCK
    calls = 20 if settings.quick else 60
    region = akv.Region(name="object", memory=0, offset=0, stride=_OBJECT, size=_OBJECT)
    group = akv.Group(block_size=_BLOCK, regions=(region,))
    geometry = akv.Geometry(num_blocks=1, hash_unit=_BLOCK, groups=(group,))
    with _stores(settings) as (url, _, bare, hashes):
        prompts = [
            tuple(hashes[start : start + blocks])
            for start in (n * 97 % (_RECORDS - blocks) for n in range(calls))
        ]
        specs = [
            akv.LookupSpec(
                request_id=f"r{number}",
                space=_SPACE.prefix,
                hashes=prompt,
                askable_blocks=blocks,
            )
            for number, prompt in enumerate(prompts)
        ]
        keys = [make_keys(_SPACE.prefix, 0, 0, prompt) for prompt in prompts]
        found = [0, 0]

        async def look_up(session: akv.Session) -> float:
            start = time.perf_counter()
            found[0] = 0
            for spec in specs:
                found[0] += await session.lookup(spec)
            return time.perf_counter() - start

        def read() -> None:
            found[1] = sum(bare.read(some) for some in keys)

        portal = Portal.start(akv.Config(store=url), geometry)
        try:
            return [
                compare(
                    "lookup",
                    "8,000 tokens (500 keys), session",
                    Side(
                        name="akv",
                        run=lambda: _seconds(portal.call(look_up, timeout=60)),
                        moved=lambda: found[0],
                    ),
                    Side(name="LMDB", run=clock(read), moved=lambda: found[1]),
                    unit=Unit.MICROSECONDS,
                    rounds=settings.rounds(9),
                    amount=calls * blocks,
                    calls=calls,
                )
            ]
        finally:
            portal.close()


def _seconds(value: Any) -> float:
    return float(value)


CASES = [
    Case(name="lookup/store", title="64 keys that hit", run=_of_store),
    Case(
        name="lookup/session", title="8,000 tokens, through a session", run=_of_session
    ),
]
