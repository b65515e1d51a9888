"""Real vLLM, a real model, real processes: the same words, from stored blocks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mooncake_master import make_master

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


@contextmanager
def engine(
    model: Path,
    rounds: list[list[Any]],
    extra: dict[str, Any] | None,
    *,
    stay: bool = False,
) -> Iterator[Any]:
    """One engine process, and the answers that it gave."""
    job = {"model": str(model), "rounds": rounds, "extra": extra, "stay": stay}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "ask.py"), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ
            | {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONWARNINGS": "ignore"},
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        watchdog = threading.Timer(400, process.kill)
        watchdog.start()
        try:
            for line in process.stdout:
                if line.startswith("RESULT "):
                    yield json.loads(line.removeprefix("RESULT "))
                    break
            else:
                log.seek(0)
                pytest.fail(f"no result from the engine:\n{log.read()[-4000:]}")
        finally:
            process.stdin.close()
            process.wait(60)
            watchdog.cancel()


def ask(model: Path, rounds: list[list[Any]], extra: dict[str, Any] | None) -> Any:
    """The answers of an engine process that has ended."""
    with engine(model, rounds, extra) as answers:
        return answers


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    """What vLLM answers without akv."""
    (answers,) = ask(model, [PROMPTS], None)
    assert "Paris" in answers[0]["text"]
    return answers


def test_words_are_the_same_and_hits_are_as_the_rounding_rule_says(
    model: Path, store: str, plain: Any
) -> None:
    """Without akv, cold, after a cache reset, and in a new process."""
    cold, reset = ask(model, [PROMPTS, PROMPTS], {"store": store})
    (again,) = ask(model, [PROMPTS], {"store": store})
    texts = [answer["text"] for answer in plain]
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


def test_a_second_engine_answers_from_the_blocks_of_the_first_in_a_mooncake_pool(
    model: Path, plain: Any
) -> None:
    """Two engine processes, one master, the same words."""
    with make_master() as master:
        url = master.url(protocol="tcp", segment="256MiB", hostname="127.0.0.1")
        extra = {"store": url}
        with engine(model, [PROMPTS], extra, stay=True) as (first,):
            (second,) = ask(model, [PROMPTS], extra)
    texts = [answer["text"] for answer in plain]
    assert [answer["text"] for answer in first] == texts
    assert [answer["text"] for answer in second] == texts
    assert [answer["cached"] or 0 for answer in first] == [0] * len(PROMPTS)
    predicted = [(answer["tokens"] - 1) // BLOCK * BLOCK for answer in plain]
    assert [answer["cached"] for answer in second] == predicted
