"""O of the bug log: spans of an engine's requests, in the requests' own traces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from bugs.rig import serve
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.config import ObservabilityConfig, VllmConfig
from vllm.v1.request import Request

from engine.shapes import INLINE_SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from bugs.rig import Rig

PARENTS = {"cold": f"{1:032x}", "warm": f"{2:032x}"}


def headers(request_id: str) -> dict[str, str] | None:
    """The trace context that a request of this name comes with, if any."""
    trace = PARENTS.get(request_id)
    return {"traceparent": f"00-{trace}-{7:016x}-01"} if trace else None


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What an engine that is started with --otlp-traces-endpoint would send.

    vLLM sets up the global provider of each of its processes; here a test does.
    """
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    make: Callable[..., None] = Request.__init__

    def with_headers(self: Any, request_id: str, *args: Any, **more: Any) -> None:
        make(self, request_id, *args, **more, trace_headers=headers(request_id))

    monkeypatch.setattr(Request, "__init__", with_headers)
    return exporter


@pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)
def test_spans_of_both_roles_are_in_the_requests_own_trace(
    rig: Rig,
    shape: Shape,
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lookup in the scheduler, load and save in the worker; the rest are roots."""
    tracing = ObservabilityConfig(otlp_traces_endpoint="http://127.0.0.1:1")
    build = partial(VllmConfig, observability_config=tracing)
    monkeypatch.setattr("engine.config.VllmConfig", build)
    with rig.engine(**shape.options) as engine:
        for name in ("cold", "warm", "alone"):
            serve(engine, range(65), name, max_tokens=1)
            engine.step_empty()
            assert engine.reset_prefix_cache()
    found: dict[tuple[str, str], str | None] = {}
    for span in exporter.get_finished_spans():
        assert span.attributes is not None
        trace = f"{span.parent.trace_id:032x}" if span.parent is not None else None
        found[str(span.attributes["akv.request_id"]), span.name] = trace
    assert found == {
        ("cold", "akv.lookup"): PARENTS["cold"],
        ("cold", "akv.save"): PARENTS["cold"],
        ("warm", "akv.lookup"): PARENTS["warm"],
        ("warm", "akv.load"): PARENTS["warm"],
        ("alone", "akv.lookup"): None,
        ("alone", "akv.load"): None,
    }


def test_an_engine_without_tracing_makes_no_spans(
    rig: Rig, exporter: InMemorySpanExporter
) -> None:
    """It costs nothing where nobody asked for it."""
    with rig.engine() as engine:
        serve(engine, range(65), "cold", max_tokens=1)
    assert exporter.get_finished_spans() == ()
