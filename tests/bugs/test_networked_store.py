"""Rows of the bug log that a networked store brings, over Mooncake on a real master.

Where a fault can be made for real it is; else the answer of one call of Mooncake's
client is changed on its way back (``changed``), with everything above it as it is.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from bugs.rig import OBJECT, Watch, serve, step_until
from mooncake_master import HOST, BlackHole, Master, make_master
from mooncake_traffic import SETTINGS

from akv.core.errors import StoreUnavailableError
from akv.store.base import Failure, Status
from akv.store.mooncake import MooncakeStore
from akv.store.mooncake.client import Client
from akv.testing.values import empty_buffer, key_of, value_of
from engine.engine import Engine
from harness import descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Change = Callable[[Client, list[str], Callable[[], list[int]]], list[int]]

PROMPT = range(65)
"""Four blocks, and one token more."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Master]:
    """A master for all tests that leave it alone; each test's pool is empty."""
    with make_master() as master:
        yield master


@pytest.fixture
def own() -> Iterator[Master]:
    """A master of the test's own, to stop and restart."""
    with make_master() as master:
        yield master


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Change], None]:
    """Let ``change(client, keys, call)`` answer a call of every client."""

    def change_calls(name: str, change: Change) -> None:
        plain = getattr(Client, name)

        def call(self: Client, keys: list[str], *rest: Any) -> list[int]:
            return change(self, keys, lambda: plain(self, keys, *rest))

        monkeypatch.setattr(Client, name, call)

    return change_calls


def on(master: Master, **options: Any) -> Engine:
    """An engine on this master's pool; ``settings`` are akv's own."""
    url = master.url(protocol="tcp", segment="16MiB", hostname=HOST)
    settings = {**SETTINGS, "lookup_deadline": 2, "store": url}
    settings |= options.pop("settings", {})
    return Engine(extra_config=settings, **options)


def saved(engine: Engine, prompt: range = PROMPT, name: str = "cold") -> None:
    """Serve a prompt, wait until it is in the pool, and forget it here."""
    assert serve(engine, prompt, name) == 0
    assert engine.reset_prefix_cache()


def joined(master: Master, **options: Any) -> MooncakeStore:
    url = master.url(segment="16MiB")
    return MooncakeStore.open(url, slot_bytes=4096, environment={}, **options)


