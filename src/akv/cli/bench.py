"""``akv bench`` measures the stores of this machine against plain memory."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from akv.cli.store import open_existing
from akv.core.errors import ConfigError, StoreError
from akv.core.keys import KeySpace, fingerprint, make_keys
from akv.core.sizes import format_size, parse_size
from akv.store import BlockStore, LocalStore, Status
from akv.trace.needs import need

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from akv.cli.command import Commands
    from akv.core.keys import BlockKey
    from akv.store import Outcome

__all__ = ("Row", "add_command", "measure")

_SHARED_MEMORY = Path("/dev/shm")
_BATCH_BYTES = 8 << 20
_ROUNDS = 3
_LEAST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One store, or memcpy: bytes a second, and microseconds a key looked up."""

    name: str
    put_bytes_per_second: float
    get_bytes_per_second: float
    exists_microseconds: float | None


def add_command(commands: Commands) -> None:
    """Add ``akv bench`` to the commands of a parser."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine's stores against memcpy",
        description="Copies objects in memory, then puts, looks up and gets as many "
        "in a local store of its own in shared memory, and in --store if one is "
        "given, and prints a table. What it puts it removes again. It takes no more "
        "room of a given store than is free there, so that nothing is evicted for "
        "it. Speeds are 10^9 bytes a second, the middle one of three rounds.",
        epilog="example: akv bench --size 2MiB --store mooncake://127.0.0.1:50051",
    )
    parser.add_argument("--store", metavar="URL", help="a store that is there")
    parser.add_argument("--size", default="1MiB", help="bytes of an object (1MiB)")
    parser.add_argument("--total", default="128MiB", help="bytes of a round (128MiB)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object and no progress bar (without this rich is needed: pip "
        "install 'akv-connector[cli]')",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print.

    :raises AkvError: a size is wrong, there is no room, or the store fails
    """
    size = parse_size(options.size, field="size")
    total = parse_size(options.total, field="total")
    if size < 1 or total < _LEAST * size:
        raise ConfigError("total", options.total, f"give at least {_LEAST} x size")
    if options.json:
        rows = measure(size, total, options.store, lambda: None)
        report = {"object_bytes": size, "rows": [asdict(row) for row in rows]}
        print(json.dumps(report, indent=2))
        return 0
    consoles = need("rich.console", extra="cli", what="akv bench")
    table = need("rich.table", extra="cli", what="akv bench").Table()
    progress = need("rich.progress", extra="cli", what="akv bench")
    steps = _ROUNDS * (3 if options.store else 2)
    with progress.Progress(
        console=consoles.Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("measuring", total=steps)
        rows = measure(size, total, options.store, lambda: bar.advance(task))
    table.title = f"objects of {format_size(size)}"
    for name in ("store", "put GB/s", "of memcpy", "get GB/s", "of memcpy", "us a key"):
        table.add_column(
            name, justify="left" if name == "store" else "right", overflow="fold"
        )
    plain = rows[0]
    for row in rows:
        table.add_row(
            row.name,
            f"{row.put_bytes_per_second / 1e9:.2f}",
            f"{row.put_bytes_per_second / plain.put_bytes_per_second:.2f}",
            f"{row.get_bytes_per_second / 1e9:.2f}",
            f"{row.get_bytes_per_second / plain.get_bytes_per_second:.2f}",
            "" if row.exists_microseconds is None else f"{row.exists_microseconds:.2f}",
        )
    consoles.Console().print(table)
    return 0


def measure(
    size: int, total: int, url: str | None, done: Callable[[], None]
) -> list[Row]:
    """memcpy, a local store in shared memory, and the store at ``url`` if given.

    ``done`` is called after each round.
    """
    count = total // size
    source, target = (np.ones((count, size), dtype=np.uint8) for _ in range(2))
    source[:] = np.arange(count, dtype=np.uint8)[:, None]
    rows = [_memcpy(source, target, done)]
    with _own_store(size, total) as store:
        rows.append(_store(store, "local:", source, target, done))
    if url is not None:
        other = open_existing(url)
        try:
            count = min(count, _room(other, size))
            rows.append(_store(other, other.url, source[:count], target[:count], done))
        finally:
            other.close()
    return rows


def _memcpy(
    source: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
    done: Callable[[], None],
) -> Row:
    speeds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for row, other in zip(target, source, strict=True):
            np.copyto(row, other)
        speeds.append(source.nbytes / (time.perf_counter() - started))
        done()
    speed = statistics.median(speeds)
    return Row(
        name="memcpy",
        put_bytes_per_second=speed,
        get_bytes_per_second=speed,
        exists_microseconds=None,
    )


def _store(
    store: BlockStore,
    name: str,
    source: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
    done: Callable[[], None],
) -> Row:
    count = len(source)
    values, buffers = [row.data for row in source], [row.data for row in target]
    space = KeySpace(namespace="akv bench", fingerprint=fingerprint({}))
    rounds = []
    for _ in range(_ROUNDS):
        keys = make_keys(space.prefix, 0, 0, [os.urandom(16) for _ in range(count)])
        target[:] = 0
        try:
            rounds.append(_round(store, keys, values, buffers))
        finally:
            store.remove(keys)
        if not (source == target).all():
            raise StoreError(f"{name} gave other bytes than it was given")
        done()
    put, exists, get = (statistics.median(times) for times in zip(*rounds, strict=True))
    return Row(
        name=name,
        put_bytes_per_second=source.nbytes / put,
        get_bytes_per_second=source.nbytes / get,
        exists_microseconds=1e6 * exists / count,
    )


def _round(
    store: BlockStore,
    keys: Sequence[BlockKey],
    values: Sequence[memoryview],
    buffers: Sequence[memoryview],
) -> tuple[float, float, float]:
    """Seconds of a put, a lookup and a get of all objects, in calls of 8 MiB."""
    batch = max(1, _BATCH_BYTES // values[0].nbytes)
    calls = [slice(start, start + batch) for start in range(0, len(keys), batch)]

    def timed(call: Callable[[slice], list[Outcome]], wanted: Status) -> float:
        started = time.perf_counter()
        outcomes = [outcome for at in calls for outcome in call(at)]
        seconds = time.perf_counter() - started
        strange = [outcome for outcome in outcomes if outcome is not wanted]
        if strange:
            raise StoreError(f"{store.url} answered {strange[0]}, not {wanted}")
        return seconds

    return (
        timed(lambda at: store.put_from(keys[at], values[at]), Status.STORED),
        timed(lambda at: store.exists(keys[at]), Status.HIT),
        timed(lambda at: store.get_into(keys[at], buffers[at]), Status.HIT),
    )


def _room(store: BlockStore, size: int) -> int:
    """Objects that fit without an eviction."""
    numbers = store.statistics()
    if not numbers.bytes_capacity:
        return sys.maxsize
    # A slot is larger than its object, and others write meanwhile.
    free = (numbers.bytes_capacity - numbers.bytes_used) // 2 // size
    if free < _LEAST:
        raise ConfigError(
            "store",
            store.url,
            f"has no room for {_LEAST} objects of {format_size(size)} without an "
            "eviction: give a smaller --size, or `akv store clear` it first",
        )
    return free


@contextmanager
def _own_store(size: int, total: int) -> Iterator[LocalStore]:
    place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    free = shutil.disk_usage(place or tempfile.gettempdir()).free
    if free < 3 * total:
        raise ConfigError(
            "total",
            total,
            f"{format_size(free)} are free in {place or tempfile.gettempdir()}; give a "
            "third of it at most",
        )
    root = tempfile.mkdtemp(prefix=".akv-bench-", dir=place)
    try:
        url = f"local:{quote(root)}/store?capacity={2 * total + (16 << 20)}"
        store = LocalStore.open(url, slot_bytes=size)
        try:
            yield store
        finally:
            store.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)
