"""The engine without a model proves itself, before it may judge akv.

With a right connector it finds nothing, in all eight shapes of the engine. With a
planted bug it finds that bug: the class of the error and what it says are asserted,
so that no bug counts as seen by accident.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from engine.engine import Engine
from engine.errors import (
    HarnessError,
    LeakError,
    ProtocolError,
    StallError,
    WorkerDiedError,
    WrongBytesError,
)
from engine.shapes import SCHEDULES, SHAPES, Shape
from engine.worker import ProcessWorker
from engine.workload import Workload, run_workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import HookOrder

SEEDS = range(6)


def reference_engine(shape: Shape, **options: Any) -> Engine:
    options.setdefault("stall_seconds", 5.0)
    return Engine("ReferenceConnector", "engine.reference", **shape.options, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_connector_passes_random_traffic(shape: Shape, seed: int) -> None:
    extra = {"load_delay": seed % 3, "save_delay": seed % 4}
    with reference_engine(shape, num_blocks=32, extra_config=extra) as engine:
        report = run_workload(engine, seed)
    assert report.external_tokens > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_traffic_is_not_vacuous(shape: Shape) -> None:
    with reference_engine(shape, num_blocks=28) as engine:
        reports = [run_workload(engine, seed) for seed in range(50, 56)]
    assert sum(report.preemptions for report in reports) > 0
    assert sum(report.aborted for report in reports) > 0
    assert sum(report.resets for report in reports) > 0
    assert sum(report.loads for report in reports) > 0


@pytest.mark.parametrize("shape", SCHEDULES, ids=str)
def test_a_connector_that_loses_blocks_and_says_so_passes(shape: Shape) -> None:
    extra = {"lose_every": 5, "lookup_answers_none": 2, "load_delay": 1}
    traffic = Workload(forced_reset_rate=0.02)
    with reference_engine(shape, num_blocks=40, extra_config=extra) as engine:
        for seed in range(100, 104):
            run_workload(engine, seed, workload=traffic)


@pytest.mark.parametrize("shape", SCHEDULES, ids=str)
def test_priorities_and_another_memory_layout_pass(shape: Shape) -> None:
    options = {"policy": "priority", "layout": "BLNHC", "layers": 3}
    with reference_engine(shape, num_blocks=32, **options) as engine:
        for seed in range(200, 203):
            run_workload(engine, seed, workload=Workload(priorities=3))


@pytest.mark.parametrize("shape", SCHEDULES, ids=str)
def test_without_a_connector_vllm_alone_passes(shape: Shape) -> None:
    with Engine(None, None, num_blocks=32, **shape.options) as engine:
        for seed in range(300, 303):
            report = run_workload(engine, seed)
            assert report.external_tokens == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hook_times_name_both_roles(shape: Shape) -> None:
    with reference_engine(shape) as engine:
        engine.add_request(range(40), 4)
        engine.run()
        engine.idle_until_quiet()
    times = engine.hook_times
    assert len(times["scheduler"]["get_num_new_matched_tokens"]) == 1
    assert len(times["scheduler"]["build_connector_meta"]) >= 4
    assert len(times["worker"]["handle_preemptions"]) >= 4
    assert all(seconds >= 0 for seconds in times["worker"]["start_load_kv"])


def cold_then_warm(engine: Engine) -> None:
    """Save 48 tokens, empty the prefix cache, and ask for them again."""
    engine.add_request(range(100, 150), 4, "cold")
    engine.run()
    engine.idle_until_quiet()
    assert engine.reset_prefix_cache()
    engine.add_request(range(100, 150), 4, "warm")
    engine.run()
    engine.idle_until_quiet()
    assert engine.external_tokens("warm") == 48
    engine.assert_outputs()
    engine.assert_clean()


def full_hit(engine: Engine) -> None:
    """Ask twice for a prompt of exactly three blocks."""
    engine.add_request(range(48), 4, "cold")
    engine.run()
    engine.idle_until_quiet()
    assert engine.reset_prefix_cache()
    engine.add_request(range(48), 4, "warm")
    engine.run()
    assert engine.external_tokens("warm") == 32


def two_tenants(engine: Engine) -> None:
    """Ask for the same tokens under two salts."""
    engine.add_request(range(50), 4, "first", cache_salt="one")
    engine.run()
    engine.idle_until_quiet()
    assert engine.reset_prefix_cache()
    engine.add_request(range(50), 4, "second", cache_salt="two")
    engine.run()
    assert engine.external_tokens("second") == 0


def blocks_wanted_during_a_save(engine: Engine) -> None:
    """End a request while its save waits, and let another one want its blocks."""
    engine.add_request(range(100, 164), 1, "saved")
    engine.add_request(range(500, 596), 12, "thief")
    engine.run()
    engine.idle_until_quiet()
    assert engine.reset_prefix_cache()
    engine.add_request(range(100, 165), 4, "reader")
    engine.run()
    assert engine.external_tokens("reader") == 64
    engine.assert_outputs()


PLANTED: list[
    tuple[str, dict[str, int], Callable[[Engine], None], type[HarnessError], str]
] = [
    (
        "copies_nothing",
        {},
        cold_then_warm,
        WrongBytesError,
        r"warm.*position 0 .*garbage it was filled with",
    ),
    (
        "swapped_blocks",
        {},
        cold_then_warm,
        WrongBytesError,
        r"warm.*position 0 .*holds those of (cold|warm), .*, position 32",
    ),
    (
        "early_report",
        {"load_delay": 50},
        cold_then_warm,
        WrongBytesError,
        r"warm.*position 0 .*garbage it was filled with",
    ),
    (
        "silent_failure",
        {"lose_every": 3},
        cold_then_warm,
        WrongBytesError,
        r"warm.*position 32 .*garbage it was filled with",
    ),
    (
        "late_failure",
        {"lose_every": 3},
        cold_then_warm,
        WrongBytesError,
        r"warm.*position 32 .*garbage it was filled with",
    ),
    (
        "lost_report",
        {},
        cold_then_warm,
        StallError,
        r"'warm': 'WAITING_FOR_REMOTE_KVS'.*loads not reported \['warm'\]",
    ),
    (
        "lost_save",
        {},
        cold_then_warm,
        StallError,
        r"work without an end.*pending push work True",
    ),
    (
        "double_report",
        {},
        cold_then_warm,
        ProtocolError,
        r"warm reported as received again, 1 loads",
    ),
    (
        "unknown_report",
        {},
        cold_then_warm,
        ProtocolError,
        r"nobody reported as received though no load was asked",
    ),
    (
        "off_by_one",
        {},
        full_hit,
        ProtocolError,
        r"warm: promised 47 tokens beyond 0 local ones of 48",
    ),
    (
        "wrong_salt",
        {},
        two_tenants,
        WrongBytesError,
        r"second.*position 0 .*holds those of first, .*, position 0",
    ),
    (
        "missing_pin",
        {"save_delay": 5},
        blocks_wanted_during_a_save,
        WrongBytesError,
        r"reader.*holds (those of thief|the garbage)",
    ),
]


@pytest.mark.parametrize("shape", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("bug", "extra", "scenario", "error", "says"),
    PLANTED,
    ids=[planted[0] for planted in PLANTED],
)
def test_a_planted_bug_is_seen_and_the_same_scenario_passes_without_it(
    shape: Shape,
    bug: str,
    extra: dict[str, int],
    scenario: Callable[[Engine], None],
    error: type[HarnessError],
    says: str,
) -> None:
    options: dict[str, Any] = {"num_blocks": 9, "max_num_seqs": 1}
    if "lose_every" not in extra:
        with reference_engine(shape, extra_config=extra, **options) as engine:
            scenario(engine)
    options["stall_seconds"] = 0.3
    planted = {**extra, "bug": bug}
    with (
        pytest.raises(error, match=says),
        reference_engine(shape, extra_config=planted, **options) as engine,
    ):
        scenario(engine)


@pytest.mark.parametrize("shape", SCHEDULES, ids=str)
def test_rounding_inside_a_block_shows_in_the_bytes_too(shape: Shape) -> None:
    with (
        pytest.raises(WrongBytesError, match=r"warm.*position 32 "),
        reference_engine(
            shape, strict_rounding=False, extra_config={"bug": "off_by_one"}
        ) as engine,
    ):
        full_hit(engine)


@pytest.mark.parametrize("shape", SCHEDULES, ids=str)
def test_a_pin_that_stays_is_a_leak(shape: Shape) -> None:
    with reference_engine(shape, extra_config={"bug": "leaked_pin"}) as engine:
        engine.add_request(range(50), 4)
        engine.run()
        engine.idle_until_quiet()
        with pytest.raises(LeakError, match=r"3 blocks not free; references on blocks"):
            engine.assert_clean()


@pytest.mark.parametrize("order", ["v1", "v2"])
def test_an_error_in_the_worker_process_arrives_as_itself(order: HookOrder) -> None:
    shape = Shape(hook_order=order, async_scheduling=True, worker="process")
    with (
        pytest.raises(WrongBytesError, match=r"warm.*garbage") as caught,
        reference_engine(shape, extra_config={"bug": "copies_nothing"}) as engine,
    ):
        cold_then_warm(engine)
    assert caught.value.request_id == "warm"
    assert caught.value.position == 0


def kill_the_worker(engine: Engine) -> None:
    """Kill the worker process in the middle of a request and go on stepping."""
    engine.add_request(range(40), 4)
    engine.step()
    assert isinstance(engine.worker, ProcessWorker)
    os.kill(engine.worker.pid, signal.SIGKILL)
    engine.run()


def test_a_killed_worker_process_is_said_to_be_dead() -> None:
    shape = Shape(hook_order="v1", async_scheduling=False, worker="process")
    with (
        pytest.raises(WorkerDiedError, match="ended with exit code -9"),
        reference_engine(shape, fresh_process=True) as engine,
    ):
        kill_the_worker(engine)


def test_outputs_depend_on_the_whole_prefix_and_on_the_models_seed() -> None:
    with Engine(None, None) as engine, Engine(None, None, model_seed=1) as other:
        expected = engine.oracle.generate(range(100), 5)
        assert expected == engine.oracle.generate(range(100), 5)
        assert expected != engine.oracle.generate([7, *range(1, 100)], 5)
        assert expected != other.oracle.generate(range(100), 5)
