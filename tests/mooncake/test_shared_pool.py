"""Several on one pool: it is full, many write the same keys, a writer dies half-way."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

from mooncake_master import HOST
from mooncake_traffic import SETTINGS, Traffic

from akv.store.base import Status
from akv.store.mooncake import MooncakeStore
from akv.store.mooncake.memory import address_of
from akv.testing.values import empty_buffer, is_value_of, key_of, value_of
from engine.engine import Engine
from engine.errors import WorkerDiedError
from engine.worker import ProcessWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_master import Master

    from akv.store.base import StoreStatistics

SIZE = 4096
LARGE: dict[str, Any] = {"layers": 8, "heads": 4, "head_size": 64}
"""An engine whose blocks have 256 KiB: 64 of them fill a segment of 16 MiB."""
BLOCK = 256 << 10


def on(master: Master, *, segment: str, **options: Any) -> Engine:
    url = master.url(protocol="tcp", segment=segment, hostname=HOST)
    settings = {
        **SETTINGS,
        "store": url,
        "max_load_bytes": "8MiB",
        "max_save_bytes": "8MiB",
    }
    return Engine(extra_config=settings, num_blocks=64, **options)


def of_worker(engine: Engine) -> StoreStatistics:
    """What the worker's role has counted so far."""
    portal = engine.worker.runner.connector._w._portal  # type: ignore[attr-defined]
    numbers = portal.call(lambda session: session.statistics(), timeout=10).store
    assert numbers is not None
    found: StoreStatistics = numbers
    return found


def test_a_pool_that_evicts_all_the_time_gives_no_wrong_byte(
    hasty_master: Master,
) -> None:
    """A segment of 64 blocks under traffic that saves far more: loads stay right."""
    with on(hasty_master, segment="16MiB", **LARGE) as engine:
        traffic = Traffic(engine)
        traffic.run_until_loaded(20)
        traffic.run_until(lambda: of_worker(engine).evictions > 100, 60)
        landed = traffic.landed
        traffic.run_until(lambda: traffic.landed > landed, 30)
        traffic.end()
        assert of_worker(engine).puts > 64


def test_a_pool_in_which_nothing_can_be_evicted_drops_saves_and_is_used_again(
    master: Master,
) -> None:
    """L7: every put comes to -200; saves are dropped and counted, steps go on."""
    with (
        on(master, segment="16MiB", **LARGE) as engine,
        closing(joined(master, BLOCK, segment="16MiB")) as other,
    ):
        traffic = Traffic(engine)
        traffic.run_for(0.5)
        pinned = fill(other)
        assert len(pinned) > 64
        before = of_worker(engine)
        steps = engine.steps
        traffic.run_for(6)
        after = of_worker(engine)
        assert after.no_room > before.no_room
        assert after.failures == before.failures
        assert engine.steps - steps > 100
        with other._link.use() as client:
            assert client.remove(pinned, force=True) == [0] * len(pinned)
        traffic.run_until_loaded(30)
        traffic.end()


def fill(store: MooncakeStore) -> list[str]:
    """Pin objects until not one more finds room; their names."""
    memory = memoryview(mmap.mmap(-1, BLOCK))
    store.register(memory)
    names: list[str] = []
    refused = 0
    with store._link.use() as client:
        placement = client.placement(pinned=True)
        placement.replica_num = 1
        # What can be evicted goes by and by.
        until = time.monotonic() + 20
        while refused < 20 and time.monotonic() < until:
            name = f"pinned-{len(names)}"
            code = client.create(name, address_of(memory), BLOCK, placement)
            if code == 0:
                names.append(name)
                refused = 0
            else:
                assert code == -200
                refused += 1
                time.sleep(0.05)
    return names


def joined(master: Master, slot: int = SIZE, **settings: Any) -> MooncakeStore:
    return MooncakeStore.open(master.url(**settings), slot_bytes=slot, environment={})


_WRITER = """
import json, sys
from contextlib import closing
from akv.store.mooncake import MooncakeStore
from akv.testing.values import key_of, value_of
url, turns, keys = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with closing(MooncakeStore.open(url, slot_bytes=4096, environment={})) as store:
    print("open", flush=True)
    sys.stdin.readline()
    said = []
    for turn in range(turns):
        names = [key_of(turn * keys + at) for at in range(keys)]
        outcomes = store.put_from(names, [value_of(name, 4096) for name in names])
        said += [getattr(one, "value", str(one)) for one in outcomes]
    print(json.dumps([said, store.statistics().exists]), flush=True)
    sys.stdin.readline()
"""


def started(
    stack: ExitStack, master: Master, count: int, *arguments: int
) -> list[subprocess.Popen[str]]:
    """Processes that have opened the pool and wait for a line to begin."""
    command = [sys.executable, "-c", _WRITER, master.url(), *map(str, arguments)]
    writers = [
        stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        for _ in range(count)
    ]
    for writer in writers:
        stack.callback(writer.kill)
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
    return writers


def go(writers: list[subprocess.Popen[str]]) -> None:
    """Let them go on."""
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()


