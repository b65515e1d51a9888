"""The direct way of a load from Mooncake against the staged one, by length of a run.

Two pools with one engine each, in this process: the same pages, once with Mooncake
writing the engine's blocks itself, once by way of akv's staging. What `transfer =
"direct"` would bring where no engine of the pool ever stands still.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from akv.store import MemoryStore
from case_peer import tests_master
from case_session import LARGE, SMALL, Shape, Stage
from measure import Case, Row, Settings, Side, Unit, clock, compare
from memory import need_memory

if TYPE_CHECKING:
    from akv.portal import Portal

__all__ = ("CASES",)


def _ways(shape: Shape, name: str, settings: Settings) -> list[Row]:
    make_master = tests_master()
    tokens = 2048 if settings.quick else 4096
    total = tokens // shape.block * shape.object_bytes
    need_memory(10 * total)
    with ExitStack() as stack:
        sides = [
            _side(way, shape, tokens, stack.enter_context(make_master()), stack)
            for way in ("direct", "staged")
        ]
        return [
            compare(
                "transfer",
                f"load {tokens:,} tokens from Mooncake, {name}",
                *sides,
                unit=Unit.GB_PER_SECOND,
                rounds=settings.rounds(7),
                amount=total,
            )
        ]


def _side(way: str, shape: Shape, tokens: int, master: Any, stack: ExitStack) -> Side:
    blocks = tokens // shape.block
    megabytes = (blocks * shape.object_bytes * 3 // 2 >> 20) + 256
    url = master.url(segment=f"{megabytes}MiB", rpc_timeout=5)
    stage = Stage(shape, blocks, url, store=MemoryStore())
    stage.config = replace(stage.config, transfer=way)
    portal = stage.portal()
    stack.callback(portal.close)
    stage.copy_in(stage.ids)
    stage.save(portal)

    def wipe() -> None:
        for layer in stage.layers:
            layer[:] = 0

    def run(portal: Portal) -> None:
        stage.load(portal, blocks)

    return Side(
        name=way,
        before=wipe,
        run=clock(partial(run, portal)),
        moved=lambda: stage.in_blocks(stage.ids),
    )


CASES = (
    Case(
        name="transfer/12KiB",
        title="direct and staged loads from Mooncake, pages of 12 KiB",
        run=lambda settings: _ways(SMALL, "pages of 12 KiB", settings),
    ),
    Case(
        name="transfer/512KiB",
        title="direct and staged loads from Mooncake, pages of 512 KiB",
        run=lambda settings: _ways(LARGE, "pages of 512 KiB", settings),
    ),
)
