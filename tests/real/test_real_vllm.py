"""Real vLLM, a real model, real processes: the same words, from stored blocks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from smollm2 import default_model_dir, ensure_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.vllm_model, pytest.mark.timeout(600)]

BLOCK = 32
CHAT = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def ids(count: int) -> list[int]:
    """A prompt of so many tokens; those of two lengths differ from the start."""
    return [1000 + (count * 7 + n * 13) % 20000 for n in range(count)]


PROMPTS: list[Any] = [
    CHAT,
    ids(4 * BLOCK),  # exactly k blocks
    ids(4 * BLOCK + 1),  # k blocks and one token
    ids(BLOCK - 1),  # less than a block
    ids(BLOCK),  # exactly one block
    ids(20 * BLOCK + 17),
]


@pytest.fixture(scope="module")
def model() -> Path:
    """The small model, built once."""
    return ensure_model(default_model_dir())


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """A store of its own in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="akv-real-", dir="/dev/shm"))
    yield f"local:{folder}/store?capacity=256MiB"
    shutil.rmtree(folder)


def ask(model: Path, rounds: list[list[Any]], extra: dict[str, Any] | None) -> Any:
    """Run one engine process."""
    job = {"model": str(model), "rounds": rounds, "extra": extra}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "ask.py"), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONWARNINGS": "ignore"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    pytest.fail(f"no result, exit status {done.returncode}:\n{done.stderr[-4000:]}")


def test_words_are_the_same_and_hits_are_as_the_rounding_rule_says(
    model: Path, store: str
) -> None:
    """Without akv, cold, after a cache reset, and in a new process."""
    (plain,) = ask(model, [PROMPTS], None)
    cold, reset = ask(model, [PROMPTS, PROMPTS], {"store": store})
    (again,) = ask(model, [PROMPTS], {"store": store})
    texts = [answer["text"] for answer in plain]
    assert "Paris" in texts[0]
    for name, answers in (
        ("cold", cold),
        ("after reset", reset),
        ("new process", again),
    ):
        assert [answer["text"] for answer in answers] == texts, name
    assert [answer["cached"] or 0 for answer in cold] == [0] * len(PROMPTS)
    predicted = [(answer["tokens"] - 1) // BLOCK * BLOCK for answer in plain]
    assert [answer["cached"] for answer in reset] == predicted
    assert [answer["cached"] for answer in again] == predicted
