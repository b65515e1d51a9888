"""``akv store``: looks at stores that are there, and empties one namespace."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING

import pytest

from akv.cli import main
from akv.core.keys import KeySpace, fingerprint, make_keys
from akv.store import LocalStore, Status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from akv.core.keys import BlockKey


class Person(io.StringIO):
    """Somebody at a terminal who types this."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def keys_of(namespace: str, count: int) -> tuple[BlockKey, ...]:
    """Keys of a namespace."""
    space = KeySpace(namespace=namespace, fingerprint=fingerprint({}))
    return make_keys(space.prefix, 0, 0, [bytes([n]) * 32 for n in range(count)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    """A store with five objects of one namespace and three of another."""
    url = f"local:{tmp_path}/store?capacity=4MiB"
    store = LocalStore.open(url, slot_bytes=5000)
    for namespace, count in (("blue", 5), ("green", 3)):
        keys = keys_of(namespace, count)
        values = [memoryview(bytes(5000)) for _ in keys]
        assert store.put_from(keys, values) == [Status.STORED] * count
    yield store
    store.close()


def test_a_store_is_looked_at_without_knowing_its_objects(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever their length; beside the processes that have it open."""
    url = store.url.partition("?")[0]
    assert main(["store", "stat", url, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["objects"] == 8
    assert facts["bytes_slot"] == 5000
    assert facts["bytes_capacity"] == 4 << 20
    assert facts["bytes_used"] >= 40_000
    assert main(["store", "stat", url]) == 0
    assert "objects    8" in capsys.readouterr().out


def test_a_store_that_is_not_there_is_not_made(
    tmp_path: Path, store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the ones beside it are named."""
    for command in (["stat"], ["clear", "--namespace", "x", "--yes"]):
        assert main(["store", *command, f"local:{tmp_path}/stare"]) == 1
        error = capsys.readouterr().err
        assert (
            f"there is no store in {tmp_path}/stare; stores beside it: store" in error
        )
    assert main(["store", "stat", "memory:x"]) == 1
    assert "lives in the process that opened it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_one_namespace_is_emptied_and_no_other(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says how many there were; what is not there is 0 and no error."""
    command = ["store", "clear", store.url, "--yes", "--namespace"]
    assert main([*command, "blue"]) == 0
    assert "removed 5 objects of namespace 'blue'" in capsys.readouterr().out
    assert store.exists(keys_of("blue", 5)) == [Status.MISS] * 5
    assert store.exists(keys_of("green", 3)) == [Status.HIT] * 3
    assert main([*command, "blue", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"namespace": "blue", "removed": 0}


@pytest.mark.parametrize(("typed", "left"), [("y\n", 0), ("n\n", 5), ("\n", 5)])
def test_a_person_is_asked_first(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, typed: str, left: int
) -> None:
    """Only a yes removes anything."""
    monkeypatch.setattr(sys, "stdin", Person(typed))
    status = main(["store", "clear", store.url, "--namespace", "blue"])
    assert status == (1 if left else 0)
    assert store.exists(keys_of("blue", 5)).count(Status.HIT) == left


def test_a_script_is_not_asked_and_has_to_say_so(
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a terminal and without --yes nothing is removed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["store", "clear", store.url, "--namespace", "blue"]) == 1
    assert "give --yes" in capsys.readouterr().err
    assert store.exists(keys_of("blue", 5)) == [Status.HIT] * 5