def test_four_processes_that_write_the_same_keys_store_each_once(
    master: Master,
) -> None:
    """Who comes late finds it there, nobody fails, and every byte is right."""
    turns, keys = 25, 16
    with ExitStack() as stack:
        writers = started(stack, master, 4, turns, keys)
        go(writers)
        columns = []
        for writer in writers:
            assert writer.stdout is not None
            said, exists = json.loads(writer.stdout.readline())
            assert len(said) == turns * keys
            assert exists == said.count(Status.EXISTS.value)
            columns.append(said)
        for outcomes in zip(*columns, strict=True):
            # Mooncake says 0 to whoever begins a put that another has begun and not
            # ended, so two may say that they stored it; what is there is one object.
            assert set(outcomes) <= {Status.STORED.value, Status.EXISTS.value}
            assert Status.STORED.value in outcomes
        names = [key_of(number) for number in range(turns * keys)]
        buffers = [empty_buffer(SIZE) for _ in names]
        with closing(joined(master)) as store:
            assert store.get_into(names, buffers) == [Status.HIT] * len(names)
            assert all(map(is_value_of, names, buffers))
            tokens = len(writers)
            assert store.statistics().objects == len(names) + tokens
        go(writers)
        assert [writer.wait(20) for writer in writers] == [0] * 4


def test_a_process_that_is_killed_in_the_middle_of_puts_leaves_no_wrong_byte(
    master: Master,
) -> None:
    """SIGKILL while it puts; half-written keys are misses, and can be put later."""
    turns, keys = 400, 16
    with ExitStack() as stack, closing(joined(master)) as store:
        (writer,) = started(stack, master, 1, turns, keys)
        go([writer])
        early = [key_of(10 * keys)]
        until = time.monotonic() + 20
        while store.exists(early) != [Status.HIT]:
            assert time.monotonic() < until
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        names = [key_of(number) for number in range(turns * keys)]
        # It had not come to the end.
        assert Status.MISS in store.exists(names)
        buffers = [empty_buffer(SIZE) for _ in names]
        began = time.monotonic()
        outcomes = store.get_into(names, buffers)
        assert time.monotonic() - began < 40
        for outcome, name, buffer in zip(outcomes, names, buffers, strict=True):
            assert outcome is not Status.HIT or is_value_of(name, buffer)
        # Its segment is given up within 10 s, half-written objects within 30.
        until = time.monotonic() + 45
        while store.get_into(names, buffers) != [Status.HIT] * len(names):
            assert time.monotonic() < until
            store.put_from(names, [value_of(name, SIZE) for name in names])
            time.sleep(0.5)
        assert all(map(is_value_of, names, buffers))


def test_an_engine_whose_worker_is_killed_in_the_middle_of_saves_leaves_no_wrong_byte(
    master: Master,
) -> None:
    """B goes on with its own traffic all the while, and computes what A had."""
    dying = on(master, segment="64MiB", worker="process", fresh_process=True)
    with on(master, segment="64MiB") as second:
        traffic = Traffic(second, "b")
        with suppress(WorkerDiedError), dying as first:
            Traffic(first, "a").run_until_loaded(20)
            traffic.run_until_loaded(20)
            assert isinstance(first.worker, ProcessWorker)
            for number in range(20):
                first.add_request(range(number, number + 500), 1, f"last-{number}")
            first.run_steps(12)
            os.kill(first.worker.pid, signal.SIGKILL)
            first.run()
        assert first.unfinished()
        traffic.run_for(3)
        landed = traffic.landed
        traffic.run_until(lambda: traffic.landed > landed + 10, 40)
        traffic.end()


def test_what_is_lost_with_a_segment_is_hardly_promised_again_and_is_saved_anew(
    master: Master,
) -> None:
    """The master lists it for 10 s more, in which a put of it says that it exists.

    Upstream tried the load of one such request 942 times.
    """
    dying = on(master, segment="64MiB", worker="process", fresh_process=True)
    prompt = range(97)
    with on(master, segment="64MiB") as second:
        with suppress(WorkerDiedError), dying as first:
            serve(first, prompt, "a")
            serve_until_loaded(second, prompt, "b", 10)
            assert isinstance(first.worker, ProcessWorker)
            os.kill(first.worker.pid, signal.SIGKILL)
            first.add_request(prompt, 1, "last")
            first.run()
        seen = len(second.monitor.reported)
        serve_until_loaded(second, prompt, "c", 40)
        lost = [load.failed for load in second.monitor.reported[seen:-1]]
        assert all(lost)
        assert 1 <= len(lost) <= 2
        second.assert_outputs()
        second.assert_clean(grace=10)


def serve(engine: Engine, prompt: Sequence[int], name: str) -> None:
    """One request, with nothing in the engine's own cache, to the end of its save."""
    assert engine.reset_prefix_cache()
    engine.add_request(prompt, 1, name)
    engine.run()
    engine.idle_until_quiet()


def serve_until_loaded(
    engine: Engine, prompt: Sequence[int], name: str, seconds: float
) -> None:
    """One request after the other, until a load has come through."""
    seen = len(engine.monitor.reported)
    until = time.monotonic() + seconds
    number = 0
    while all(load.failed for load in engine.monitor.reported[seen:]):
        assert time.monotonic() < until, f"nothing loaded in {number} requests"
        serve(engine, prompt, f"{name}-{number}")
        number += 1
