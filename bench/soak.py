"""Hours in minutes: an engine without a model under pressure, watched for what grows.

    python3 noxfile.py -s soak                    10 minutes
    python3 noxfile.py -s soak -- --minutes 60
    python3 noxfile.py -s soak -- --store local   one kind of store only

Clients hang up at random moments all the time, over a local store and over a Mooncake
pool in turn, in each order of vLLM's hooks, while calls of the store take up to 500 ms,
hang for a minute, fail, and bring half an object. Each turn is an engine of its own,
which is compared with its own beginning when it ends: blocks, staging, permits, tasks.
A line of the table is taken when an engine has ended, all of whose calls have come
back, so that a line shows what the process keeps. At the end memory, threads and
descriptors have to be flat.

Exit status: 0 if nothing grew and nothing was wrong, 1 if something did, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akv.store.mooncake.client import MissingMooncakeError
from case_pressure import DEADLINES, engine_for, kit_of_tests
from measure import Skip

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ("main",)

ABORTS = 600
GROWTH_MIB = 16.0
"""Growth of memory from the middle of a soak to its end that counts as none."""

_HEAD = (
    "minute",
    "store",
    "hooks",
    "RSS MiB",
    "threads",
    "fds",
    "free blocks",
    "staging",
    "loads",
    "aborts",
)
_WIDTHS = (6, 9, 9, 8, 7, 4, 11, 7, 8, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What the process keeps after an engine, and what was done so far."""

    minutes: float
    store: str
    hooks: str
    rss: float
    threads: int
    descriptors: int
    free_blocks: str
    staging: int
    loads: int
    aborts: int

    def __str__(self) -> str:
        return _row(
            f"{self.minutes:.1f}",
            self.store,
            self.hooks,
            f"{self.rss:.1f}",
            self.threads,
            self.descriptors,
            self.free_blocks,
            self.staging,
            f"{self.loads:,}",
            f"{self.aborts:,}",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, and say whether anything grew."""
    options = _parser().parse_args(arguments)
    try:
        kit = kit_of_tests()
    except Skip as reason:
        print(reason)
        return 1
    lines: list[Line] = []
    print(_row(*_HEAD), flush=True)
    try:
        with contextlib.ExitStack() as stack:
            stores = {}
            for kind in options.store or ("local", "mooncake"):
                try:
                    stores[kind] = stack.enter_context(_store(kind))
                except MissingMooncakeError as error:
                    print(f"without {kind}: {error}")
            if not stores:
                return 1
            lines = _soak(kit, stores, options.minutes * 60)
    except KeyboardInterrupt:
        _progress("")
        print("interrupted; nothing is left behind")
        return 130
    except AssertionError as error:
        _progress("")
        print(f"wrong: {type(error).__name__}: {error}")
        return 1
    return _verdict(lines, len(stores))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--store",
        action="append",
        choices=("local", "mooncake"),
        help="only this kind; may be given twice",
    )
    return parser


@contextlib.contextmanager
def _store(kind: str) -> Iterator[str]:
    """The address of a store that outlives the engines."""
    if kind == "mooncake":
        from mooncake_master import Master

        with Master() as master:
            yield master.url(protocol="tcp", segment="64MiB", hostname="127.0.0.1")
        return
    root = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="akv-soak-", dir=root if root.is_dir() else None)
    try:
        yield f"local:{folder}/store?capacity=32MiB"
    finally:
        shutil.rmtree(folder)


def _soak(kit: Any, stores: dict[str, str], seconds: float) -> list[Line]:
    from engine.shapes import INLINE_SHAPES

    lines: list[Line] = []
    loads = aborts = turn = 0
    started = time.monotonic()
    while time.monotonic() - started < seconds or len(lines) < 2 * len(stores):
        kind = list(stores)[turn % len(stores)]
        shape = INLINE_SHAPES[turn // len(stores) % len(INLINE_SHAPES)]

        def show(kind: str = kind, done: int = aborts) -> None:
            _progress(
                f"{(time.monotonic() - started) / 60:.1f} of {seconds / 60:g} min, "
                f"{kind}, more than {done:,} aborts"
            )

        report, free, staging = _turn(kit, stores[kind], shape, turn, show)
        turn += 1
        loads += report.loads
        aborts += report.aborted.total()
        gc.collect()
        held = kit.process_holdings()
        lines.append(
            Line(
                minutes=(time.monotonic() - started) / 60,
                store=kind,
                hooks=str(shape).removesuffix("-inline"),
                rss=_rss(),
                threads=held["threads"],
                descriptors=held["descriptors"],
                free_blocks=free,
                staging=staging,
                loads=loads,
                aborts=aborts,
            )
        )
        _progress("")
        print(lines[-1], flush=True)
    return lines


def _turn(kit: Any, url: str, shape: Any, seed: int, show: Any) -> tuple[Any, str, int]:
    """One engine; what happened, its free blocks, and buffers still in use."""
    shown = 0.0

    def on_step() -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown > 0.5:
            shown = now
            show()

    pressure = kit.Pressure(
        aborts=ABORTS, live=96, burst=48, timeout=300, on_step=on_step
    )
    trouble = kit.Trouble(seed)
    with (
        kit.through(trouble),
        engine_for(
            url,
            DEADLINES,
            num_blocks=480,
            max_num_seqs=48,
            max_num_batched_tokens=1024,
            **shape.options,
        ) as engine,
    ):
        kit.seed_store(engine, seed, pressure)
        before = kit.holdings(engine)
        trouble.begin(kit.ROUGH)
        try:
            report = kit.run_pressure(engine, seed, pressure)
        finally:
            trouble.calm()
        after = kit.settle(engine, before)
        engine.assert_clean(grace=30)
        free = f"{engine.num_free_blocks()}/{engine.num_free_blocks_at_start}"
        staging = sum(
            value for name, value in after.items() if name.endswith("staging not free")
        )
    return report, free, staging


def _rss() -> float:
    """MiB of this process that are in memory now, and in use.

    Opening a Mooncake client takes some 20 MiB for a moment, in the arena of whichever
    thread it is; what the allocator keeps of them for later is no growth.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def _verdict(lines: list[Line], stores: int) -> int:
    """Whether the second half kept more than the first; what is new is no leak."""
    if len(lines) < 4 * stores:
        print("too short to tell what grows; what was counted in each engine was right")
        return 0
    first, second = lines[stores : len(lines) // 2], lines[-len(lines) // 2 :]
    grown = []
    for name, allowed in (
        ("rss", GROWTH_MIB),
        ("threads", 2),
        ("descriptors", 0),
    ):
        early = max(getattr(line, name) for line in first or second)
        late = max(getattr(line, name) for line in second)
        if late > early + allowed:
            grown.append(f"{name} from {early:g} to {late:g}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if grown:
        print(f"NOT flat: {', '.join(grown)}")
        return 1
    print(f"flat: memory, threads and descriptors (peak {peak:.0f} MiB)")
    return 0


def _row(*cells: object) -> str:
    padded = [
        str(cell).rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)
    ]
    return "  ".join(padded)


def _progress(text: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{text}", end="", flush=True)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # What native libraries of vLLM and Mooncake say at their end is no news.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(status)
