"""``akv trace``: one request, all of them, and what is said when there is none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio
import pytest

from akv.cli import main
from akv.store import MemoryStore
from serving import HASHES, serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
async def log(tmp_path: Path) -> Path:
    """A log of two requests: one saves, the other one loads what it saved."""
    path = tmp_path / "events.jsonl"
    async with serving(path, MemoryStore()) as server:
        await server.lookup("cmpl-7-0-abcdef", HASHES)
        await server.save("cmpl-7-0-abcdef", HASHES[:6])
        await server.lookup("cmpl-8-0-fedcba", HASHES)
        await server.load("cmpl-8-0-fedcba", HASHES[:6])
    return path


async def test_the_id_that_a_client_sees_is_enough(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's own ids go on behind it."""
    assert main(["trace", str(log), "--request", "cmpl-8"]) == 0
    assert capsys.readouterr().out.startswith("request cmpl-8-0-fedcba, 20")


async def test_a_script_gets_the_numbers_of_a_request(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seconds, tokens and bytes, and the reasons by name."""
    assert main(["trace", str(log), "--request", "cmpl-8", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["blocks_asked"], told["blocks_found"]) == (10, 6)
    assert (told["blocks_loaded"], told["tokens_loaded"]) == (6, 96)
    assert [one["name"] for one in told["why_not_more"]] == ["miss"]
    assert told["key_space"]["namespace"] == "n"
    assert told["load_deadline_seconds"] == 5.0
    parts = told["wait_seconds"], told["fetch_seconds"], told["place_seconds"]
    assert sum(parts) > 0
    assert all(part <= told["load_seconds"] for part in parts)


async def test_the_summary_counts_what_happened(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text by default, as one object for scripts."""
    assert main(["trace", str(log), "--summary", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["requests"] == 2
    assert told["lookups"] == told["lookup_seconds"]["count"] == 2
    assert told["block_hit_ratio"] == 6 / 20
    assert (told["loads"], told["loads_landed"], told["saves"]) == (1, 1, 1)
    assert told["reasons"] == {"miss": 2}
    assert told["worst"][0]["seconds"] >= told["worst"][1]["seconds"]
    quantiles = [told["lookup_seconds"][name] for name in ("p50", "p90", "p99", "max")]
    assert quantiles == sorted(quantiles)
    assert main(["trace", str(log)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 requests in ")
    assert "30.0 % of the blocks found" in text


async def test_a_request_that_is_not_there_is_answered_with_those_near_it(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a typing error, and by a beginning that several have."""
    assert main(["trace", str(log), "--request", "cmpl-9-0-fedcba"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "among 2; are near it: cmpl-8-0-fedcba" in captured.err
    assert main(["trace", str(log), "--request", "cmpl"]) == 1
    assert "begin so: cmpl-7-0-abcdef, cmpl-8-0-fedcba" in capsys.readouterr().err


async def test_a_file_that_is_not_there_is_answered_with_those_near_it(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with what to give."""
    assert main(["trace", str(log.with_name("event.jsonl"))]) == 1
    assert "near it are" in capsys.readouterr().err
    assert main(["trace", str(log), "--chrome", str(log.parent / "no" / "x.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


async def test_half_a_line_is_mentioned(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything before it is told."""
    async with await anyio.open_file(log, "ab") as file:
        await file.write(b'{"event":"akv.lo')
    assert main(["trace", str(log)]) == 0
    assert "1 lines could not be read" in capsys.readouterr().out


@pytest.mark.parametrize("picture", ["--chrome", "--html"])
async def test_a_log_is_not_written_over(
    picture: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip on the command line costs no evidence."""
    before = await anyio.Path(log).read_bytes()
    assert main(["trace", str(log), picture, str(log)]) != 0
    assert "is the log itself" in capsys.readouterr().err
    assert await anyio.Path(log).read_bytes() == before


@pytest.mark.parametrize(
    "command", [["trace"], ["top"], ["bench"], ["store", "stat"], ["store", "clear"]]
)
async def test_help_teaches_with_an_example(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command has one that begins with its own name."""
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"example: akv {' '.join(command)}" in out
