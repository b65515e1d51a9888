"""The guide on embedding, typed into an empty file, is a server that caches."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.testclient import TestClient

if TYPE_CHECKING:
    import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "embedding.md"
SECTION = "## From an empty file to a cached server"


def test_the_blocks_of_the_guide_are_a_server_that_answers_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers, one store; the numbers are those that the page tells."""
    section = GUIDE.read_text().partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 4
    server = tmp_path / "server.py"
    server.write_text("\n".join(blocks))
    monkeypatch.setenv("AKV_STORE", f"local:{tmp_path}/store?capacity=16MiB")
    monkeypatch.setenv("AKV_LOOKUP_DEADLINE", "30")
    said = []
    memories = []
    for _ in range(2):
        names = runpy.run_path(str(server))
        with TestClient(names["app"]) as client:
            answer = client.post("/prefill", json={"tokens": list(range(1, 101))})
        said.append(answer.text)
        memories.append(names["memory"].tobytes())
    assert said[0] != said[1]
    for text in said:
        assert f"`{text}`" in section
    # What was loaded is what had been computed.
    assert memories[0] == memories[1] != bytes(len(memories[0]))
