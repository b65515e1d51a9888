"""Engines that write a real event log, and what one command says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from bugs.rig import Rig

from akv.cli import main
from akv.testing.stores import GatedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.engine import Engine


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig whose gates are open at the end, so that no thread stays behind."""
    rig = Rig(monkeypatch)
    yield rig
    for store in rig.opened:
        if isinstance(store, GatedStore):
            store.open()
    rig.store.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the event log of a test lies."""
    return tmp_path / "events.jsonl"


@pytest.fixture
def logging(rig: Rig, log: Path) -> Callable[..., Engine]:
    """Make engines that write to the log; both roles to one file."""

    def make(settings: dict[str, Any] | None = None, **options: Any) -> Engine:
        return rig.engine({"log_events": str(log), **(settings or {})}, **options)

    return make


@pytest.fixture
def why(log: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """What one command says of a request."""

    def ask(request_id: str) -> str:
        capsys.readouterr()
        assert main(["trace", str(log), "--request", request_id]) == 0
        return capsys.readouterr().out

    return ask
