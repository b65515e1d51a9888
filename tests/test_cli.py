"""``akv check``: one line for each thing, what to do, and an exit status."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from mooncake_master import BlackHole, Master, make_master

from akv.cli import main
from akv.cli.check import Finding, check
from akv.config import Config
from akv.store import MooncakeStore, Status
from akv.testing.values import key_of, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 1 << 20


@pytest.fixture
def master() -> Iterator[Master]:
    """A master whose pool is empty."""
    with make_master() as master:
        yield master


def lender(master: Master, segment: str) -> MooncakeStore:
    return MooncakeStore.open(
        master.url(segment=segment), slot_bytes=SIZE, environment={}
    )


def found(store: str) -> dict[str, Finding]:
    """What the check of a store finds; of two findings with one name the later."""
    return {finding.name: finding for finding in check(Config(store=store))}


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


def test_a_pool_in_use_is_tried_without_lending_to_it(master: Master) -> None:
    """What others would have put into a segment of ours would go with it."""
    url = f"mooncake://127.0.0.1:{master.port}?metrics_port={master.metrics_port}"
    with closing(lender(master, "64MiB")) as engine:
        seen: dict[str, int] = {}
        for finding in check(Config(store=url)):
            seen[finding.name] = engine.statistics().bytes_capacity
            assert finding.status != "fail", finding
    assert set(seen.values()) == {64 << 20}
    assert list(seen)[-5:] == ["put", "look up", "get", "compare", "remove"]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"segment": "1GiB"}, "engines lend theirs"),
        ({"segment": "0"}, "start the processes that hold the pool"),
    ],
)
def test_a_pool_in_which_nothing_is_lent_is_lent_the_least_for_the_trial(
    settings: dict[str, Any], advice: str, master: Master
) -> None:
    """And is told so; afterwards nothing is lent again."""
    findings = found(master.url(**settings))
    assert findings["segment"].status == "note"
    assert "lending 16MiB for this trial" in findings["segment"].found
    assert advice in findings["segment"].fix
    assert findings["compare"].status == "ok"
    with closing(lender(master, "0")) as store:
        assert store.statistics().bytes_capacity == 0


def test_a_pool_that_may_be_empty_or_full_is_left_alone(master: Master) -> None:
    """Without the master's numbers nobody can say which."""
    for port in (0, master.port):
        findings = found(master.url(metrics_port=port))
        assert findings["put"].status == "fail"
        assert f"metrics_port={port}" in findings["put"].found
        assert "--metrics_port" in findings["put"].fix
        assert "segment" not in findings


def test_a_full_pool_is_told_and_left_alone(master: Master) -> None:
    """Nothing is lent to it; it will have room again."""
    with closing(lender(master, "16MiB")) as engine:
        keys = [key_of(number) for number in range(20)]
        outcomes = engine.put_from(keys, [value_of(key, SIZE) for key in keys])
        assert Status.NO_ROOM in outcomes
        assert Status.HIT in engine.exists(keys, promise=True)
        findings = found(master.url())
    assert findings["put"].status == "note"
    assert "no room in 16MiB" in findings["put"].found
    assert "lend more" in findings["put"].fix
    assert "segment" not in findings


def test_the_master_that_a_file_names_is_tried_by_itself(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in the URL is."""
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({"master_server_address": f"127.0.0.1:{master.port}"}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    tried = found("mooncake:?metrics_port=0")["mooncake master"]
    assert tried.status == "ok"
    assert tried.found.startswith(f"127.0.0.1:{master.port} in ")


def test_why_no_master_answers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is none that took seconds, and a silence is no refusal."""
    monkeypatch.setattr("akv.cli.check._MASTER_SECONDS", 0.2)
    refused = found("mooncake://127.0.0.1:1")["mooncake master"]
    assert refused.found == "127.0.0.1:1: Connection refused"
    with BlackHole() as hole:
        silent = found(f"mooncake://127.0.0.1:{hole.port}")["mooncake master"]
    assert "says nothing within 0.2 s" in silent.found

    def nobody_knows(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody_knows)
    unknown = found("mooncake://no-such.invalid:1")["mooncake master"]
    assert unknown.found == "no-such.invalid:1: Name or service not known"


def test_a_pool_with_a_wrong_setting_is_not_tried_at_all() -> None:
    """The setting is the one line to look at."""
    findings = found("mooncake://127.0.0.1:1?protocol=foo")
    assert "protocol='foo'" in findings["store"].found
    assert "mooncake master" not in findings
