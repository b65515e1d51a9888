"""``akv bench``: a row for memory and for each store, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from akv.cli import main
from akv.store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = ["--size", "64KiB", "--total", "1MiB"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    """A store of somebody."""
    url = f"local:{tmp_path}/store?capacity=8MiB"
    store = LocalStore.open(url, slot_bytes=1 << 16)
    yield store
    store.close()


def test_a_script_gets_a_row_for_memory_and_each_store(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was put into the store is not there any more."""
    before = set(Path("/dev/shm").glob(".akv-bench-*"))
    assert main(["bench", *SMALL, "--json", "--store", store.url]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["object_bytes"] == 1 << 16
    assert [row["name"] for row in report["rows"]] == ["memcpy", "local:", store.url]
    for row in report["rows"]:
        assert row["put_bytes_per_second"] > 0
        assert row["get_bytes_per_second"] > 0
    assert store.statistics().objects == 0
    assert set(Path("/dev/shm").glob(".akv-bench-*")) == before


def test_a_person_gets_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """With ratios to memcpy, which is 1."""
    pytest.importorskip("rich")
    assert main(["bench", *SMALL]) == 0
    out = capsys.readouterr().out
    (plain,) = (
        line for line in out.splitlines() if "memcpy " in line and "GB" not in line
    )
    assert plain.split("│")[3].strip() == "1.00"
    assert "local:" in out


def test_a_store_that_is_full_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused, as an eviction would be the price."""
    store = LocalStore.open(f"local:{tmp_path}/s?capacity=1MiB", slot_bytes=1 << 16)
    assert main(["bench", *SMALL, "--size", "128KiB", "--store", store.url]) == 1
    store.close()
    assert "has no room for 8 objects" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--size", "big"], ["--total", "1KiB"]])
def test_a_size_that_is_none_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to give."""
    assert main(["bench", *arguments, "--json"]) == 1
    assert "give" in capsys.readouterr().err
