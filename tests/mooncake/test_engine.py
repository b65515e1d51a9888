"""vLLM's scheduler on a Mooncake pool: engines share it, and outlive its faults."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from engine.engine import Engine
from engine.worker import ProcessWorker
from engine.workload import run_workload

if TYPE_CHECKING:
    from mooncake_master import Master

SMALL: dict[str, Any] = {
    "max_load_bytes": "1MiB",
    "max_save_bytes": "1MiB",
    "lookup_deadline": 0.2,
    "load_deadline": 1.0,
    "save_deadline": 2.0,
}


def pool(master: Master, **settings: Any) -> dict[str, Any]:
    """akv's settings for an engine on this master."""
    url = master.url(protocol="tcp", segment="64MiB", hostname="127.0.0.1")
    return {**SMALL, "store": url, **settings}


def serve(engine: Engine, prompt: range, name: str, max_tokens: int = 3) -> int:
    """Run one request to its end; how many tokens it had loaded."""
    engine.add_request(prompt, max_tokens, name)
    engine.run()
    engine.idle_until_quiet()
    engine.assert_outputs()
    return engine.external_tokens(name)


def serve_until_loaded(engine: Engine, name: str, seconds: float) -> float:
    """Ask for the same prompt until it is loaded again; how long that took."""
    started = time.monotonic()
    for number in range(1000):
        assert engine.reset_prefix_cache()
        if serve(engine, range(100), f"{name} {number}") == 96:
            return time.monotonic() - started
        if time.monotonic() - started > seconds:
            break
        time.sleep(0.05)
    pytest.fail(f"no hit within {seconds} s")


def test_one_engine_loads_what_another_one_saved(master: Master) -> None:
    """Two engines with workers of their own, one pool, byte for byte."""
    with (
        Engine(extra_config=pool(master), worker="process") as first,
        Engine(extra_config=pool(master), worker="process") as second,
    ):
        assert serve(first, range(100), "cold") == 0
        first.assert_clean()
        serve_until_loaded(second, "warm", 10)
        second.assert_clean()


@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_over_a_pool_sees_no_wrong_byte(
    master: Master, seed: int
) -> None:
    """Preemption, aborts and resets over real Mooncake."""
    with Engine(extra_config=pool(master), num_blocks=32) as engine:
        run_workload(engine, seed, requests=40)


def test_a_master_that_is_stopped_holds_nothing_up_and_is_used_again(
    master: Master,
) -> None:
    """SIGSTOP for 5 s: requests compute, hooks do not wait, hits come back."""
    with Engine(extra_config=pool(master), num_blocks=64) as engine:
        assert serve(engine, range(100), "cold") == 0
        engine.assert_clean()
        serve_until_loaded(engine, "warm", 10)
        master.stop()
        stopped = time.monotonic()
        waits = []
        number = 0
        while time.monotonic() - stopped < 5:
            begun = time.monotonic()
            serve(engine, range(1000 * number, 1000 * number + 60), f"stop {number}")
            waits.append(time.monotonic() - begun)
            number += 1
        master.cont()
        # A lookup's, a load's and a save's deadline, with room for a busy machine.
        assert max(waits) < 5
        serve_until_loaded(engine, "back", 20)
        engine.assert_clean()


def test_a_master_that_is_killed_for_good_leaves_an_engine_that_computes(
    master: Master,
) -> None:
    """Every request ends, and closing is in time."""
    with Engine(extra_config=pool(master), num_blocks=64) as engine:
        assert serve(engine, range(100), "cold") == 0
        master.kill()
        begun = time.monotonic()
        for number in range(20):
            serve(engine, range(1000 * number, 1000 * number + 60), f"dead {number}")
        assert time.monotonic() - begun < 40
        engine.assert_clean()


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_a_master_that_comes_back_is_used_again(master: Master, seconds: float) -> None:
    """Killed and started again on its port, at once and after a while."""
    with Engine(extra_config=pool(master), num_blocks=64) as engine:
        assert serve(engine, range(100), "cold") == 0
        master.kill()
        begun = time.monotonic()
        number = 0
        while time.monotonic() - begun < seconds:
            serve(engine, range(1000 * number, 1000 * number + 60), f"dead {number}")
            number += 1
        master.restart()
        serve_until_loaded(engine, "back", 30)
        engine.assert_clean()


def test_an_engine_that_is_killed_takes_its_blocks_along_and_nothing_else(
    master: Master,
) -> None:
    """The segment is gone while the master still lists it: B computes."""
    first = Engine(extra_config=pool(master), worker="process", fresh_process=True)
    with Engine(extra_config=pool(master), worker="process") as second:
        try:
            with first:
                assert serve(first, range(100), "cold") == 0
                first.assert_clean()
                serve_until_loaded(second, "warm", 10)
                assert isinstance(first.worker, ProcessWorker)
                assert first.worker.pid is not None
                os.kill(first.worker.pid, signal.SIGKILL)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert second.reset_prefix_cache()
        begun = time.monotonic()
        for number in range(5):
            second.add_request(range(100), 3, f"after {number}")
            second.run()
            second.idle_until_quiet()
            assert second.reset_prefix_cache()
        second.assert_outputs()
        assert time.monotonic() - begun < 40