@contextmanager
def held() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Two events: a call is held, and it may go on; it may at the end."""
    there, free = threading.Event(), threading.Event()
    try:
        yield there, free
    finally:
        free.set()


# E: a load that fails.


def test_e1_a_block_that_failed_is_reported_and_those_before_it_are_kept(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """Get -> [ok, -704, ok, ok]."""
    with on(shared) as engine:
        saved(engine)
        watch = Watch(engine)

        def lose(
            _: Client, keys: list[str], call: Callable[[], list[int]]
        ) -> list[int]:
            codes = call()
            return [codes[0], -704, *codes[2:]] if len(keys) > 1 else codes

        changed("get", lose)
        assert serve(engine, PROMPT, "warm") == 64
        assert [len(blocks) for blocks in watch.failed_blocks] == [1]
        assert watch.scheduled["warm"][0] == 65 - 16


def test_e4_what_is_there_and_cannot_be_read_is_tried_once(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """Exist -> 1 always, get -> -800 always."""
    gets: list[int] = []

    def fail(_: Client, keys: list[str], call: Callable[[], list[int]]) -> list[int]:
        call()
        gets.append(len(keys))
        return [-800] * len(keys)

    with on(shared) as engine:
        saved(engine)
        changed("get", fail)
        assert serve(engine, PROMPT, "warm") == 64
        assert engine.reset_prefix_cache()
        assert serve(engine, PROMPT, "again") == 0
        assert gets == [4]


def test_e6_an_object_that_goes_between_lookup_and_get_is_computed(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """Really gone: removed by force as the get begins."""
    with on(shared) as engine:
        saved(engine)
        left = [1]

        def remove(
            client: Client, keys: list[str], call: Callable[[], list[int]]
        ) -> list[int]:
            if left:
                left.pop()
                assert client.remove(keys, force=True) == [0] * 4
            return call()

        changed("get", remove)
        assert serve(engine, PROMPT, "warm") == 64
        assert engine.finish_reasons["warm"] == "length"
        assert [load.failed for load in engine.monitor.reported] == [True]


# F: calls that hang.


def test_f3_a_get_whose_answer_never_comes_costs_its_request_the_deadline(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """One of eleven; the others are loaded meanwhile."""
    prompts = [range(70 * number, 70 * number + 65) for number in range(11)]
    with held() as (there, free), on(shared) as engine:
        for number, prompt in enumerate(prompts):
            saved(engine, prompt, f"cold-{number}")

        def hang(_: Client, __: list[str], call: Callable[[], list[int]]) -> list[int]:
            if not there.is_set():
                there.set()
                free.wait(60)
            return call()

        changed("get", hang)
        engine.add_request(prompts[0], 3, "unlucky")
        step_until(engine, there.is_set)
        began = time.monotonic()
        for number in range(1, 11):
            engine.add_request(prompts[number], 3, f"lucky-{number}")
        engine.run()
        assert time.monotonic() - began < SETTINGS["load_deadline"] + 2
        assert all(engine.external_tokens(f"lucky-{n}") == 64 for n in range(1, 11))
        failed = [one.request_id for one in engine.monitor.reported if one.failed]
        assert failed == ["unlucky"]
        free.set()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()


def test_f5_puts_that_hang_hold_no_block_and_no_step(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """Saves are dropped; afterwards all memory comes back and saves go on."""
    settings = {"save_deadline": 0.2, "max_save_bytes": 8 * OBJECT}
    with held() as (there, free), on(shared, settings=settings) as engine:

        def hang(_: Client, __: list[str], call: Callable[[], list[int]]) -> list[int]:
            there.set()
            free.wait(60)
            return call()

        changed("put", hang)
        for number in range(8):
            engine.add_request(range(90 * number, 90 * number + 65), 3)
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        assert there.is_set()
        assert engine.num_free_blocks() == engine.num_free_blocks_at_start
        free.set()
        engine.assert_clean(grace=10)


@pytest.mark.parametrize("backlog", [0, 40], ids=["takes connections", "takes none"])
def test_f12_a_port_that_swallows_connections_is_given_up_on(backlog: int) -> None:
    """No word, or not even an acknowledgement: at most a few seconds."""
    with BlackHole() as hole, ExitStack() as stack:
        for _ in range(backlog):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect((HOST, hole.port))
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            MooncakeStore.open(
                f"mooncake://{HOST}:{hole.port}?segment=16MiB",
                slot_bytes=4096,
                environment={},
            )
        assert time.monotonic() - began < 5


# K: whose bytes they are.


@pytest.mark.parametrize(
    "other", [{"model_seed": 1}, {"heads": 4}, {"block_size": 32}], ids=str
)
def test_k1_another_model_layout_or_block_size_in_the_same_pool_is_a_miss(
    shared: Master, other: dict[str, int]
) -> None:
    """Same tokens, same namespace."""
    with on(shared) as first, on(shared, **other) as second:
        saved(first)
        assert serve(second, PROMPT, "other") == 0
        assert serve(first, PROMPT, "warm") == 64


def test_k3_what_one_tenant_saved_is_a_miss_for_another(shared: Master) -> None:
    """What is in the engine's block hash (adapter, salt) tells objects apart."""
    with on(shared) as engine:
        for name, salt, hit in (("a", "A", 0), ("b", "B", 0), ("again", "A", 64)):
            engine.add_request(PROMPT, 3, name, cache_salt=salt)
            engine.run()
            engine.idle_until_quiet()
            engine.assert_outputs()
            engine.assert_clean()
            assert engine.external_tokens(name) == hit
            assert engine.reset_prefix_cache()


