"""Spans of OpenTelemetry: whose they are, what they say, and that they end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import akv
from akv.core.events import LookupAnswered, LookupStarted
from akv.sinks import otel
from akv.sinks.fanout import Fanout
from akv.sinks.otel import OtelSink
from akv.store import MemoryStore
from akv.store.base import Failure, Status
from akv.testing.stores import Fault, FaultyStore, GatedStore
from harness import OBJECT, Memory, load_spec, lookup_spec, prompt, save_spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from opentelemetry.sdk.trace import ReadableSpan

    from akv.core.events import Observer
    from akv.core.keys import BlockKey
    from akv.store.base import BlockStore

HASHES = prompt(1, 4)
CONFIG = akv.Config(
    store="memory:", max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT
)
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Spans:
    """A tracer provider of a test's own, and the spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("host")
        self.sink = OtelSink(self.provider)

    def ended(self, name: str) -> list[ReadableSpan]:
        """All spans of this name, in the order in which they ended."""
        return [s for s in self.exporter.get_finished_spans() if s.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        (span,) = self.ended(name)
        return span


def facts(span: ReadableSpan) -> dict[str, Any]:
    """A span's attributes, without times."""
    assert span.attributes is not None
    return {
        key.removeprefix("akv."): value
        for key, value in span.attributes.items()
        if not key.endswith("_seconds")
    }


def session_of(
    memory: Memory,
    observer: Observer,
    store: BlockStore | None = None,
    config: akv.Config = CONFIG,
) -> AbstractAsyncContextManager[akv.Session]:
    """A session on this memory, with this observer."""
    return akv.open_session(
        config,
        memory.geometry,
        memory.device,
        store=store or MemoryStore(name=""),
        observer=observer,
    )


@pytest.mark.anyio
async def test_each_operation_is_a_span_under_the_hosts() -> None:
    """Parent, name, numbers with units, and no error where there is none."""
    spans, memory = Spans(), Memory()
    async with session_of(memory, spans.sink) as session:
        with spans.tracer.start_as_current_span("request") as parent:
            await session.save(save_spec(HASHES, (0, 1, 2, 3)))
            await session.lookup(lookup_spec(HASHES))
            await session.load(load_spec(HASHES, (4, 5, 6, 7)))
    size = 4 * OBJECT
    told = {
        name: facts(spans.one(f"akv.{name}")) for name in ("save", "lookup", "load")
    }
    assert told == {
        "save": {
            "request_id": "r",
            "blocks": 4,
            "bytes": size,
            "stored_blocks": 4,
            "existed_blocks": 0,
            "stored_bytes": size,
            "outcome": "stored",
        },
        "lookup": {
            "request_id": "r",
            "blocks": 4,
            "found_blocks": 4,
            "outcome": "answered",
        },
        "load": {"request_id": "r", "blocks": 4, "bytes": size, "outcome": "landed"},
    }
    for name in told:
        span = spans.one(f"akv.{name}")
        assert span.parent == parent.get_span_context()
        assert span.status.status_code is StatusCode.UNSET
    load = spans.one("akv.load")
    assert load.attributes is not None
    parts = [load.attributes[f"akv.{part}_seconds"] for part in ("fetch", "place")]
    assert all(isinstance(part, float) and part > 0 for part in parts)
    assert load.attributes["akv.queue_seconds"] >= 0  # type: ignore[operator]
    assert spans.sink.open_spans == 0


@pytest.mark.asyncio
async def test_requests_that_run_side_by_side_keep_their_own_traces() -> None:
    """One request id for all of them: it is the task that tells."""
    spans, memory = Spans(), Memory()

    async def request(number: int) -> tuple[int, int]:
        with spans.tracer.start_as_current_span(f"request {number}") as parent:
            await session.lookup(lookup_spec(prompt(number, 4)))
            await session.load(load_spec(HASHES[:1], (4,), load_id=1))
        context = parent.get_span_context()
        return context.trace_id, context.span_id

    async with session_of(memory, spans.sink) as session:
        parents = await asyncio.gather(*map(request, range(20)))
    for name in ("akv.lookup", "akv.load"):
        found = [span.parent for span in spans.ended(name)]
        assert sorted((p.trace_id, p.span_id) for p in found if p) == sorted(parents)


def _gets_miss(verb: str, keys: Sequence[BlockKey]) -> Fault:
    if verb != "get_into":
        return Fault()
    return Fault(outcomes=dict.fromkeys(range(len(keys)), Status.MISS))


def _second_fails(verb: str, keys: Sequence[BlockKey]) -> Fault:
    return Fault(outcomes={1: Failure("it burns")} if verb == "put_from" else {})


@pytest.mark.anyio
async def test_a_load_that_failed_has_the_status_error() -> None:
    """With the reason, and how many blocks did not land."""
    spans, memory = Spans(), Memory()
    store = FaultyStore(MemoryStore(name=""), _gets_miss)
    async with session_of(memory, spans.sink, store) as session:
        await session.save(save_spec(HASHES, (0, 1, 2, 3)))
        await session.load(load_spec(HASHES, (4, 5, 6, 7)))
    load = spans.one("akv.load")
    assert facts(load)["outcome"] == "failed"
    assert facts(load)["failed_blocks"] == 4
    assert load.status.status_code is StatusCode.ERROR
    assert load.status.description == "lost after lookup"


@pytest.mark.anyio
async def test_a_save_that_was_stored_in_part_is_one_span() -> None:
    """Both of its facts: what is stored and what was dropped, and why."""
    spans, memory = Spans(), Memory()
    store = FaultyStore(MemoryStore(name=""), _second_fails)
    async with session_of(memory, spans.sink, store) as session:
        await session.save(save_spec(HASHES, (0, 1, 2, 3)))
        await session.save(save_spec(HASHES, (0, 1, 2, 3), job_id=2))
    first, second = spans.ended("akv.save")
    assert facts(first)["stored_blocks"] == 1
    assert facts(first)["dropped_blocks"] == 3
    assert facts(first)["outcome"] == "stored"
    assert first.status.description == "it burns"
    assert facts(second)["dropped_blocks"] == 4
    assert facts(second)["outcome"] == "dropped"
    assert second.status.description == "a block before it was dropped"


@pytest.mark.anyio
async def test_deadlines_and_a_store_that_is_left_alone_are_errors() -> None:
    """Of each kind one; a skipped lookup is a span without duration."""
    spans, memory = Spans(), Memory()
    config = akv.Config(
        store="memory:",
        max_load_bytes=8 * OBJECT,
        max_save_bytes=8 * OBJECT,
        lookup_deadline=0.05,
        load_deadline=0.05,
    )
    store = GatedStore(MemoryStore(name=""), gated=("exists", "get_into"))
    async with session_of(memory, spans.sink, store, config) as session:
        await session.lookup(lookup_spec(HASHES))
        await session.load(load_spec(HASHES, (4, 5, 6, 7)))
        session._breaker.trip("the test says so")
        await session.lookup(lookup_spec(HASHES))
        store.open()
    expired, skipped = spans.ended("akv.lookup")
    assert facts(expired)["outcome"] == "expired"
    assert "lookup_deadline" in str(expired.status.description)
    assert facts(skipped)["outcome"] == "skipped"
    assert "left alone" in str(skipped.status.description)
    assert "load_deadline" in str(spans.one("akv.load").status.description)


@pytest.mark.anyio
@pytest.mark.parametrize("ends", ["task", "session"])
async def test_cancelled_operations_end_their_spans_once(ends: str) -> None:
    """By the host's own cancel, and by a session that is left in the middle."""
    spans, memory = Spans(), Memory()
    store = GatedStore(MemoryStore(name=""), gated=("exists", "get_into"))
    async with (
        anyio.create_task_group() as tasks,
        session_of(memory, spans.sink, store) as session,
    ):
        tasks.start_soon(session.lookup, lookup_spec(HASHES))
        tasks.start_soon(session.load, load_spec(HASHES, (4, 5, 6, 7)))
        tasks.start_soon(session.save, save_spec(HASHES, (0, 1, 2, 3)))
        await anyio.to_thread.run_sync(store.wait_until_held, 3)
        assert spans.sink.open_spans == 3
        if ends == "task":
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                while spans.sink.open_spans:
                    await anyio.lowlevel.checkpoint()
        store.open()
    for name in ("lookup", "load", "save"):
        span = spans.one(f"akv.{name}")
        if ends == "task":
            assert facts(span)["outcome"] == "cancelled"
            assert span.status.status_code is StatusCode.UNSET
    assert spans.sink.open_spans == 0


@pytest.mark.anyio
async def test_an_engines_requests_bring_their_trace_with_them() -> None:
    """W3C headers by request id win over the task; without any it is the task's."""
    spans, memory = Spans(), Memory()
    spans.sink.carry("r", TRACE)
    async with session_of(memory, spans.sink) as session:
        with spans.tracer.start_as_current_span("loop") as loop:
            await session.lookup(lookup_spec(HASHES))
            spans.sink.carry("r", None)
            await session.lookup(lookup_spec(HASHES))
    first, second = spans.ended("akv.lookup")
    assert first.parent is not None
    assert f"{first.parent.trace_id:032x}" in TRACE["traceparent"]
    assert f"{first.parent.span_id:016x}" in TRACE["traceparent"]
    assert second.parent == loop.get_span_context()


def test_what_is_carried_is_bounded() -> None:
    """Of requests that never come again the oldest are forgotten."""
    sink = Spans().sink
    for number in range(otel._MOST_CARRIED + 5):
        sink.carry(f"r{number}", TRACE)
    assert sink.carried("r4") is None
    assert sink.carried("r5") == TRACE


def test_open_spans_are_bounded_and_end_when_the_sink_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operation beyond the bound has no span, and ends nobody else's."""
    monkeypatch.setattr(otel, "_MOST_OPEN", 2)
    spans = Spans()
    for name in ("a", "b", "c"):
        spans.sink.on(LookupStarted(request_id=name, first_block=0, blocks=1))
    assert spans.sink.open_spans == 2
    for name in ("c", "a"):
        spans.sink.on(
            LookupAnswered(request_id=name, first_block=0, found=1, seconds=0.1)
        )
    assert [facts(s)["request_id"] for s in spans.ended("akv.lookup")] == ["a"]
    spans.sink.close()
    spans.sink.close()
    assert [facts(s)["outcome"] for s in spans.ended("akv.lookup")][1:] == ["closed"]
    late = LookupAnswered(request_id="b", first_block=0, found=1, seconds=0.1)
    spans.sink.on(late)
    assert len(spans.ended("akv.lookup")) == 2


@pytest.mark.anyio
async def test_two_sinks_of_one_session_do_not_end_each_others_spans() -> None:
    """Two providers, each with one span of each operation."""
    first, second, memory = Spans(), Spans(), Memory()
    async with session_of(memory, Fanout([first.sink, second.sink])) as session:
        for load_id in (1, 2):
            await session.load(load_spec(HASHES[:1], (4,), load_id=load_id))
    for spans in (first, second):
        assert len(spans.ended("akv.load")) == 2
        assert spans.sink.open_spans == 0
    assert otel._innermost.get() is None


def test_without_the_package_the_error_says_what_to_install() -> None:
    """In a process that cannot import it."""
    script = """
import sys
sys.modules["opentelemetry"] = None
from akv.sinks.otel import OtelSink
try:
    OtelSink()
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "pip install 'akv-connector[otel]'" in done.stdout
