"""A log is read to its last whole line, over several files, processes and clocks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from akv.core.events import (
    Event,
    LookupSkipped,
    SaveStored,
    SessionOpened,
    StoreOpened,
    as_dict,
    from_dict,
)
from akv.sinks.jsonl import JsonLines, rolled
from akv.store import MemoryStore
from akv.trace.reading import LogError, Tail, read_logs
from akv.trace.story import tell
from serving import HASHES, serving

if TYPE_CHECKING:
    from pathlib import Path


def skipped(number: int) -> LookupSkipped:
    """An event that tells itself from others."""
    return LookupSkipped(request_id=f"r-{number}", reason="none")


def opened(t: float, day: float) -> SessionOpened:
    """A session opened at ``t``, when the time of day was ``day``."""
    return SessionOpened(
        t=t,
        role="session",
        store="memory:",
        staging_bytes=0,
        block_tokens=16,
        unix_seconds=day,
    )


def ids(path: Path) -> list[str]:
    """The request ids of a log, in order."""
    events = [record.event for record in read_logs([path]).records]
    return [event.request_id for event in events if isinstance(event, LookupSkipped)]


@pytest.mark.anyio
async def test_every_event_of_a_session_comes_back_as_it_was(log: Path) -> None:
    """What was written is what is read, each with where it comes from."""
    async with serving(log, MemoryStore()) as server:
        await server.save("a", HASHES)
        assert await server.lookup("b", HASHES) == 10
        await server.load("b", HASHES[:8])
    text = log.read_text()  # noqa: ASYNC240
    lines = [json.loads(line) for line in text.splitlines()]
    told = read_logs([log])
    assert (told.unreadable, told.unknown) == (0, 0)
    assert [as_dict(record.event)["event"] for record in told.records] == [
        line["event"] for line in lines
    ]
    for record, line in zip(told.records, lines, strict=True):
        assert as_dict(record.event).items() <= line.items()
        assert (record.role, record.pid, record.rank) == ("session", os.getpid(), 0)


def test_an_event_of_another_version_is_read_as_far_as_it_goes() -> None:
    """New fields have their default, strange ones are left out, others are None."""
    event = SaveStored(
        request_id="r", job_id=1, stored=1, existed=0, bytes=9, seconds=0.5
    )
    assert from_dict({**as_dict(event), "strange": 1}) == event
    old = as_dict(opened(1.0, 2.0))
    del old["block_tokens"]
    read = from_dict(old)
    assert isinstance(read, SessionOpened)
    assert read.block_tokens == 0
    assert from_dict({"event": "akv.of.the.future"}) is None
    assert from_dict({"event": "akv.save.stored"}) is None


def test_a_killed_process_leaves_whole_lines(log: Path) -> None:
    """kill -9 in the middle of writing: every line but the last can be read."""
    script = (
        "import sys; from akv.sinks.jsonl import JsonLines\n"
        "from akv.core.events import LookupSkipped\n"
        "sink = JsonLines(sys.argv[1], role='victim'); n = 0\n"
        "while True:\n"
        "    sink.on(LookupSkipped(request_id=f'r-{n}', reason='none')); n += 1\n"
        "    n == 500 and print('enough', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(log)], stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "enough\n"
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    found = ids(log)
    assert len(found) >= 500
    assert found == [f"r-{number}" for number in range(len(found))]


def test_half_a_line_is_left_out_and_counted(log: Path) -> None:
    """At the end of a file, and in its middle, where another process went on."""
    sink = JsonLines(str(log), role="session")
    sink.on(skipped(1))
    whole = log.read_bytes()
    sink.on(skipped(2))
    sink.close()
    log.write_bytes(log.read_bytes() + whole[:40] + whole + whole[:60])
    told = read_logs([log])
    assert ids(log) == ["r-1", "r-1", "r-2"]
    assert told.unreadable == 1


def test_a_full_file_becomes_the_one_before(log: Path) -> None:
    """Two files at most, and the newest one says by itself what is open."""
    sink = JsonLines(str(log), role="session", rank=3, most_bytes=2000)
    store = StoreOpened(url="memory:", objects=0, bytes_capacity=0, seconds=0.1)
    sink.on(store)
    sink.on(opened(1.0, 1000.0))
    for number in range(200):
        sink.on(skipped(number))
    sink.close()
    assert sorted(path.name for path in log.parent.iterdir()) == [
        log.name,
        rolled(log).name,
    ]
    for path in (log, rolled(log)):
        assert path.stat().st_size < 2500
    newest = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in newest[:2]] == [store.name, SessionOpened.name]
    assert all(line["rank"] == 3 for line in newest)
    found = ids(log)
    assert found == [f"r-{number}" for number in range(200 - len(found), 200)]
    assert len(found) > 10


def test_several_writers_share_a_file_that_becomes_full(log: Path) -> None:
    """Nobody writes on into a file that is no longer read, and no line is torn."""
    sinks = [
        JsonLines(str(log), role=f"writer-{n}", most_bytes=20_000) for n in range(3)
    ]

    def write(sink: JsonLines) -> None:
        for number in range(200):
            sink.on(skipped(number))

    threads = [threading.Thread(target=write, args=[sink]) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = skipped(777)
    for sink in sinks:
        sink.on(last)
        sink.close()
    told = read_logs([log])
    assert told.unreadable == 0
    newest = [record for record in told.records if record.source == str(log)]
    assert {r.role for r in told.records if r.event == last} == {
        "writer-0",
        "writer-1",
        "writer-2",
    }
    assert newest
    assert log.stat().st_size + rolled(log).stat().st_size < 50_000


def test_a_full_disk_costs_lines_and_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Said once, and nothing is raised where the event comes from."""
    log = JsonLines("/dev/full", role="session")
    with caplog.at_level("WARNING"):
        for number in range(3):
            log.on(skipped(number))
    log.close()
    assert caplog.text.count("/dev/full cannot be written") == 1


