"""What the documentation says is what the code has."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import akv
import akv.store
import akv.testing
from akv.core import errors, events

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in DOCS.glob("*.md")}
EVENTS = [
    value
    for name in events.__all__
    if isinstance(value := getattr(events, name), type)
    and issubclass(value, events.Event)
    and value is not events.Event
]


def module_of(path: Path) -> ModuleType:
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table whose header row begins with ``heading``."""
    lines = iter(text.splitlines())
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            break
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    assert rows, f"no table headed {heading!r}"
    return rows


def sample(kind: type[events.Event]) -> events.Event:
    """An event of this kind in which every number is 1."""
    values: dict[str, Any] = {
        item.name: "text" if str(item.type) == "str" else 1
        for item in dataclasses.fields(kind)
    }
    if kind is events.LoadPromised:
        values["local"] = 0
    return kind(**values)


def test_the_table_of_events_has_every_event_with_its_fields_and_a_sentence() -> None:
    """Sphinx draws the page from these rows."""
    rows = module_of(DOCS / "events_table.py").event_rows()
    assert sorted(row.name for row in rows) == sorted(kind.name for kind in EVENTS)
    assert len({row.name for row in rows}) == len(rows)
    by_name = {kind.name: kind for kind in EVENTS}
    for row in rows:
        own = [f.name for f in dataclasses.fields(by_name[row.name]) if f.name != "t"]
        assert list(row.fields) == own
        assert row.doc.endswith(".")
        assert "(" not in row.doc.partition(" ")[0], f"{row.name} has no docstring"
    assert "```{akv-events}" in PAGES["events.md"]


def test_no_page_speaks_of_an_event_that_does_not_exist() -> None:
    """A name such as akv.load.landed is an event's."""
    kinds = {kind.name.split(".")[1] for kind in EVENTS} - {"store"}
    known = {kind.name for kind in EVENTS}
    pattern = re.compile(rf"`(akv\.(?:{'|'.join(sorted(kinds))})\.[a-z_]+)`")
    for name, text in PAGES.items():
        assert set(pattern.findall(text)) <= known, name


def test_the_log_levels_of_the_operators_page_are_the_sinks() -> None:
    """Events above debug are named, each in its row."""
    from akv.sinks.logs import _LEVELS

    by_level = {row[0]: row[1] for row in rows_of(PAGES["vllm.md"], "level")}
    for kind, level in _LEVELS.items():
        name = {20: "info", 30: "warning"}[level]
        assert f"`{kind.name}`" in by_level[name], kind.name
    told = set(re.findall(r"`(akv\.[a-z_.]+)`", "".join(by_level.values())))
    assert told - {"akv.session.closed"} == {kind.name for kind in _LEVELS}


def test_the_fields_of_vllms_metrics_line_are_those_that_are_counted() -> None:
    """Every event is counted once; the names that come out are the table's."""
    stats = pytest.importorskip("akv.vllm.stats")
    counters = stats.Counters()
    for kind in EVENTS:
        counters.on(sample(kind))
    counted = counters.take().reduce()
    table = PAGES["vllm.md"].partition("### The line of metrics")[2]
    told = [row[0].strip("`") for row in rows_of(table, "field")]
    assert sorted(told) == sorted(counted)


def test_every_setting_is_in_the_readme_with_its_default() -> None:
    """The configuration page includes this table."""
    told = {row[0].strip("`"): row[1] for row in rows_of(README, "setting")}
    assert list(told) == [item.name for item in dataclasses.fields(akv.Config)]
    defaults = akv.Config()
    for name, text in told.items():
        if name == "store":
            assert getattr(defaults, name) == ""
            continue
        written = text.strip("`").strip('"')
        parsed = akv.Config.from_mapping({name: written})
        assert getattr(parsed, name) == getattr(defaults, name), name
    assert "../README.md" in PAGES["configuration.md"]


@pytest.mark.parametrize("package", ["akv", "akv.store", "akv.testing"])
def test_the_api_page_has_exactly_the_public_names(package: str) -> None:
    """What is on the page is what ``__all__`` says."""
    section = PAGES["api.md"].partition(f"\n## `{package}`\n")[2].partition("\n## ")[0]
    told = re.findall(r"\.\. auto\w+:: ([\w.]+)", section)
    public: tuple[str, ...] = sys.modules[package].__dict__["__all__"]
    assert sorted(told) == sorted(f"{package}.{name}" for name in public)


def test_every_error_has_a_section_in_troubleshooting() -> None:
    """Whoever meets an error finds it by its name."""
    for name in errors.__all__:
        assert f"\n### `{name}`\n" in PAGES["troubleshooting.md"], name


def test_the_rounding_table_is_the_tested_one() -> None:
    """The page shows the rows that tests/core/test_align.py checks."""
    table = module_of(ROOT / "tests" / "core" / "test_align.py").TABLE
    told = {
        (int(n), int(block), 0 if hit == "-" else int(hit), int(local)): answer
        for n, block, hit, local, answer in rows_of(PAGES["concepts.md"], "n")
    }
    tested = {(n, block, hit, local): need for n, block, hit, local, need, _ in table}
    assert told.keys() == tested.keys()
    for row, need in tested.items():
        number = re.match(r"\d+|nothing", told[row])
        assert number is not None
        assert number[0] == (str(need) if need else "nothing"), row


def test_the_example_prints_what_the_pages_say() -> None:
    """README, the quick start and the page on embedding show this file."""
    example = ROOT / "examples" / "minimal.py"
    done = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said = (ROOT / "examples" / "minimal.txt").read_text()
    assert done.stdout == said
    assert f"```python\n{example.read_text()}```" in README
    for line in said.splitlines():
        assert f"`{line}`" in README
    for page in ("start.md", "embedding.md"):
        assert "../examples/minimal.py" in PAGES[page]
        assert "../examples/minimal.txt" in PAGES[page]


def test_the_readme_names_the_commands_that_there_are() -> None:
    """A session that is named exists, and the two main ones are given in full."""
    sessions = set(
        re.findall(
            r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE
        )
    )
    told = set(re.findall(r"noxfile\.py -s (\w+)", README + "".join(PAGES.values())))
    assert told <= sessions
    assert {"demo", "tests", "bench", "docs"} <= told


def test_links_of_the_readme_lead_somewhere() -> None:
    """Each relative link is a file of the repository."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_changelog_has_the_work_that_is_not_released() -> None:
    """At least one line under Unreleased / Added."""
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased = text.partition("## [Unreleased]")[2].partition("\n## ")[0]
    assert re.search(r"^### (Added|Changed|Fixed)\n\n- ", unreleased, re.MULTILINE)
