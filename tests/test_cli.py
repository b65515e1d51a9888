"""``akv check``: one line for each thing, what to do, and an exit status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from akv.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def test_a_store_that_works_is_tried_from_put_to_remove(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the trial stays behind, and the store itself is not touched."""
    assert main(["check", "--store", f"local:{tmp_path}/store?capacity=1GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines if line.split()[0] == "ok"]
    assert names[-5:] == ["put", "look", "get", "compare", "remove"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("store", "word"),
    [
        ("local:/nowhere/at/all", "/nowhere/at"),
        ("nonsense:", "akv knows"),
        ("mooncake://127.0.0.1:1", "mooncake_master"),
        ("local:relative", "absolute"),
    ],
)
def test_what_does_not_work_is_said_with_what_to_do(
    store: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the exit status says so to a script."""
    assert main(["check", "--store", store]) == 1
    out = capsys.readouterr().out
    assert "fail" in out
    assert "->" in out
    assert word in out


def test_scripts_get_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, with every finding."""
    assert main(["check", "--json", "--store", f"local:{tmp_path}/store"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {"name": "compare", "status": "ok"}.items() <= report["findings"][-2].items()


def test_a_bad_setting_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is tried."""
    monkeypatch.setenv("AKV_LOAD_DEADLINE", "soon")
    assert main(["check"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "load_deadline='soon'" in captured.err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    """What is tried, in which order, and an example."""
    with pytest.raises(SystemExit) as ended:
        main(["check", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "example: akv check" in out
    assert "Exit status" in out
