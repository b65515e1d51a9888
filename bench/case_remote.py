"""Loads from another process over TCP, akv beside vLLM's MooncakeStoreConnector.

Four processes have an engine each. Two lend a segment, each to one connector, and save
the prompts into it. Two load, with segments that stay empty, so each byte comes over
TCP, with what Mooncake does by default. The prompts stay the same in all rounds: an
engine forgets its own prefix cache between two loads.

A get that fails is a block that the engine has to compute after it was promised. The
runner computes nothing, so such a block has not the bytes that were saved. Where
upstream has lost blocks, or a load of it never ends, the two have not done the same
work: then the blocks are counted, and akv's speed stands alone. After a load that does
not end (nothing moves for half a minute) upstream gets no other one.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from case_peer import (
    _SHAPES,
    _UPSTREAM,
    _akv,
    _Figures,
    _harness,
    _lent,
    _Loaded,
    _maker,
    _one_rank,
    _pages,
    _prompt,
    _row,
    _take_turns,
    _upstream,
    _without_native_logs,
    _Work,
)
from measure import Case, Row, Settings, Spread, Target, Unit
from memory import need_memory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

__all__ = ("CASES",)

_AKV = "akv on Mooncake"
_EMPTY = 64 << 20
"""What those who load lend: upstream's connector does not start without a segment."""

_WORKS = (
    _Work(requests=1, tokens=2048, pool=2.0, local=0.0),
    _Work(requests=8, tokens=2048, pool=2.0, local=0.0),
)
_Places = list[list[int]]


class _GoneError(RuntimeError):
    """An engine's process has ended by itself."""


class _Process:
    """An engine in a process of its own, which ends with the ``with`` block."""

    def __init__(
        self, name: str, size: str, master: Any, segment: int, directory: Path
    ) -> None:
        self.name = name
        self.lookups: list[float] = []
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(name, size, master, segment, directory, theirs)
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def save(self, prompts: Sequence[Sequence[int]]) -> _Places:
        """Save prompts; in which blocks they were."""
        _, where = self._ask("save", prompts)
        places: _Places = where
        return places

    def load(self, prompts: Sequence[Sequence[int]], saved: _Places) -> _Loaded:
        """Load prompts whose blocks were ``saved`` there."""
        loaded: _Loaded = self._ask("load", prompts, saved)
        return loaded

    def _ask(self, *question: object) -> Any:
        try:
            self._pipe.send(question)
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(20)
            ended = self._process.exitcode
            raise _GoneError(f"{self.name}: its process ended with {ended}") from None


def _serve(
    name: str, size: str, master: Any, segment: int, directory: Path, pipe: Connection
) -> None:
    """The other process: do what is asked until the pipe is closed."""
    # Leave by way of all clean-ups.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    engine_class, _ = _harness()
    from mooncake_master import free_port

    shape = _SHAPES[size]
    blocks = max(work.requests * (work.tokens // shape.block + 1) for work in _WORKS)
    # One model for all: what names it is part of the keys.
    make = _maker(engine_class, shape, blocks + 8, model_dir=directory / "model")
    if name == _UPSTREAM:
        path = directory / f"mooncake-{segment}.json"
        opened = _upstream(make, shape, master, segment, path)
    else:
        own = f"127.0.0.1:{free_port()}"
        url = master.url(
            protocol="tcp", segment=segment, hostname=own, preferred_segment=own
        )
        # Computing takes no time here, so akv would rather compute than load.
        opened = _akv(make, shape, name, url, load_or_compute=False)
    with _one_rank(), _lent(opened, segment) as engine, contextlib.suppress(EOFError):
        while True:
            verb, *arguments = pipe.recv()
            pipe.send(getattr(engine, verb)(*arguments))
    # Upstream's threads wait for messages that never come.
    os._exit(0)


def _measure(size: str, settings: Settings) -> list[Row]:
    shape = _SHAPES[size]
    kept = sum(work.requests * work.tokens for work in _WORKS) // shape.block
    segment = -(-kept * shape.block_bytes * 4 // 3 >> 24) << 24
    need_memory(6 * segment)
    directory = settings.in_memory() / f"remote-{size}"
    directory.mkdir()
    _, master = _harness()
    # Only its ports are of interest over there, and its process cannot be sent.
    ports = copy.copy(master)
    rows: list[Row] = []
    with (
        _without_native_logs(directory),
        master,
        _Process(_UPSTREAM, size, ports, segment, directory) as theirs,
        _Process(_AKV, size, ports, segment, directory) as mine,
    ):
        for work in _WORKS:
            prompts = [
                _prompt((work.requests, request), work.tokens)
                for request in range(work.requests)
            ]
            saved = {one.name: one.save(prompts) for one in (theirs, mine)}
            with (
                _Process(_UPSTREAM, size, ports, _EMPTY, directory) as they,
                _Process(_AKV, size, ports, _EMPTY, directory) as we,
            ):
                load = partial(_load, prompts, saved)
                rows += _loads(size, work, (they, we), load, settings.rounds(4))
    return rows


def _load(
    prompts: Sequence[Sequence[int]], saved: dict[str, _Places], engine: _Process
) -> _Loaded | None:
    """Load once; None if upstream's engine gives up, or has before."""
    try:
        return engine.load(prompts, saved[engine.name])
    except _GoneError:
        if engine.name == _UPSTREAM:
            return None
        raise


def _loads(
    size: str,
    work: _Work,
    engines: Sequence[_Process],
    load: partial[_Loaded | None],
    rounds: int,
) -> list[Row]:
    shape = _SHAPES[size]
    blocks = work.requests * work.tokens // shape.block
    amount = blocks * shape.block_bytes
    lost = {engine.name: 0 for engine in engines}
    tried = dict(lost)
    stuck: set[str] = set()

    def one_round(engine: _Process, mine: _Figures, _: int) -> None:
        if engine.name in stuck:
            return
        loaded = load(engine)
        right = 0
        if loaded is None:
            stuck.add(engine.name)
        else:
            right = loaded.right // shape.block_bytes
            mine.add(load=amount / loaded.seconds / 1e9)
        tried[engine.name] += blocks
        lost[engine.name] += blocks - right

    figures = _take_turns(engines, rounds, one_round)
    mine = figures[_AKV]
    case, what = "peer/remote", f"{work} over TCP, {_pages(size)}"
    failed = Row(
        case=case,
        what=f"{_AKV}, blocks lost, {what}",
        unit=Unit.COUNT,
        value=Spread(lost[_AKV], lost[_AKV], lost[_AKV]),
        against=f"upstream {lost[_UPSTREAM]:,} of {tried[_UPSTREAM]:,}",
        target=Target(1, at_least=False),
        judged=lost[_AKV],
        rounds=rounds + 1,
        amount=tried[_AKV],
    )
    text = f"{_AKV}, load {what}"
    if lost[_AKV]:
        return [failed]
    if not lost[_UPSTREAM]:
        pair = (mine, "load"), (figures[_UPSTREAM], "load")
        return [failed, _row((case, text), Unit.GB_PER_SECOND, *pair, limit=work.pool)]
    alone = Row(
        case=case,
        what=f"{text}, GB/s",
        unit=Unit.COUNT,
        value=Spread.of(mine.of["load"]),
        against="upstream never ended" if stuck else "upstream lost blocks",
        rounds=rounds,
        amount=amount,
    )
    return [failed, alone]


CASES = [
    Case(
        name=f"peer/remote/{size}",
        title=f"loads from another process over TCP, {_pages(size)}",
        run=partial(_measure, size),
    )
    for size in ("large", "small")
]
