"""A load and a save from end to end, against one thread that copies as many pages.

The engine's memory is one array for each layer, and a request's blocks lie scattered
in it. A load goes from the store in shared memory through staging into the blocks, a
save the other way; both through a portal, as vLLM's worker does it. The other side
copies the same pages with numpy, the faster way in each direction (one call for each
layer to scatter, one for each page to gather: gathering in one call would make a copy
more), and nothing else: it copies each byte once where akv copies it twice. The last
case loads with the event log on, against a load with it off, and has the share of a
load's time that its events take with the log at its default level, with metrics, and
with the event log.
"""

from __future__ import annotations

import itertools
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry

import akv
from akv.core.events import NullObserver
from akv.core.keys import KeySpace, make_keys
from akv.portal import Portal
from akv.sinks.fanout import Fanout
from akv.sinks.jsonl import JsonLines
from akv.sinks.logs import LogSink
from akv.sinks.metrics import PrometheusSink
from akv.store import BlockStore, LocalStore
from measure import (
    Case,
    Row,
    Settings,
    Side,
    Skip,
    Spread,
    Target,
    Unit,
    clock,
    compare,
    without_gc,
)
from memory import Rows, fill, need_memory, prefaulted, right_rows, stamp

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from akv.core.events import Event, Observer

__all__ = ("CASES", "LARGE", "SMALL", "Shape", "Stage")

_SPACE = KeySpace(namespace="bench", fingerprint=akv.fingerprint({"model": "bench"}))
_SPARE_BLOCKS = 7
_READ_BACK = 4
_SHARE = Target(0.02, at_least=False)
"""Of a load's time, for logging and events where nobody asked for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's KV cache: a page is what one layer keeps of one block."""

    layers: int
    page: int
    block: int

    @property
    def object_bytes(self) -> int:
        return self.layers * self.page


SMALL = Shape(layers=30, page=12 << 10, block=16)  # 3 heads of 64, bfloat16
LARGE = Shape(layers=32, page=512 << 10, block=128)  # 8 heads of 128, bfloat16


class Stage:
    """An engine's memory, a store with one request's blocks, and a portal."""

    def __init__(
        self, shape: Shape, blocks: int, url: str, store: BlockStore | None = None
    ) -> None:
        self.shape = shape
        self.blocks = blocks
        self.total = blocks * shape.object_bytes
        self.objects = prefaulted(blocks, shape.object_bytes)
        fill(self.objects, seed=3)
        # The lower half of the blocks is akv's, the upper half the other side's.
        pool = 2 * blocks + _SPARE_BLOCKS
        self.layers = [prefaulted(pool, shape.page) for _ in range(shape.layers)]
        shuffled = np.random.default_rng(4).permutation(pool)
        self.ids = shuffled[:blocks]
        self.other_ids = shuffled[blocks : 2 * blocks]
        self.geometry = akv.Geometry(
            num_blocks=pool,
            hash_unit=shape.block,
            groups=(
                akv.Group(
                    block_size=shape.block,
                    regions=tuple(
                        akv.Region(
                            name=f"layer {number}",
                            memory=number,
                            offset=0,
                            stride=shape.page,
                            size=shape.page,
                        )
                        for number in range(shape.layers)
                    ),
                ),
            ),
        )
        random = np.random.default_rng(5).bytes(32 * blocks)
        self.hashes = tuple(
            random[start : start + 32] for start in range(0, len(random), 32)
        )
        self.keys = make_keys(_SPACE.prefix, 0, 0, self.hashes)
        self.config = akv.Config(store=url, load_deadline=60, save_deadline=60)
        self.store = store or LocalStore.open(url, slot_bytes=shape.object_bytes)
        self._ids = itertools.count(1)

    def portal(self, observer: Observer | None = None) -> Portal:
        device = akv.HostDevice(
            self.geometry, [layer.reshape(-1) for layer in self.layers]
        )
        return Portal.start(self.config, self.geometry, device, observer=observer)

    def pages(self, objects: Rows, layer: int) -> npt.NDArray[np.uint64]:
        """One layer's pages of all objects, as words."""
        start = layer * self.shape.page
        return objects[:, start : start + self.shape.page].view(np.uint64)

    def new_content(self, number: int) -> None:
        stamp(self.objects, number + 1)

    def put(self) -> None:
        """The store holds the objects."""
        self.store.remove(self.keys)
        self.store.put_from(self.keys, [row.data for row in self.objects])

    def copy_in(self, ids: npt.NDArray[np.intp]) -> None:
        """The blocks hold the objects."""
        for layer, memory in enumerate(self.layers):
            memory.view(np.uint64)[ids] = self.pages(self.objects, layer)

    def copy_out(self, to: Rows) -> None:
        """``to`` holds what is in akv's blocks."""
        for layer, memory in enumerate(self.layers):
            for page, block in zip(self.pages(to, layer), self.ids, strict=True):
                np.copyto(page, memory[block].view(np.uint64))

    def in_blocks(self, ids: npt.NDArray[np.intp]) -> int:
        """Bytes that are right in these blocks."""
        page = self.shape.page
        right = 0
        for layer, memory in enumerate(self.layers):
            wanted = self.pages(self.objects, layer)
            for place, block in enumerate(ids):
                found = memory[block].view(np.uint64)
                right += page * bool(np.array_equal(found, wanted[place]))
        return right

    def in_store(self) -> int:
        """Bytes that are right in the store."""
        buffer = prefaulted(_READ_BACK, self.shape.object_bytes)
        right = 0
        for start in range(0, self.blocks, _READ_BACK):
            keys = self.keys[start : start + _READ_BACK]
            found = buffer[: len(keys)]
            found[:, :] = 0
            self.store.get_into(keys, [row.data for row in found])
            right += right_rows(found, self.objects[start : start + len(keys)])
        return right

    def span(self, blocks: int) -> akv.Span:
        ids = tuple(int(block) for block in self.ids[:blocks])
        return akv.Span(first_block=0, hashes=self.hashes[:blocks], block_ids=ids)

    def load(self, portal: Portal, blocks: int) -> None:
        spec = akv.LoadSpec(
            request_id="bench",
            space=_SPACE.prefix,
            load_id=next(self._ids),
            local=0,
            usable=blocks * self.shape.block,
            spans=(self.span(blocks),),
        )
        outcome = portal.call(lambda session: session.load(spec), timeout=120)
        if not outcome.landed:
            raise RuntimeError(f"the load failed: {outcome.reason}")

    def save(self, portal: Portal) -> None:
        number = next(self._ids)
        spec = akv.SaveSpec(
            request_id="bench",
            space=_SPACE.prefix,
            job_id=number,
            chain=number,
            spans=(self.span(self.blocks),),
        )
        outcome = portal.call(lambda session: session.save(spec), timeout=120)
        if outcome.dropped:
            raise RuntimeError(f"the save dropped blocks: {outcome.reason}")


