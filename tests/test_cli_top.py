"""``akv top``: what stores hold and what open sessions do."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from akv.cli import main
from akv.core.events import BreakerClosed, BreakerOpened
from akv.sinks.jsonl import JsonLines
from akv.store import LocalStore, MemoryStore
from akv.testing.stores import GatedStore
from harness import OBJECT
from serving import HASHES, serving

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

pytestmark = pytest.mark.anyio


def look(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What one look gives."""
    capsys.readouterr()
    assert main(["top", *arguments, "--once", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


async def test_an_open_session_is_shown_with_what_is_in_flight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a load hangs its bytes are in flight; then it has landed."""
    log = tmp_path / "events.jsonl"
    inner = MemoryStore()
    async with serving(log, inner) as server:
        await server.save("writer", HASHES[:6])
    store = GatedStore(inner, gated=("get_into",))
    async with serving(log, store) as server, anyio.create_task_group() as tasks:
        assert await server.lookup("reader", HASHES) == 6
        tasks.start_soon(server.load, "reader", HASHES[:6])
        await anyio.to_thread.run_sync(store.wait_until_held)
        told = look(capsys, str(log))
        (session,) = told["sessions"]
        assert (session["loads"], session["load_bytes"]) == (1, 6 * OBJECT)
        assert (session["role"], session["pid"]) == ("session", os.getpid())
        assert session["breaker"] == "closed"
        assert told["rates"]["block_hit_ratio"] == 0.6
        assert told["rates"]["save_bytes_per_second"] > 0
        store.open()
    told = look(capsys, str(log))
    assert told["sessions"] == []
    assert told["rates"]["loads_per_second"] > 0


async def test_the_breaker_is_shown_until_it_closes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason for which it opened."""
    log = tmp_path / "events.jsonl"
    async with serving(log, MemoryStore()):
        beside = JsonLines(str(log), role="session")
        beside.on(BreakerOpened(url="memory:", reason="wire cut"))
        (session,) = look(capsys, str(log))["sessions"]
        assert session["breaker"] == "open: wire cut"
        beside.on(BreakerClosed(url="memory:", seconds=1.0))
        (session,) = look(capsys, str(log))["sessions"]
        assert session["breaker"] == "closed"
        beside.close()


async def test_a_store_is_shown_without_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Objects and bytes; evictions of other processes are not known."""
    store = LocalStore.open(f"local:{tmp_path}/s?capacity=4MiB", slot_bytes=4096)
    (facts,) = look(capsys, "--store", store.url)["stores"]
    store.close()
    assert facts["objects"] == 0
    assert facts["bytes_capacity"] == 4 << 20
    assert facts["evictions"] is None


async def test_what_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file, a store, an interval of nothing."""
    for arguments in (
        [str(tmp_path / "no.jsonl")],
        ["--store", f"local:{tmp_path}/no"],
        ["--store", "memory:", "--interval", "0"],
    ):
        assert main(["top", *arguments, "--once", "--json"]) == 1
        assert capsys.readouterr().err.startswith("akv: ")


async def test_the_live_view_is_drawn_until_it_is_interrupted(tmp_path: Path) -> None:
    """In a terminal of its own; Ctrl-C ends it with status 0."""
    pytest.importorskip("rich")
    log = tmp_path / "events.jsonl"
    async with serving(log, MemoryStore()) as server:
        await server.save("writer", HASHES[:6])
        shown = await anyio.to_thread.run_sync(_watch, log)
    assert "open sessions" in shown
    assert f"session {os.getpid()}" in shown


def _watch(log: Path) -> str:
    """What a terminal shows of a live view."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "akv.cli", "top", str(log), "--interval", "0.05"],
        stdin=theirs,
        stdout=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    ) as viewer:
        os.close(theirs)
        shown = ""
        while "quiet for" not in shown or f"session {os.getpid()}" not in shown:
            shown += os.read(ours, 65536).decode(errors="replace")
        viewer.send_signal(signal.SIGINT)
        while True:
            try:
                if not os.read(ours, 65536):
                    break
            except OSError:
                break  # the other end is closed
        assert viewer.wait() == 0
    os.close(ours)
    return shown
