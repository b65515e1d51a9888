"""When a store takes a new client: never without need, and never half."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, cast

import pytest

from akv.core.errors import StoreError, StoreUnavailableError
from akv.store.mooncake import MooncakeAddress
from akv.store.mooncake.link import Link
from akv.store.mooncake.memory import Memory

if TYPE_CHECKING:
    from mooncake_master import Master

    from akv.store.mooncake.client import Client


class FakeClient:
    """Remembers what was registered, and whether it was closed."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.closed = False

    def register_buffer(self, address: int, size: int) -> int:
        assert not self.closed
        self.registered[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.registered[address]
        return 0

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Bench:
    """A link to fake clients of a real master, and a clock."""

    def __init__(self, master: Master) -> None:
        self.now = 0.0
        self.made: list[FakeClient] = []
        self.refuse = False
        self.memory = Memory(piece_bytes=4096)
        address = MooncakeAddress.parse(master.url(), {})
        self.link = Link(
            address, self.memory, open_client=self._make, clock=lambda: self.now
        )

    def _make(self) -> Client:
        if self.refuse:
            raise StoreUnavailableError("not now")
        self.made.append(FakeClient())
        return cast("Client", self.made[-1])

    @property
    def closed(self) -> list[bool]:
        """For each client made so far, whether it was closed."""
        return [client.closed for client in self.made]

    def transferred(self, code: int, seconds: float = 1.0) -> None:
        with self.link.use() as client:
            self.link.transferred(client, [code], seconds)


@pytest.fixture
def bench(master: Master) -> Bench:
    return Bench(master)


def test_a_client_is_closed_by_the_last_one_out(bench: Bench) -> None:
    with bench.link.use() as client:
        bench.link.close(lambda _: None)
        assert bench.closed == [False]
        assert client is cast("Client", bench.made[0])
    assert bench.closed == [True]
    with pytest.raises(StoreError, match="closed"), bench.link.use():
        pass


def test_a_client_whose_transfers_all_fail_is_replaced(bench: Bench) -> None:
    memory = memoryview(bytearray(8192))
    bench.memory.add(memory)
    bench.transferred(4096)
    bench.now = 100.0
    for bench.now in (100.0, 110.0, 119.0):
        bench.transferred(-800)
    assert len(bench.made) == 1
    bench.now = 121.0
    bench.transferred(-800)
    first, second = bench.made
    assert first.closed
    assert not second.closed
    assert second.registered == first.registered
    assert 8192 in second.registered.values()


def test_a_transfer_that_comes_through_shows_that_the_client_works(
    bench: Bench,
) -> None:
    for bench.now in range(100, 200, 5):
        bench.transferred(-800)
        bench.transferred(4096 if bench.now % 10 else -704)
    assert len(bench.made) == 1


def test_clients_are_not_replaced_one_after_the_other(bench: Bench) -> None:
    for bench.now in range(100, 190):
        bench.transferred(-800)
    assert len(bench.made) == 2


def test_memory_of_a_transfer_that_was_given_up_on_is_fenced_by_closing(
    bench: Bench,
) -> None:
    """Mooncake leaves it under way after 60 s."""
    with bench.link.use() as client:
        bench.link.transferred(client, [-800], 60.5)
        assert bench.made[0].closed
    with bench.link.use() as client:
        assert client is cast("Client", bench.made[1])


def test_all_calls_that_wait_for_the_fence_let_each_other_through(
    bench: Bench,
) -> None:
    with bench.link.use():
        pass
    started = threading.Barrier(3)

    def give_up() -> None:
        with bench.link.use() as client:
            started.wait(5)
            bench.link.transferred(client, [-800], 61.0)

    threads = [threading.Thread(target=give_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(bench.made) == 2


def test_without_a_client_calls_end_at_once_and_one_a_second_tries_again(
    bench: Bench,
) -> None:
    bench.refuse = True
    for bench.now in (0.0, 0.1, 0.2):
        begun = time.monotonic()
        with pytest.raises(StoreUnavailableError), bench.link.use():
            pass
        assert time.monotonic() - begun < 0.5
    bench.refuse = False
    bench.now = 0.9
    with pytest.raises(StoreUnavailableError), bench.link.use():
        pass
    bench.now = 1.1
    with bench.link.use() as client:
        assert client is cast("Client", bench.made[0])
