"""Real vLLM, streaming clients, half of whom hang up: the others notice nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from smollm2 import default_model_dir, ensure_model

pytestmark = [
    pytest.mark.vllm_model,
    pytest.mark.timeout(600),
    # Two engines that compute 400 answers: up to three minutes on two cores.
    pytest.mark.skipif(
        not os.environ.get("AKV_LONG_TESTS"), reason="set AKV_LONG_TESTS=1 to run it"
    ),
]

CLIENTS = 200
BLOCK = 32
PREFIXES = 24
"""Of two blocks each: as many as the engine has blocks, so that they are evicted."""


def ids(count: int, number: int) -> list[int]:
    """Token ids; those of two numbers differ from the start."""
    return [1000 + (number * 977 + n * 13) % 20000 for n in range(count)]


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """What one engine process said, which has ended by then."""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "abandon.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ
            | {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONWARNINGS": "ignore"},
        ) as process,
    ):
        watchdog = threading.Timer(400, process.kill)
        watchdog.start()
        output, _ = process.communicate(json.dumps(job) + "\n")
        watchdog.cancel()
        for line in output.splitlines():
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return found
        log.seek(0)
        pytest.fail(f"no result from the engine:\n{log.read()[-4000:]}")


def test_those_who_stay_get_the_same_words_and_nothing_is_left_of_those_who_left() -> (
    None
):
    dice = random.Random(11)
    model = ensure_model(default_model_dir())
    prompts = [
        ids(2 * BLOCK, dice.randrange(PREFIXES)) + ids(dice.randint(1, 8), 100 + n % 9)
        for n in range(CLIENTS)
    ]
    leaving = set(dice.sample(range(CLIENTS), CLIENTS // 2))
    abandoned = [dice.randrange(8) if n in leaving else None for n in range(CLIENTS)]
    staying = [n for n in range(CLIENTS) if n not in leaving]
    plain = serve(
        {
            "model": str(model),
            "extra": None,
            "prompts": [prompts[n] for n in staying],
            "abandoned": [None] * len(staying),
        }
    )
    folder = tempfile.mkdtemp(prefix="akv-abandon-", dir="/dev/shm")
    try:
        found = serve(
            {
                "model": str(model),
                "extra": {
                    "store": f"local:{folder}/store?capacity=64MiB",
                    "load_or_compute": False,
                    "log_events": f"{folder}/events.jsonl",
                },
                "prompts": prompts,
                "abandoned": abandoned,
                "warm": [ids(2 * BLOCK + 1, number) for number in range(PREFIXES)],
            }
        )
        events = Path(folder, "events.jsonl").read_text(encoding="utf-8")
    finally:
        shutil.rmtree(folder)
    assert [found["texts"][n] for n in staying] == plain["texts"]
    assert events.count('"akv.load.landed"') > 10
    assert found["reset"], "blocks are still in use"
    left = {
        name: (value, found["after"][name])
        for name, value in found["before"].items()
        if found["after"][name] > value
    }
    assert not left, "before and after"
    assert found["before"]["engine blocks not free"] == 0
    assert {"engine tasks", "worker tasks", "worker open loads"} <= set(found["after"])