@contextmanager
def _stage(shape: Shape, tokens: int, settings: Settings) -> Iterator[Stage]:
    blocks = tokens // shape.block
    size = blocks * shape.object_bytes
    path = settings.in_memory() / "session"
    room = shutil.disk_usage(settings.in_memory()).free
    if room < size * 5 // 4:
        raise Skip(f"{size >> 20} MiB do not fit into shared memory")
    need_memory(6 * size)
    stage = Stage(shape, blocks, f"local:{path}?capacity={size}")
    try:
        yield stage
    finally:
        stage.store.close()
        shutil.rmtree(path)


def _load_and_save(shape: Shape, name: str, settings: Settings) -> list[Row]:
    tokens = 2048 if settings.quick else 8192
    with _stage(shape, tokens, settings) as stage:
        portal = stage.portal()
        try:
            return _rows(stage, portal, f"{tokens:,} tokens, {name}", settings)
        finally:
            portal.close()


def _rows(stage: Stage, portal: Portal, text: str, settings: Settings) -> list[Row]:
    rounds = settings.rounds(5)
    copied = prefaulted(stage.blocks, stage.shape.object_bytes)

    def to_load(number: int) -> None:
        stage.new_content(number)
        stage.put()

    def to_save(number: int) -> None:
        stage.new_content(number)
        stage.copy_in(stage.ids)

    return [
        compare(
            "session",
            f"load {text}",
            Side(
                name="akv",
                run=clock(lambda: stage.load(portal, stage.blocks)),
                moved=lambda: stage.in_blocks(stage.ids),
            ),
            Side(
                name="numpy, same pages",
                run=clock(lambda: stage.copy_in(stage.other_ids)),
                moved=lambda: stage.in_blocks(stage.other_ids),
            ),
            unit=Unit.GB_PER_SECOND,
            rounds=rounds,
            amount=stage.total,
            before_round=to_load,
        ),
        compare(
            "session",
            f"save {text}",
            Side(
                name="akv",
                before=lambda: stage.store.remove(stage.keys),
                run=clock(lambda: stage.save(portal)),
                moved=stage.in_store,
            ),
            Side(
                name="numpy, same pages",
                run=clock(lambda: stage.copy_out(copied)),
                moved=lambda: right_rows(copied, stage.objects),
            ),
            unit=Unit.GB_PER_SECOND,
            rounds=rounds,
            amount=stage.total,
            before_round=to_save,
        ),
    ]


class _Switch:
    """An observer that is another one at each run: same portal, same memory."""

    def __init__(self) -> None:
        self.to: Observer = NullObserver()

    def on(self, event: Event) -> None:
        self.to.on(event)


