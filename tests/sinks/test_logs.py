"""The log sink in hosts that log each in their own way."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import structlog
from structlog.contextvars import bound_contextvars, get_contextvars

import akv
from akv.core.events import (
    BreakerOpened,
    LoadLanded,
    MemoryQuarantined,
    SavesResumed,
    SavesShed,
    SessionClosed,
)
from akv.sinks.fanout import Fanout
from akv.sinks.logs import LogSink
from akv.store import MemoryStore
from akv.testing.stores import GatedStore
from harness import OBJECT, Memory, Recorder, load_spec, lookup_spec, prompt, save_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from akv.core.events import Event

HASHES = prompt(1, 4)
CONFIG = akv.Config(
    store="memory:",
    max_load_bytes=8 * OBJECT,
    max_save_bytes=8 * OBJECT,
    load_deadline=0.05,
)
LANDED = LoadLanded(request_id="r-7", load_id=3, objects=2, bytes=64, seconds=0.5)
OPENED = BreakerOpened(url="memory:", reason="100% of the calls failed")


class Lines(logging.Handler):
    """Keeps every record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, formatted as a handler would."""
        self.format(record)
        self.records.append(record)

    def fields(self, event: str) -> dict[str, Any]:
        """The first record of this event."""
        found = [r for r in self.records if r.getMessage().startswith(f"{event} ")]
        assert found, f"no line about {event}"
        return vars(found[0])


@pytest.fixture
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    """Lines of a logger of this test's own, which is called as the test is."""
    handler = Lines()
    logger = logging.getLogger(request.node.name)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def in_a_process(script: str) -> list[str]:
    """What a program prints, on both streams."""
    start = """
import logging, sys
from akv.core.events import BreakerOpened, LoadLanded
from akv.sinks.logs import LogSink
landed = LoadLanded(request_id="r-7", load_id=3, objects=2, bytes=64, seconds=0.5)
opened = BreakerOpened(url="memory:", reason="100% of the calls failed")
"""
    done = subprocess.run(
        [sys.executable, "-c", start + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def test_a_host_that_set_nothing_up_sees_nothing() -> None:
    """Not even warnings, which the standard library would print by itself."""
    script = """
sink = LogSink(role="server")
sink.on(landed)
sink.on(opened)
"""
    assert in_a_process(script) == []


def test_a_host_with_plain_logging_sees_a_line_at_its_level() -> None:
    """The standard library's own set-up, and a percent sign that stays one."""
    script = """
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
sink = LogSink(role="server")
sink.on(landed)
sink.on(opened)
"""
    (line,) = in_a_process(script)
    assert line == (
        "WARNING:akv:akv.breaker.opened role=server url=memory: "
        "reason=100% of the calls failed"
    )


def test_a_host_with_structlog_gets_every_field() -> None:
    """Its own formatter renders akv's lines as JSON; its settings stay its own."""
    script = """
import structlog
structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
before = structlog.get_config()
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(structlog.stdlib.ProcessorFormatter(
    foreign_pre_chain=[structlog.stdlib.ExtraAdder()],
    processor=structlog.processors.JSONRenderer(),
))
logging.getLogger("akv").addHandler(handler)
logging.getLogger("akv").setLevel(logging.DEBUG)
LogSink(role="server").on(landed)
assert structlog.get_config() == before
"""
    (line,) = in_a_process(script)
    told = json.loads(line)
    assert told["request_id"] == "r-7"
    assert told["bytes"] == 64
    assert told["seconds"] == 0.5
    assert told["role"] == "server"


def test_nothing_is_configured() -> None:
    """No level, no handler but the one that does nothing, no root logger touched."""
    script = """
root = logging.getLogger()
before = (root.level, list(root.handlers))
LogSink(role="a"); LogSink(role="b")
logger = logging.getLogger("akv")
assert (root.level, list(root.handlers)) == before
assert logger.level == logging.NOTSET and logger.propagate and not logger.disabled
print([type(handler).__name__ for handler in logger.handlers])
"""
    assert in_a_process(script) == ["['NullHandler']"]


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        (logging.DEBUG, 4),
        (logging.INFO, 2),
        (logging.WARNING, 2),
        (logging.ERROR, 0),
    ],
)
def test_levels_of_the_standard_library_decide(
    level: int, seen: int, lines: Lines, request: pytest.FixtureRequest
) -> None:
    """A close that left a call behind is a warning, a clean one is not."""
    logging.getLogger(request.node.name).setLevel(level)
    sink = LogSink(role="server", logger=request.node.name)
    events: list[Event] = [LANDED, OPENED]
    events += [SessionClosed(role="x", seconds=1.0, hung_calls=n) for n in (0, 1)]
    for event in events:
        sink.on(event)
    assert len(lines.records) == seen


