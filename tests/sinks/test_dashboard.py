"""What the dashboard and the page about metrics name is what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from akv.sinks.metrics import METRICS, PrometheusSink

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "observability"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "akv.json").read_text())
PAGE = (ROOT / "docs" / "metrics.md").read_text()
EXPRESSIONS = [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
]
EXPRESSIONS += [
    variable["query"]
    for variable in DASHBOARD["templating"]["list"]
    if variable["type"] == "query"
]


def exposed() -> dict[str, set[str]]:
    """The samples of an embedder's endpoint and their labels, without the prefix."""
    registry = CollectorRegistry()
    PrometheusSink(registry)
    found: dict[str, set[str]] = {}
    for line in generate_latest(registry).decode().splitlines():
        sample = re.match(r"akv_(\w+)(\{[^}]*\})? ", line)
        if sample is not None:
            labels = re.findall(r'(\w+)="', sample[2] or "")
            found.setdefault(sample[1], set()).update(labels)
    return found


def test_each_metric_of_the_dashboard_exists() -> None:
    """With the suffix that the client gives it; tests/bugs compares vLLM's names."""
    names = [n for text in EXPRESSIONS for n in re.findall(r"\$\{prefix\}(\w+)", text)]
    assert set(names) <= exposed().keys()
    assert len(names) >= len(EXPRESSIONS)


def test_no_expression_names_a_metric_without_the_prefix() -> None:
    """A name spelt out would work for one of the two ways only."""
    for text in EXPRESSIONS:
        bare = re.sub(r"\$\{prefix\}\w+", "", text)
        assert not re.search(r"akv|_total|_bucket|_count\b|_sum\b", bare), text


def test_labels_of_the_dashboard_exist() -> None:
    """Those that are grouped by, and those that are selected with their values."""
    samples = exposed()
    for text in EXPRESSIONS:
        names = re.findall(r"\$\{prefix\}(\w+)", text)
        for label in re.findall(r"sum by \((\w+)\)", text):
            assert all(label in samples[name] for name in names), text
        for label, value in re.findall(r'(\w+)="([^"$]+)"', text):
            for name in names:
                metric = METRICS[re.sub(r"_(bucket|sum|count|total)$", "", name)]
                assert (label, value in metric.values) == (metric.label, True), text


def test_each_metric_is_on_some_panel() -> None:
    """Nothing is counted that nobody can look at."""
    text = " ".join(EXPRESSIONS)
    missing = [name for name in METRICS if f"${{prefix}}{name}" not in text]
    assert missing == []


def test_the_prefixes_of_the_dashboard_are_the_two_that_there_are() -> None:
    """The values that a person can choose."""
    (prefix,) = (v for v in DASHBOARD["templating"]["list"] if v["name"] == "prefix")
    stats = pytest.importorskip("akv.vllm.stats")
    assert [o["value"] for o in prefix["options"]] == [stats._PREFIX, "akv_"]


def test_the_page_has_every_metric_with_its_label_and_its_sentence() -> None:
    """The table of docs/metrics.md, row for row."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    wanted = []
    for metric in METRICS.values():
        values = ", ".join(f"`{value}`" for value in metric.values)
        label = f"`{metric.label}`: {values}" if metric.label else ""
        wanted.append((metric.name, metric.kind.value, label, metric.help))
    assert rows == wanted
