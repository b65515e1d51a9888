"""Measure akv against the plainest way to do the same work.

    python3 noxfile.py -s bench                   everything, about 12 minutes
    python3 noxfile.py -s bench -- --quick        less data, about 4 minutes
    python3 noxfile.py -s bench -- --only store/shm --json figures.json

Every figure is a ratio to something that was measured in the same run: akv and the
other side do the same work in turn, and the median of the rounds is shown with the
smallest and the largest. After each round the data that was moved is compared byte by
byte; where both sides did not move the same, there is no ratio. A ratio of speeds
(GB/s) is better when it is larger, a ratio of times (us) when it is smaller.

What is measured, and against what:

    store     put and get of the local store       numpy copying the same values
    lookup    64 and 500 keys that hit              LMDB reading as many records
    session   a load and a save from end to end     numpy copying the same pages, once
    events    events: log, metrics, event log       the load that they are about
    hooks     vLLM's scheduler inside akv's hooks   the target, and the scheduler's step
    pressure  aborts, hangs and slow puts           deadlines, limits, the calm before
    flight    many requests, one cold prefix        one request alone
    peer      akv in an engine, Mooncake and local  vLLM's own MooncakeStoreConnector
    faults    hooks and steps on a failing pool     the targets, and a pool with room

The machine should have nothing else to do: two busy cores more than double the spread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import case_faults
import case_flight
import case_hooks
import case_lookup
import case_peer
import case_pressure
import case_remote
import case_session
import case_store
import case_transfer
from akv.core.errors import AkvError
from measure import Case, Row, Settings, Skip
from report import as_json, machine, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ("leave", "main")

ROOT = Path(__file__).resolve().parent.parent
SHARED_MEMORY = Path("/dev/shm")
CASES: list[Case] = [
    *case_store.CASES,
    *case_lookup.CASES,
    *case_session.CASES,
    *case_hooks.CASES,
    *case_peer.CASES,
    *case_remote.CASES,
    *case_faults.CASES,
    *case_pressure.CASES,
    *case_flight.CASES,
    *case_transfer.CASES,
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 1 if a comparison was refused or a case broke."""
    options = _parser().parse_args(arguments)
    cases = [case for case in CASES if _wanted(case.name, options.only)]
    if options.list:
        for case in cases:
            print(f"{case.name:26} {case.title}")
        return 0
    signal.signal(signal.SIGTERM, _end)
    started = time.monotonic()
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    rows: list[Row] = []
    skipped: list[tuple[str, str]] = []
    broken = False
    try:
        with _settings(options) as settings:
            for number, case in enumerate(cases, 1):
                place = f"[{number}/{len(cases)}]"
                broken |= _run(case, place, settings, rows, skipped)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left behind")
        return 130
    seconds = time.monotonic() - started
    print()
    if rows:
        print(table(rows))
    for name, reason in skipped:
        print(f"without {name}: {reason}")
    print(f"\n{seconds:.0f} s; {_summary(rows)}")
    if options.json is not None:
        figures = as_json(
            rows, skipped, machine=facts, quick=options.quick, seconds=round(seconds, 1)
        )
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(f"figures in {options.json}")
    return int(broken or any(row.refused for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0, also where a target was missed (the table says so); "
        "1 where a comparison was refused or a case broke",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a third of the data, three rounds: to see that it runs, not to quote",
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write all figures to this file"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="cases whose name begins with NAME, as store, store/shm or hooks; may be "
        "given several times",
    )
    parser.add_argument(
        "--list", action="store_true", help="name the cases and measure nothing"
    )
    parser.add_argument(
        "--disk",
        type=Path,
        default=ROOT / ".akv",
        metavar="DIR",
        help="a directory on the disk to measure; default: .akv in the repository",
    )
    return parser


def _wanted(name: str, only: list[str] | None) -> bool:
    return only is None or any(name.startswith(one) for one in only)


@contextlib.contextmanager
def _settings(options: argparse.Namespace) -> Iterator[Settings]:
    """Directories of this run alone, gone when it ends however it ends."""
    options.disk.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:

        def directory(parent: Path) -> Path:
            made = Path(tempfile.mkdtemp(prefix="akv-bench-", dir=parent))
            stack.callback(shutil.rmtree, made, ignore_errors=True)
            return made

        yield Settings(
            quick=options.quick,
            memory=directory(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
            disk=directory(options.disk),
        )


def _run(
    case: Case,
    place: str,
    settings: Settings,
    rows: list[Row],
    skipped: list[tuple[str, str]],
) -> bool:
    """Measure one case; True if it broke."""
    print(f"{place:8} {case.title} ...", end=" ", flush=True)
    started = time.monotonic()
    try:
        found = case.run(settings)
    except (Skip, AkvError) as reason:
        skipped.append((case.name, str(reason)))
        print("skipped", flush=True)
        return False
    except Exception as error:  # noqa: BLE001 - the other cases go on
        skipped.append((case.name, f"broke: {type(error).__name__}: {error}"))
        print("broke", flush=True)
        return True
    rows += found
    refused = sum(bool(row.refused) for row in found)
    note = f", {refused} refused" if refused else ""
    print(f"{time.monotonic() - started:.1f} s{note}", flush=True)
    return False


def _summary(rows: list[Row]) -> str:
    judged = [row for row in rows if row.met is not None]
    met = sum(bool(row.met) for row in judged)
    return f"{met} of {len(judged)} targets met"


def _end(*_: object) -> NoReturn:
    """Leave by way of all clean-ups."""
    raise SystemExit(143)


def leave(status: int) -> NoReturn:
    """End the program, without what native libraries of vLLM say at their end."""
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(status)


if __name__ == "__main__":
    leave(main())
