"""The timeline for Perfetto and the page: every request is on them, and opens."""

from __future__ import annotations

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from akv.cli import main
from akv.store import MemoryStore
from serving import HASHES, serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


async def serve_three(log: Path) -> None:
    """One request saves, one loads, and one with a name that is hostile misses."""
    async with serving(log, MemoryStore()) as server:
        await server.lookup("writer", HASHES)
        await server.save("writer", HASHES[:6])
        assert await server.lookup("reader", HASHES) == 6
        await server.load("reader", HASHES[:6])
        await server.lookup("</script><b>$x", HASHES[6:])


async def drawn(log: Path) -> list[dict[str, Any]]:
    """The events of the timeline of three requests."""
    await serve_three(log)
    out = log.with_suffix(".json")
    assert main(["trace", str(log), "--chrome", str(out)]) == 0
    trace = json.loads(out.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


async def test_each_part_of_a_load_has_a_lane(log: Path) -> None:
    """Lookups, loads and saves of the loop, native calls and copies."""
    events = await drawn(log)
    lanes = {
        one["args"]["name"].rstrip(" 0123456789")
        for one in events
        if one["name"] == "thread_name"
    }
    assert lanes >= {"loop: lookups", "loop: loads", "loop: saves", "native: gets"}
    assert any(
        one["args"].get("name", "").startswith("session")
        for one in events
        if one["name"] == "process_name"
    )


async def test_bars_of_one_track_do_not_overlap(log: Path) -> None:
    """Perfetto would draw them into each other."""
    bars = [one for one in await drawn(log) if one["ph"] == "X"]
    assert all(one["dur"] >= 0 <= one["ts"] for one in bars)
    ends: dict[tuple[int, int], float] = {}
    for bar in sorted(bars, key=lambda one: one["ts"]):
        track = (bar["pid"], bar["tid"])
        assert bar["ts"] >= ends.get(track, 0.0) - 0.002
        ends[track] = bar["ts"] + bar["dur"]


async def test_an_arrow_goes_from_the_lookup_to_the_landing(log: Path) -> None:
    """Both of its ends lie in a bar of that request."""
    events = await drawn(log)
    arrows = {one["ph"]: one for one in events if one.get("cat") == "request"}
    assert set(arrows) == {"s", "f"}
    assert arrows["s"]["id"] == arrows["f"]["id"]
    for phase, name in (("s", "lookup answered"), ("f", "load landed")):
        arrow = arrows[phase]
        (bar,) = (
            one
            for one in events
            if one["ph"] == "X"
            and (one["pid"], one["tid"]) == (arrow["pid"], arrow["tid"])
            and one["ts"] <= arrow["ts"] <= one["ts"] + one["dur"]
        )
        assert bar["name"] == name
        assert bar["args"]["request_id"] == "reader"


class Parts(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.tags: list[str] = []
        self._script: str | None = None
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note links and scripts."""
        named = dict(attrs)
        self.tags.append(tag)
        self.links += [named[key] or "" for key in ("src", "href") if key in named]
        if tag == "script":
            self._in_script, self._script = True, named.get("id")
            self.scripts.append((self._script, ""))

    def handle_endtag(self, tag: str) -> None:
        """Note the end of a script."""
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        """Keep a script's text."""
        if self._in_script:
            name, text = self.scripts[-1]
            self.scripts[-1] = (name, text + data)


async def page_of(log: Path) -> Path:
    """The page of three requests."""
    pytest.importorskip("plotly")
    await serve_three(log)
    out = log.with_suffix(".html")
    assert main(["trace", str(log), "--html", str(out)]) == 0
    return out


async def test_the_page_is_complete_and_needs_no_network(log: Path) -> None:
    """No link, every request's story, and a name cannot break out of it."""
    parts = Parts((await page_of(log)).read_text())
    assert parts.links == []
    assert "b" not in parts.tags
    (data,) = (json.loads(text) for name, text in parts.scripts if name == "data")
    told = {one["id"]: one["text"] for one in data["stories"]}
    assert set(told) == {"writer", "reader", "</script><b>$x"}
    assert "loaded      6 blocks, 96 tokens" in told["reader"]
    assert "why not more" in told["writer"]
    traces = data["figure"]["data"]
    assert [one["type"] for one in traces].count("scatter") == 1
    (ratio,) = (one for one in traces if one["type"] == "scatter")
    assert ratio["name"] == "hit ratio"
    assert any(len(text) > 1_000_000 for _, text in parts.scripts)


async def test_a_browser_opens_the_page_and_a_click_tells_of_a_request(
    log: Path,
) -> None:
    """Headless Chromium, without a network: a bar, a button and the search field."""
    if BROWSER is None:
        pytest.skip("no chromium here: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.async_api", reason="pip install playwright"
    )
    page_file = await page_of(log)
    asked: list[str] = []
    wrong: list[str] = []
    async with playwright.async_playwright() as play:
        browser = await play.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox"]
        )
        page = await browser.new_page(viewport={"width": 1200, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        await page.goto(page_file.as_uri())
        await page.wait_for_selector("body[data-ready=true]", timeout=60_000)
        story = page.locator("#story")
        assert await story.text_content() == "No request is chosen."
        bars = page.locator("#chart .bars .point path")
        boxes = [await bar.bounding_box() for bar in await bars.all()]
        widest = max(boxes, key=lambda box: float(box["width"]))
        middle = (
            widest["x"] + widest["width"] / 2,
            widest["y"] + widest["height"] / 2,
        )
        # Plotly knows what is under the mouse by its moves.
        await page.mouse.move(*middle)
        await page.wait_for_selector("#chart .hoverlayer .hovertext")
        await page.mouse.click(*middle)
        await page.wait_for_selector("#story[data-request]")
        name = await story.get_attribute("data-request")
        assert (await story.text_content()).startswith(f"request {name}, ")
        await page.get_by_role("button", name="reader", exact=True).click()
        assert "loaded      6 blocks" in await story.text_content()
        await page.locator("#request").fill("writer")
        await page.locator("#request").press("Enter")
        assert (await story.text_content()).startswith("request writer, ")
        await browser.close()
    assert asked == [page_file.as_uri()]
    assert wrong == []


async def test_without_plotly_the_command_that_brings_it_is_named(
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And nothing else of the trace needs it."""
    await serve_three(log)
    for name in [name for name in sys.modules if name.startswith("plotly")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["trace", str(log), "--html", str(log.with_suffix(".html"))]) == 1
    error = capsys.readouterr().err
    assert re.search(r"plotly: pip install 'akv-connector\[trace\]'", error)
    assert main(["trace", str(log)]) == 0
