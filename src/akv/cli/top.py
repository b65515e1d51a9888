"""``akv top`` shows what stores hold and what sessions do, as it goes on."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akv.cli.store import known_stores, open_existing, store_facts
from akv.core.errors import AkvError, ConfigError
from akv.core.sizes import format_size
from akv.trace.live import Live
from akv.trace.needs import need
from akv.trace.reading import Tail, read_logs

if TYPE_CHECKING:
    import argparse

    from akv.cli.command import Commands
    from akv.store import BlockStore
    from akv.trace.live import Rates, Snapshot

__all__ = ("add_command", "run")


def add_command(commands: Commands) -> None:
    """Add ``akv top`` to the commands of a parser."""
    parser = commands.add_parser(
        "top",
        help="watch stores and running sessions",
        description="Shows the stores of this machine (objects, bytes) and, from the "
        "event logs that are given (the setting log_events), the sessions that are "
        "open: hit ratio, rates over the last seconds, bytes in flight, breaker. "
        "Without --store: the store of the settings, else all that akv made in "
        "shared memory for this user. Ends with Ctrl-C.",
        epilog="example: akv top /var/log/akv/events.jsonl --store local:/dev/shm/akv  "
        " example: akv top events.jsonl --once --json",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="an event log")
    parser.add_argument("--store", metavar="URL", help="a store that is there")
    parser.add_argument(
        "--interval", type=float, default=1.0, help="seconds between two looks (1)"
    )
    parser.add_argument(
        "--window", type=float, default=60.0, help="seconds that rates are of (60)"
    )
    parser.add_argument("--once", action="store_true", help="look once")
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a look instead of tables (without this rich is needed: "
        "pip install 'akv-connector[cli]')",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, print, and look again until Ctrl-C or, with ``--once``, no more.

    :raises AkvError: a file or a named store is not there, or rich is missing
    """
    for name in ("interval", "window"):
        if not getattr(options, name) > 0:
            raise ConfigError(name, getattr(options, name), "give seconds above 0")
    if not options.json:
        console = need("rich.console", extra="cli", what="akv top").Console()
    for path in options.files:
        if not Path(path).is_file():
            read_logs([path])  # says what is near it
    with ExitStack() as stack:
        view = _View(options, stack)
        try:
            if options.json:
                view.json()
            elif options.once:
                console.print(view.tables())
            else:
                live = need("rich.live", extra="cli", what="akv top").Live(
                    console=console, screen=True, auto_refresh=False
                )
                with live:
                    while True:
                        live.update(view.tables(), refresh=True)
                        time.sleep(options.interval)
        except KeyboardInterrupt:
            pass
    return 0


class _View:
    """What is looked at, and what it looks like."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self._options = options
        self._live = Live(seconds=options.window)
        self._stores: list[BlockStore] = []
        self._tails: list[Tail] = []
        for path in options.files:
            # What it was before it was full says which sessions are open.
            before = Tail(f"{path}.1")
            self._live.add(before.read())
            before.close()
            self._tails.append(Tail(path))
            stack.callback(self._tails[-1].close)
        try:
            urls = known_stores(options.store)
        except AkvError:
            if options.store or not options.files:
                raise
            urls = []
        for url in urls:
            self._stores.append(open_existing(url))
            stack.callback(self._stores[-1].close)

    def json(self) -> None:
        """One object a look."""
        while True:
            snapshot, stores = self._look()
            print(json.dumps({**asdict(snapshot), "stores": stores}), flush=True)
            if self._options.once:
                return
            time.sleep(self._options.interval)

    def tables(self) -> Any:
        """One look, for rich to print."""
        group = need("rich.console", extra="cli", what="akv top").Group
        snapshot, stores = self._look()
        parts = [_store_table(stores)] if stores else []
        if self._tails:
            parts += [_rate_table(snapshot), _session_table(snapshot)]
        return group(*parts)

    def _look(self) -> tuple[Snapshot, list[dict[str, Any]]]:
        for tail in self._tails:
            self._live.add(tail.read())
        stores = []
        for store in self._stores:
            try:
                stores.append(store_facts(store))
            except AkvError as error:
                stores.append({"url": store.url, "error": str(error)})
        return self._live.snapshot(time.monotonic()), stores


def _table(title: str, *columns: str) -> Any:
    table = need("rich.table", extra="cli", what="akv top").Table(title=title)
    table.title_justify = "left"
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def _store_table(stores: list[dict[str, Any]]) -> Any:
    table = _table("stores", "store", "objects", "bytes", "of", "evicted", "open in")
    for facts in stores:
        if "error" in facts:
            table.add_row(facts["url"], facts["error"])
            continue
        capacity, evictions = facts["bytes_capacity"], facts["evictions"]
        table.add_row(
            facts["url"],
            str(facts["objects"]),
            format_size(facts["bytes_used"]),
            format_size(capacity) if capacity else "no limit",
            "not known" if evictions is None else str(evictions),
            f"{facts['processes']} processes" if "processes" in facts else "",
        )
    return table


def _rate_table(snapshot: Snapshot) -> Any:
    rates = snapshot.rates
    table = _table(f"the last {rates.seconds:.0f} s", "", "")
    table.show_header = False
    for name, text in (
        ("hit ratio", _share(rates)),
        ("requests", f"{rates.requests_per_second:.1f}/s"),
        ("lookups", f"{rates.lookups_per_second:.1f}/s, {rates.lookups_late} late"),
        ("loads", f"{rates.loads_per_second:.1f}/s, {rates.loads_failed} failed"),
        ("loaded", f"{format_size(int(rates.load_bytes_per_second))}/s"),
        ("saved", f"{format_size(int(rates.save_bytes_per_second))}/s"),
        ("not saved", f"{rates.blocks_dropped} blocks"),
    ):
        table.add_row(name, text)
    return table


def _share(rates: Rates) -> str:
    """Of the prompts' tokens, else, where no scheduler decided, of the blocks."""
    for ratio, unit in (
        (rates.token_hit_ratio, "tokens"),
        (rates.block_hit_ratio, "blocks"),
    ):
        if ratio is not None:
            return f"{100 * ratio:.1f} % of the {unit}"
    return "nothing asked"


def _session_table(snapshot: Snapshot) -> Any:
    names = ("session", "loads", "saves", "quarantine", "breaker", "quiet for")
    table = _table("open sessions: calls and bytes in flight", *names)
    for one in snapshot.sessions:
        table.add_row(
            f"{one.role} {one.pid}",
            f"{one.loads}, {format_size(one.load_bytes)}",
            f"{one.saves}, {format_size(one.save_bytes)}",
            format_size(one.quarantined_bytes),
            one.breaker,
            f"{one.quiet_seconds:.0f} s",
        )
    return table