def test_saves_that_are_shed_are_a_warning_and_their_return_is_told(
    lines: Lines, request: pytest.FixtureRequest
) -> None:
    """A host that logs at info sees both, one at warning sees the trouble."""
    logging.getLogger(request.node.name).setLevel(logging.INFO)
    sink = LogSink(role="server", logger=request.node.name)
    sink.on(SavesShed(url="memory:", reason="puts take 40 times the best"))
    sink.on(SavesResumed(url="memory:", seconds=2.0))
    assert lines.fields("akv.saves.shed")["levelno"] == logging.WARNING
    assert lines.fields("akv.saves.resumed")["levelno"] == logging.INFO


def test_what_the_host_has_bound_is_in_akvs_lines(
    lines: Lines, request: pytest.FixtureRequest
) -> None:
    """Also under a name that the standard library keeps for itself."""
    sink = LogSink(role="server", logger=request.node.name)
    with bound_contextvars(tenant="blue", process="web-3", message="hello"):
        sink.on(OPENED)
    told = lines.fields("akv.breaker.opened")
    assert told["tenant"] == "blue"
    assert told["process_"] == "web-3"
    assert told["message_"] == "hello"
    assert told["process"] != "web-3"


@pytest.mark.anyio
async def test_the_request_is_bound_wherever_its_work_runs(
    lines: Lines, request: pytest.FixtureRequest
) -> None:
    """Memory in quarantine is nobody's, but it was this request's load that hung."""
    name = request.node.name
    logging.getLogger(name).setLevel(logging.DEBUG)
    store = GatedStore(MemoryStore(name=""), gated=("get_into",))
    memory = Memory()
    recorder = Recorder([])
    async with akv.open_session(
        CONFIG,
        memory.geometry,
        memory.device,
        store=store,
        observer=Fanout([recorder, LogSink(role="server", logger=name)]),
    ) as session:
        await session.load(load_spec(HASHES, (4, 5, 6, 7), name="r-42"))
        assert get_contextvars() == {}
        store.open()
    assert MemoryQuarantined in {type(event) for event in recorder.events}
    assert lines.fields("akv.memory.quarantined")["request_id"] == "r-42"
    assert "request_id" not in lines.fields("akv.session.closed")


@pytest.mark.anyio
async def test_the_request_is_bound_in_each_operation_and_in_no_other() -> None:
    """Requests side by side, each with its own id; the call for all has none."""
    bound: dict[str, set[str | None]] = {}

    class Watch:
        def on(self, event: Event) -> None:
            here = get_contextvars().get("request_id")
            assert getattr(event, "request_id", here) == here
            bound.setdefault(event.name, set()).add(here)

    memory = Memory()
    async with (
        akv.open_session(
            CONFIG,
            memory.geometry,
            memory.device,
            store=MemoryStore(name=""),
            observer=Watch(),
        ) as session,
        anyio.create_task_group() as tasks,
    ):
        for number in range(5):
            spec = load_spec(HASHES[:1], (4,), load_id=number, name=f"r-{number}")
            tasks.start_soon(session.load, spec)
        tasks.start_soon(session.lookup, lookup_spec(HASHES))
        tasks.start_soon(session.save, save_spec(HASHES, (0, 1, 2, 3)))
    assert bound["akv.load.started"] == {f"r-{number}" for number in range(5)}
    assert bound["akv.lookup.answered"] == bound["akv.save.stored"] == {"r"}
    assert bound["akv.session.closed"] == {None}


@pytest.mark.anyio
async def test_a_call_for_many_requests_is_bound_to_none() -> None:
    """Lookups of one turn share a call; what comes of it is not the first one's."""
    seen: list[object] = []

    class Watch:
        def on(self, event: Event) -> None:
            if isinstance(event, BreakerOpened):
                seen.append(get_contextvars().get("request_id"))

    class Broken(MemoryStore):
        def exists(self, *_: Any, **__: Any) -> Any:
            raise akv.StoreError("it is broken")

    memory = Memory()
    async with akv.open_session(
        CONFIG,
        memory.geometry,
        memory.device,
        store=Broken(name=""),
        observer=Watch(),
    ) as session:
        for _ in range(3):
            await session.lookup(lookup_spec(HASHES))
    assert seen == [None]


def test_the_sink_does_not_depend_on_the_hosts_structlog(
    lines: Lines, request: pytest.FixtureRequest
) -> None:
    """A host may configure structlog after akv's sink was made, in its own way."""
    sink = LogSink(role="server", logger=request.node.name)
    with structlog.testing.capture_logs() as captured:
        sink.on(OPENED)
    assert captured == []
    assert lines.fields("akv.breaker.opened")["levelno"] == logging.WARNING
