"""A span of OpenTelemetry for each lookup, load and save.

An operation begins and ends in one task, and so do its events. The span is
therefore kept in a context variable of that task: no id has to be unique, and
an operation that is cancelled finds its own span to end. The parent is what
the host's task has as its current span when the operation begins; in an
engine, where requests have no task, it is the trace context that the request
came with (see :meth:`OtelSink.carry`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextvars import ContextVar
from typing import TYPE_CHECKING

from akv.core.errors import ConfigError
from akv.core.events import (
    Event,
    LoadCancelled,
    LoadFailed,
    LoadLanded,
    LoadStarted,
    LookupAnswered,
    LookupCancelled,
    LookupExpired,
    LookupFailed,
    LookupSkipped,
    LookupStarted,
    SaveCancelled,
    SaveCopied,
    SaveDropped,
    SaveStarted,
    SaveStored,
    WindowFetched,
    WindowPlaced,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

__all__ = ("OtelSink",)

_MOST_OPEN = 4096
_MOST_CARRIED = 4096

_Number = int | float


class _Open:
    """The span of one operation, and what is added up until it ends."""

    __slots__ = ("blocks", "ended", "key", "outer", "sink", "span", "sums")

    def __init__(
        self,
        sink: OtelSink,
        key: tuple[str, str, int],
        blocks: int,
        span: Span,
        outer: _Open | None,
    ) -> None:
        self.sink = sink
        self.key = key
        self.blocks = blocks
        self.span = span
        self.outer = outer
        self.sums: dict[str, _Number] = {}
        self.ended = False


_innermost: ContextVar[_Open | None] = ContextVar("akv_otel_span", default=None)


class OtelSink:
    """Makes spans ``akv.lookup``, ``akv.load`` and ``akv.save``.

    Each ends exactly once, with its session at the latest. At most 4,096 are
    open at once; an operation beyond that has none. Attributes are named
    ``akv...`` and end in their unit. A span whose operation failed, or ran
    into its deadline, has the status error with the reason; a cancelled one
    has ``akv.outcome`` ``cancelled`` and no error.

    Any thread. Ending a span hands it to the host's span processor, which
    must not block: use a batching one. Needs the extra ``otel``.

    :param tracer_provider: None for the host's global one
    :raises ConfigError: opentelemetry-api is not installed
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation import tracecontext
        except ModuleNotFoundError as error:
            raise ConfigError(
                "observer",
                "OtelSink",
                "opentelemetry-api is not installed: pip install 'akv-connector[otel]'",
            ) from error
        self._tracer = trace.get_tracer("akv", tracer_provider=tracer_provider)
        self._error = trace.StatusCode.ERROR
        self._extract = tracecontext.TraceContextTextMapPropagator().extract
        self._lock = threading.Lock()
        self._open: set[_Open] = set()
        self._carried: OrderedDict[str, Mapping[str, str]] = OrderedDict()

    @property
    def open_spans(self) -> int:
        """Spans that have begun and not ended."""
        return len(self._open)

    def carry(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        """Let spans of this request belong to the trace that ``headers`` name.

        :param headers: W3C trace context (``traceparent``, ``tracestate``);
            None takes back what was said of an earlier request of this id.
            Of 4,096 requests at most, the newest
        """
        with self._lock:
            self._carried.pop(request_id, None)
            if headers:
                self._carried[request_id] = dict(headers)
                if len(self._carried) > _MOST_CARRIED:
                    self._carried.popitem(last=False)

    def carried(self, request_id: str) -> Mapping[str, str] | None:
        """What :meth:`carry` was given for this request."""
        with self._lock:
            return self._carried.get(request_id)

    def close(self) -> None:
        """End the spans that are open. Twice is no error."""
        for record in tuple(self._open):
            self._end(record, "closed")

    def on(self, event: Event) -> None:
        """Begin, add to, or end the span that ``event`` is about."""
        match event:
            case LookupStarted():
                self._begin("lookup", event.request_id, 0, event.blocks)
            case LookupSkipped():
                self._begin("lookup", event.request_id, 0, 0)
                self._finish(
                    "lookup", event.request_id, 0, "skipped", error=event.reason
                )
            case LookupAnswered():
                self._found(event, event.found, "answered")
            case LookupExpired():
                error = f"not answered within {event.deadline:g} s (lookup_deadline)"
                self._found(event, event.found, "expired", error)
            case LookupFailed():
                self._found(event, event.found, "failed", event.reason)
            case LookupCancelled():
                self._finish("lookup", event.request_id, 0, "cancelled")
            case LoadStarted():
                key = ("load", event.request_id, event.load_id)
                self._begin(*key, event.objects, event.bytes)
            case WindowFetched():
                self._sum(event, queue=event.wait_seconds, fetch=event.seconds)
            case WindowPlaced():
                self._sum(event, place=event.seconds)
            case LoadLanded():
                self._finish("load", event.request_id, event.load_id, "landed")
            case LoadFailed():
                self._finish(
                    "load",
                    event.request_id,
                    event.load_id,
                    "failed",
                    {"akv.failed_blocks": event.failed},
                    error=event.reason,
                )
            case LoadCancelled():
                self._finish("load", event.request_id, event.load_id, "cancelled")
            case SaveStarted():
                key = ("save", event.request_id, event.job_id)
                self._begin(*key, event.objects, event.bytes)
            case SaveCopied():
                record = self._mine("save", event.request_id, event.job_id)
                if record is not None:
                    record.sums["akv.copied_seconds"] = event.seconds
            case SaveDropped():
                self._dropped(event)
            case SaveStored():
                numbers = {
                    "akv.stored_blocks": event.stored,
                    "akv.existed_blocks": event.existed,
                    "akv.stored_bytes": event.bytes,
                }
                self._finish("save", event.request_id, event.job_id, "stored", numbers)
            case SaveCancelled():
                self._finish("save", event.request_id, event.job_id, "cancelled")
            case _:
                pass

    def _begin(
        self, kind: str, request_id: str, number: int, blocks: int, size: int = 0
    ) -> None:
        attributes: dict[str, str | _Number] = {
            "akv.request_id": request_id,
            "akv.blocks": blocks,
        }
        if kind != "lookup":
            attributes["akv.bytes"] = size
        headers = self.carried(request_id)
        parent: Context | None = self._extract(headers) if headers else None
        with self._lock:
            if len(self._open) >= _MOST_OPEN:
                return
            span = self._tracer.start_span(
                f"akv.{kind}", context=parent, attributes=attributes
            )
            key = (kind, request_id, number)
            record = _Open(self, key, blocks, span, _innermost.get())
            self._open.add(record)
        _innermost.set(record)

    def _mine(self, kind: str, request_id: str, number: int) -> _Open | None:
        """The open span of this operation, if this is the task that runs it."""
        key, record = (kind, request_id, number), _innermost.get()
        while record is not None:
            if record.sink is self and record.key == key and not record.ended:
                return record
            record = record.outer
        return None

    def _sum(self, event: WindowFetched | WindowPlaced, **seconds: float) -> None:
        record = self._mine("load", event.request_id, event.load_id)
        if record is not None:
            for part, value in seconds.items():
                name = f"akv.{part}_seconds"
                record.sums[name] = record.sums.get(name, 0) + value

    def _found(
        self,
        event: LookupAnswered | LookupExpired | LookupFailed,
        found: int,
        outcome: str,
        error: str = "",
    ) -> None:
        numbers = {"akv.found_blocks": found}
        self._finish("lookup", event.request_id, 0, outcome, numbers, error=error)

    def _dropped(self, event: SaveDropped) -> None:
        record = self._mine("save", event.request_id, event.job_id)
        if record is None:
            return
        record.span.set_status(self._error, event.reason)
        record.sums["akv.dropped_blocks"] = event.objects
        # A part that was stored is told by one more event.
        if event.objects >= record.blocks:
            self._finish("save", event.request_id, event.job_id, "dropped")

    def _finish(
        self,
        kind: str,
        request_id: str,
        number: int,
        outcome: str,
        numbers: Mapping[str, _Number] | None = None,
        *,
        error: str = "",
    ) -> None:
        record = self._mine(kind, request_id, number)
        if record is None:
            return
        record.span.set_attributes({**record.sums, **(numbers or {})})
        if error:
            record.span.set_status(self._error, error)
        self._end(record, outcome)
        innermost = _innermost.get()
        while innermost is not None and innermost.ended:
            innermost = innermost.outer
        _innermost.set(innermost)

    def _end(self, record: _Open, outcome: str) -> None:
        with self._lock:
            if record.ended:
                return
            record.ended = True
            self._open.discard(record)
        record.span.set_attribute("akv.outcome", outcome)
        record.span.end()