def test_logs_of_two_machines_are_laid_side_by_side(tmp_path: Path) -> None:
    """Their monotonic clocks have nothing in common; the time of day has."""
    for name, t, day in (("one", 10.0, 1000.0), ("two", 90_000.0, 1001.0)):
        lines = [
            as_dict(opened(t, day)) | {"role": "session", "pid": 1},
            as_dict(LookupSkipped(t=t + 0.5, request_id=name, reason=""))
            | {"role": "session", "pid": 1},
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name).write_text(text)
    told = read_logs([tmp_path / "two", tmp_path / "one"])
    assert [record.at for record in told.records] == [1000.0, 1000.5, 1001.0, 1001.5]
    assert told.time_of_day


def test_a_log_without_the_time_of_day_has_the_machines_clock(log: Path) -> None:
    """An older log, or one whose beginning is gone."""
    sink = JsonLines(str(log), role="session")
    event: Event = skipped(1)
    sink.on(event)
    sink.close()
    told = read_logs([log])
    assert not told.time_of_day
    assert told.records[0].at == event.t


def test_the_same_id_in_two_runs_is_two_stories(log: Path) -> None:
    """Each scheduler's process that knows it tells its own."""
    lines = [
        as_dict(LookupSkipped(t=float(t), request_id="r", reason=f"run {pid}"))
        | {"role": "scheduler", "pid": pid}
        for t, pid in ((1, 7), (2, 7), (3, 8))
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = tell(read_logs([log])).of("r")
    assert [[one.reason for one in story.lookups] for story in told] == [
        ["run 7", "run 7"],
        ["run 8"],
    ]


def test_a_tail_reads_on_where_it_was(log: Path) -> None:
    """Also when the file has become the one before, in between."""
    tail = Tail(log)
    assert tail.read() == []
    sink = JsonLines(str(log), role="session", most_bytes=1000)
    seen: list[str] = []
    for number in range(40):
        sink.on(skipped(number))
        for record in tail.read():
            assert isinstance(record.event, LookupSkipped)
            seen.append(record.event.request_id)
    tail.close()
    sink.close()
    assert seen == [f"r-{number}" for number in range(40)]


def test_what_is_no_event_log_is_refused(tmp_path: Path) -> None:
    """A file of something else, and one that is not there: with what is near it."""
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(LogError, match="no event log"):
        read_logs([tmp_path / "notes.txt"])
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(LogError, match=r"there is no file .*evnts.*events\.jsonl"):
        read_logs([tmp_path / "evnts.jsonl"])
    assert read_logs([tmp_path / "events.jsonl"]).records == ()
