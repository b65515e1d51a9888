"""``akv store`` looks at a store that is there, and empties a namespace of it."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from akv.config import Config
from akv.core.errors import AkvError, ConfigError, StoreUnavailableError
from akv.core.keys import KeySpace
from akv.core.sizes import format_size
from akv.store import open_store
from akv.store.local import LocalAddress, owners
from akv.store.local.address import SHARED_MEMORY
from akv.store.local.place import Place
from akv.store.local.slab import read_layout

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from akv.cli.command import Commands
    from akv.store import BlockStore

__all__ = ("add_command", "known_stores", "open_existing", "store_facts")

_OBJECT_BYTES = 1 << 20


def add_command(commands: Commands) -> None:
    """Add ``akv store`` to the commands of a parser."""
    parser = commands.add_parser(
        "store",
        help="look at a store, or empty a namespace of it",
        description="Looks at a store that is there; never makes one.",
        epilog="example: akv store stat local:/dev/shm/akv",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    stat = verbs.add_parser(
        "stat",
        help="objects, bytes, and who has it open",
        description="Prints how many objects a store holds, how full it is, and how "
        "many processes have it open. Without a URL: the store of the settings "
        "(AKV_STORE), else all that akv made in shared memory for this user.",
        epilog="example: akv store stat local:/dev/shm/akv   "
        "example: akv store stat mooncake://127.0.0.1:50051 --json",
    )
    stat.add_argument("url", nargs="?", metavar="URL", help="the store to look at")
    stat.add_argument(
        "--json", action="store_true", help="one JSON object a line, for each store"
    )
    stat.set_defaults(run=_stat)
    clear = verbs.add_parser(
        "clear",
        help="remove all objects of a namespace",
        description="Removes the objects of one namespace, of every model and every "
        "fingerprint in it, while engines go on: what they lose is a miss. Asks "
        "first unless --yes is given, and says how many were removed.",
        epilog="example: akv store clear local:/dev/shm/akv --namespace staging --yes",
    )
    clear.add_argument("url", metavar="URL", help="the store to empty")
    clear.add_argument(
        "--namespace", required=True, help='as in the setting namespace ("default")'
    )
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.add_argument(
        "--json", action="store_true", help="one JSON object instead of a line"
    )
    clear.set_defaults(run=_clear)


def known_stores(url: str | None) -> list[str]:
    """The stores that are meant: ``url``, the one of the settings, or all that are.

    :raises StoreUnavailableError: none was named and there is none
    """
    given = url or Config.load().store
    if given:
        return [given]
    pattern = f"akv-{os.geteuid()}-*"
    found = [
        f"local:{quote(str(path))}"
        for path in sorted(SHARED_MEMORY.glob(pattern))
        if (path / "slab").is_file()
    ]
    if not found:
        raise StoreUnavailableError(
            f"there is no store {SHARED_MEMORY / pattern}; name one: local:/PATH or "
            "mooncake://HOST:PORT"
        )
    return found


def open_existing(url: str) -> BlockStore:
    """Open a store that is there, whatever the length of its objects.

    :raises ConfigError: the URL is not understood, or names nothing that can be
        opened from here
    :raises StoreUnavailableError: there is no such store
    """
    slot_bytes = _OBJECT_BYTES
    match urlsplit(url).scheme:
        case "local":
            slot_bytes = read_layout(_root(url)).slot_bytes
        case "memory":
            raise ConfigError(
                "store", url, "lives in the process that opened it; name another one"
            )
        case _:
            pass
    return open_store(url, slot_bytes=slot_bytes, lend_memory=False)


def store_facts(store: BlockStore) -> dict[str, Any]:
    """What a store says of itself, as JSON values.

    ``bytes_slot`` and ``processes`` (this one not counted) are a local store's;
    ``evictions`` are those since it was opened here, None where it does not know
    those of others.
    """
    numbers = store.statistics()
    facts: dict[str, Any] = {
        "url": numbers.url,
        "objects": numbers.objects,
        "bytes_used": numbers.bytes_used,
        "bytes_capacity": numbers.bytes_capacity,
        "evictions": numbers.evictions,
    }
    if numbers.url.startswith("local:"):
        root = _root(numbers.url)
        living = len(owners.living(Place(root).owners))
        facts |= {
            "evictions": None,
            "bytes_slot": read_layout(root).slot_bytes,
            "processes": living - 1,
        }
    return facts


def _root(url: str) -> Path:
    place = Place(LocalAddress.parse(url).path)
    if not place.check() or not place.slab.exists():
        near = sorted(path.parent.name for path in place.root.parent.glob("*/slab"))
        hint = f"; stores beside it: {', '.join(near)}" if near else ""
        raise StoreUnavailableError(f"there is no store in {place.root}{hint}")
    return place.root


def _stat(options: argparse.Namespace) -> int:
    for number, url in enumerate(known_stores(options.url)):
        store = open_existing(url)
        try:
            facts = store_facts(store)
        finally:
            store.close()
        if options.json:
            print(json.dumps(facts))
            continue
        if number:
            print()
        print(facts["url"])
        used, capacity = facts["bytes_used"], facts["bytes_capacity"]
        share = f", {100 * used / capacity:.1f} % full" if capacity else ""
        print(f"  objects    {facts['objects']}")
        print(
            f"  bytes      {format_size(used)} of "
            f"{format_size(capacity) if capacity else 'no limit'}{share}"
        )
        if "processes" in facts:
            print(f"  objects of {format_size(facts['bytes_slot'])} at most")
            print(f"  open in    {facts['processes']} processes")
    return 0


def _clear(options: argparse.Namespace) -> int:
    prefix = KeySpace.namespace_prefix(options.namespace)
    store = open_existing(options.url)
    try:
        if not options.yes:
            if not sys.stdin.isatty():
                raise AkvError(
                    "there is nobody here to ask whether to remove them: give --yes"
                )
            question = (
                f"Remove all objects of namespace {options.namespace!r} from "
                f"{store.url} ({store.statistics().objects} objects of all "
                "namespaces)? [y/N] "
            )
            if input(question).strip().lower() not in {"y", "yes"}:
                print("nothing was removed")
                return 1
        removed = store.clear(prefix)
    finally:
        store.close()
    if options.json:
        print(json.dumps({"namespace": options.namespace, "removed": removed}))
    else:
        print(f"removed {removed} objects of namespace {options.namespace!r}")
    return 0