def test_k5_bytes_that_come_after_the_lease_are_no_hit(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """The get says that all is well, and took longer than the lease."""
    key = key_of(1)

    def late(_: Client, __: list[str], call: Callable[[], list[int]]) -> list[int]:
        codes = call()
        time.sleep(0.3)
        return codes

    with closing(joined(shared, lease=0.2)) as store:
        assert store.put_from([key], [value_of(key, 1000)]) == [Status.STORED]
        changed("get", late)
        (outcome,) = store.get_into([key], [empty_buffer(1000)])
        assert isinstance(outcome, Failure)
        assert outcome.code == -707


def test_k7_no_bytes_and_too_few_are_no_hit(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """Get -> [0, 17, all, all]."""
    with on(shared) as engine:
        saved(engine)
        watch = Watch(engine)

        def short(_: Client, __: list[str], call: Callable[[], list[int]]) -> list[int]:
            return [0, 17, *call()[2:]]

        changed("get", short)
        assert serve(engine, PROMPT, "warm") == 64
        assert sum(map(len, watch.failed_blocks)) == 2
        assert watch.scheduled["warm"][0] == 65


def test_k12_an_object_that_ends_while_it_is_read_is_no_hit(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """Its bytes have come, and somebody else may have written them."""
    keys = [key_of(number) for number in range(2)]
    with closing(joined(shared)) as store:
        store.put_from(keys, [value_of(key, 1000) for key in keys])

        def end(
            client: Client, names: list[str], call: Callable[[], list[int]]
        ) -> list[int]:
            codes = call()
            assert client.remove(names[:1], force=True) == [0]
            return codes

        changed("get", end)
        buffers = [empty_buffer(1000) for _ in keys]
        assert store.get_into(keys, buffers) == [Status.MISS, Status.HIT]


# L: slow, full, stale.


def test_l1_a_rare_slow_get_costs_no_more_than_the_deadline(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """Every tenth get is slow for longer than anybody waits."""
    settings = {"load_deadline": 0.5}
    with held() as (_, free), on(shared, settings=settings) as engine:
        for number in range(4):
            saved(engine, range(70 * number, 70 * number + 65), f"cold-{number}")
        numbers = iter(range(1000))

        def slow(_: Client, __: list[str], call: Callable[[], list[int]]) -> list[int]:
            if next(numbers) == 3:
                free.wait(60)
            return call()

        changed("get", slow)
        waits = []
        for turn in range(12):
            start = 70 * (turn % 4)
            began = time.monotonic()
            engine.add_request(range(start, start + 65), 3, f"warm-{turn}")
            engine.run()
            waits.append(time.monotonic() - began)
            assert engine.reset_prefix_cache() or turn
        assert max(waits) < 0.5 + 1.5
        assert sum(load.failed for load in engine.monitor.reported) == 1
        free.set()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()


def test_l3_a_pool_that_takes_nothing_at_the_start_does_not_stop_it(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """The first object that is made comes to -800."""
    changed("create", lambda *_: -800)  # type: ignore[arg-type]
    with on(shared) as engine:
        assert serve(engine, PROMPT, "cold") == 0
        assert engine.reset_prefix_cache()
        assert serve(engine, PROMPT, "warm") == 64


def test_l5_keys_whose_segment_is_gone_are_misses_for_a_while(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """Exist 1, get -101."""
    gets: list[int] = []

    def gone(_: Client, keys: list[str], __: object) -> list[int]:
        gets.append(len(keys))
        return [-101] * len(keys)

    with on(shared) as engine:
        saved(engine)
        changed("get", gone)
        for turn in range(4):
            assert serve(engine, PROMPT, f"warm-{turn}") == (0 if turn else 64)
            assert engine.reset_prefix_cache()
        assert gets == [4]


def test_l8_what_a_dead_writer_left_half_written_is_a_miss_and_no_storm(
    shared: Master, changed: Callable[[str, Change], None]
) -> None:
    """Begun and never ended: neither found nor counted as stored; others go on."""
    begun: list[str] = []

    def begin(
        client: Client, keys: list[str], call: Callable[[], list[int]]
    ) -> list[int]:
        if begun:
            return call()
        begun.extend(keys)
        client._native.batch_put_session_start(list(keys), [OBJECT] * len(keys))
        return [-800] * len(keys)

    with on(shared) as engine:
        changed("put", begin)
        assert serve(engine, PROMPT, "dies") == 0
        assert len(begun) == 4
        for turn in range(5):
            assert engine.reset_prefix_cache()
            assert serve(engine, PROMPT, f"later-{turn}") == 0
        saved(engine, range(200, 265), "another")
        assert serve(engine, range(200, 265), "another again") == 64


# M: start and shutdown.


def test_m1_memory_that_cannot_be_registered_stops_the_start(
    shared: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the code, the size and what is known to cause it."""
    plain = Client.register_buffer

    def refuse(self: Client, address: int, size: int) -> int:
        return -600 if size >= 1 << 20 else plain(self, address, size)

    monkeypatch.setattr(Client, "register_buffer", refuse)
    with pytest.raises(StoreUnavailableError) as caught, on(shared):
        pass
    for said in ("-600", "1MiB", "ulimit -l", "nvidia_peermem"):
        assert said in str(caught.value)


def test_m3_starts_and_shutdowns_leave_no_descriptor_and_no_thread(
    shared: Master, tmp_path: Path
) -> None:
    """Both roles on a pool, in one process."""

    def once() -> None:
        with on(shared, model_dir=tmp_path) as engine:
            serve(engine, PROMPT, "r")

    once()
    once()
    threads, files = threading.active_count(), descriptors()
    for _ in range(3):
        once()
    until = time.monotonic() + 10
    while descriptors() > files and time.monotonic() < until:
        time.sleep(0.05)
    assert descriptors() <= files
    assert threading.active_count() <= threads


def test_m10_a_master_that_was_restarted_is_joined_again(own: Master) -> None:
    """Between two heartbeats; what was known of it is forgotten and saved again."""
    with on(own) as engine:
        saved(engine)
        own.restart()
        until = time.monotonic() + 15
        for turn in range(1000):
            hit = serve(engine, PROMPT, f"after-{turn}")
            assert engine.reset_prefix_cache()
            if hit:
                break
            assert time.monotonic() < until
        assert turn > 0


# O: what is said to be stored.


def test_o7_a_put_that_failed_is_not_said_to_be_stored(
    shared: Master, changed: Callable[[str, Change], None], tmp_path: Path
) -> None:
    """Put -> [ok, -5, ok, ok]: the first is stored, the others are dropped."""

    def fail(_: Client, __: list[str], call: Callable[[], list[int]]) -> list[int]:
        return [0, -5, *call()[2:]]

    changed("put", fail)
    log = tmp_path / "events.jsonl"
    with on(shared, settings={"log_events": str(log)}) as engine:
        assert serve(engine, PROMPT, "cold") == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    (stored,) = [one for one in events if one["event"] == "akv.save.stored"]
    (dropped,) = [one for one in events if one["event"] == "akv.save.dropped"]
    assert (stored["stored"], dropped["objects"]) == (1, 3)
    assert "-5" in dropped["reason"]


# Q: reset.


def test_q1_a_reset_hides_what_was_saved_before_from_everybody(shared: Master) -> None:
    """Here and in an engine that opens later; what is saved after it is found."""
    with on(shared) as engine:
        saved(engine)
        assert engine.reset_prefix_cache(reset_connector=True)
        with on(shared) as later:
            assert serve(later, PROMPT, "later") == 0
        assert serve(engine, PROMPT, "after") == 0
        assert engine.reset_prefix_cache()
        assert serve(engine, PROMPT, "warm") == 64


def test_q1_a_reset_is_not_said_to_be_done_while_the_master_is_silent(
    own: Master,
) -> None:
    """False after a second, and nothing old is found when it goes on."""
    with on(own) as engine:
        saved(engine)
        own.stop()
        try:
            began = time.monotonic()
            assert not engine.reset_prefix_cache(reset_connector=True)
            assert time.monotonic() - began < 3
        finally:
            own.cont()
        until = time.monotonic() + 15
        for turn in range(1000):
            hit = serve(engine, PROMPT, f"after-{turn}")
            assert engine.reset_prefix_cache()
            if hit:
                break
            assert time.monotonic() < until
        # What was found had to be saved first, after the reset.
        assert turn > 0


def test_q3_a_reset_touches_nobody_elses_objects(shared: Master) -> None:
    """Neither those of another namespace nor those that are not akv's."""
    with (
        on(shared, settings={"namespace": "A"}) as first,
        on(shared, settings={"namespace": "B"}) as second,
        closing(joined(shared)) as store,
    ):
        store.put_from([key_of(1)], [value_of(key_of(1), 1000)])
        with store._link.use() as client:
            page = store._memory.page.address
            placement = client.placement()
            assert client.create("theirs", page, 8, placement) == 0
        saved(first)
        saved(second)
        assert first.reset_prefix_cache(reset_connector=True)
        assert serve(first, PROMPT, "reset") == 0
        assert serve(second, PROMPT, "kept") == 64
        assert store.exists([key_of(1)]) == [Status.HIT]
        with store._link.use() as client:
            assert client.exist(["theirs"]) == [1]


def test_q4_a_reset_counts_at_once_for_what_is_under_a_lease(shared: Master) -> None:
    """A lookup has just promised the objects, so they cannot be removed yet."""
    with on(shared) as engine:
        saved(engine)
        assert serve(engine, PROMPT, "warm") == 64
        assert engine.reset_prefix_cache(reset_connector=True)
        assert serve(engine, PROMPT, "after") == 0