class _Keep:
    """Keeps the events of the last loads."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on(self, event: Event) -> None:
        self.events.append(event)


def _events(settings: Settings) -> list[Row]:
    tokens = 2048 if settings.quick else 8192
    log = settings.disk / "events.jsonl"
    registry = CollectorRegistry()
    written = JsonLines(str(log), role="bench")
    sinks: dict[str, Observer] = {
        "log at its default level": Fanout([LogSink(role="bench")]),
        "metrics": Fanout([PrometheusSink(registry)]),
        "event log": Fanout([written]),
    }
    switch = _Switch()
    rows: list[Row] = []
    with _stage(SMALL, tokens, settings) as stage:
        portal = stage.portal(switch)
        try:
            for blocks in (stage.blocks, 1):
                on = sinks["event log"]
                rows.append(_on_and_off(stage, portal, switch, on, blocks, settings))
                rows += _shares(stage, portal, switch, sinks, blocks, settings)
        finally:
            portal.close()
            written.close()
    _check_sinks(log, registry, rows)
    return rows


def _loads_of(stage: Stage, blocks: int) -> str:
    return f"{blocks * stage.shape.block:,} tokens" if blocks > 1 else "one block"


def _on_and_off(
    stage: Stage,
    portal: Portal,
    switch: _Switch,
    on: Observer,
    blocks: int,
    settings: Settings,
) -> Row:
    repeats = 2 if blocks > 1 else 100
    ids = stage.ids[:blocks]

    def loads() -> None:
        for _ in range(repeats):
            stage.load(portal, blocks)

    def stand(observer: Observer) -> None:
        switch.to = observer
        for memory in stage.layers:
            memory[ids] = 0

    def moved() -> int:
        page = stage.shape.page
        right = 0
        for layer, memory in enumerate(stage.layers):
            wanted = stage.pages(stage.objects, layer)
            for place, block in enumerate(ids):
                found = memory[block].view(np.uint64)
                right += page * bool(np.array_equal(found, wanted[place]))
        return right

    def to_load(number: int) -> None:
        stage.new_content(number)
        stage.put()

    side = partial(Side, run=clock(loads), moved=moved)
    return compare(
        "events",
        f"load {_loads_of(stage, blocks)}, event log on",
        side(name="log on", before=lambda: stand(on)),
        side(name="log off", before=lambda: stand(NullObserver())),
        unit=Unit.MICROSECONDS,
        rounds=settings.rounds(7),
        amount=blocks * stage.shape.object_bytes,
        calls=repeats,
        before_round=to_load,
    )


def _shares(
    stage: Stage,
    portal: Portal,
    switch: _Switch,
    sinks: dict[str, Observer],
    blocks: int,
    settings: Settings,
) -> list[Row]:
    """What the events of a load cost by themselves, as a share of the load.

    Two loads differ by more than that. So the events of real loads are made
    again and given to the sink, in the same round.
    """
    repeats, rounds = (
        (5, settings.rounds(7)) if blocks > 1 else (50, settings.rounds(7))
    )
    loads: list[float] = []
    costs: dict[str, list[float]] = {name: [] for name in sinks}

    def load() -> None:
        for _ in range(repeats):
            stage.load(portal, blocks)

    for number in range(rounds + 1):
        keep = switch.to = _Keep()
        with without_gc():
            seconds = clock(load)()
        loads += [seconds / repeats * 1e6] if number else []
        for name, sink in sinks.items():

            def emit(sink: Observer = sink, events: list[Event] = keep.events) -> None:
                for event in events:
                    sink.on(replace(event))

            with without_gc():
                seconds = clock(emit)()
            costs[name] += [seconds / repeats * 1e6] if number else []
    rows = []
    for name, cost in costs.items():
        ratio = Spread.of([one / load for one, load in zip(cost, loads, strict=True)])
        rows.append(
            Row(
                case="events",
                what=f"events of a load, {_loads_of(stage, blocks)}: {name}",
                unit=Unit.MICROSECONDS,
                value=Spread.of(cost),
                against="the load",
                other=Spread.of(loads),
                ratio=ratio,
                target=_SHARE if name.startswith("log ") else None,
                judged=ratio.median,
                rounds=rounds,
            )
        )
    return rows


def _check_sinks(path: Path, registry: CollectorRegistry, rows: list[Row]) -> None:
    """Raise if nothing was written, or counted: then nothing was measured."""
    written = path.read_text(encoding="utf-8").count('"akv.load.landed"')
    path.unlink()
    name, labels = "akv_load_seconds_count", {"outcome": "landed"}
    counted = registry.get_sample_value(name, labels) or 0
    for what, landed in (("event log", written), ("metrics", counted)):
        if landed < max(row.rounds for row in rows):
            raise RuntimeError(f"the {what} know of {landed} loads")


CASES = [
    Case(
        name="session/12KiB",
        title="load and save pages of 12 KiB (30 layers, blocks of 16)",
        run=partial(_load_and_save, SMALL, "pages of 12 KiB"),
    ),
    Case(
        name="session/512KiB",
        title="load and save pages of 512 KiB (32 layers, blocks of 128)",
        run=partial(_load_and_save, LARGE, "pages of 512 KiB"),
    ),
    Case(name="events", title="what the events of a load cost", run=_events),
]
