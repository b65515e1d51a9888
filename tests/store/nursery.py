"""A light process that forks children which can be killed at any moment.

Starting Python for each of hundreds of children would take a minute; a fork
of a process that has imported the store, and has none open, takes one
millisecond. Run as a script it obeys lines on standard input: ``JOB JSON``
forks a child for that job and answers with its process id, ``wait PID``
answers with its exit status. :class:`Nursery` is the other end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Self

from akv.core.errors import AkvError
from akv.store import LocalStore, Status, open_store
from akv.testing import empty_buffer, is_value_of, key_of, value_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from akv.store import BlockStore

SLOT_BYTES = 192 * 1024
KEYS = 96
"""All keys that the children use; more than the stores have slots."""


def size_of(number: int) -> int:
    """Each key has its own length, so that lengths are checked too."""
    return SLOT_BYTES - 1000 * (number % 64)


class Nursery:
    """Forks children and hears of their ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)

    def fork(self, job: Callable[..., None], **arguments: object) -> int:
        """Start one of this module's jobs in a child; its process id."""
        return self._ask(f"{job.__name__} {json.dumps(arguments)}")

    def wait(self, child: int) -> int:
        """The exit status of a child; minus the signal if one ended it."""
        return self._ask(f"wait {child}")

    def kill(self, child: int) -> None:
        """End a child as the kernel would, in the middle of anything."""
        os.kill(child, signal.SIGKILL)
        assert self.wait(child) in (-signal.SIGKILL, 0)

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def put_for_ever(url: str, seed: int) -> None:
    """Open the store and put, get and remove until killed."""
    rng = random.Random(seed)
    store = open_store(url, slot_bytes=SLOT_BYTES, lease=0.0)
    while True:
        _one_turn(store, rng)


def work(url: str, seed: int, seconds: float, report: str) -> None:
    """The same for some seconds, and write down what happened."""
    rng = random.Random(seed)
    store = open_store(url, slot_bytes=SLOT_BYTES, lease=0.0)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _one_turn(store, rng)
    numbers = store.statistics()
    store.close()
    text = json.dumps({"hits": numbers.hits, "evictions": numbers.evictions})
    Path(report).write_text(text, encoding="ascii")


def open_once(url: str) -> None:
    """Open the store and close it again."""
    open_store(url, slot_bytes=SLOT_BYTES).close()


def hold_open(url: str, ready: str) -> None:
    """Open the store and keep it so until killed."""
    store = open_store(url, slot_bytes=SLOT_BYTES)
    Path(ready).write_text(store.url, encoding="ascii")
    time.sleep(60)


def _one_turn(store: BlockStore, rng: random.Random) -> None:
    numbers = rng.sample(range(KEYS), rng.randint(1, 8))
    keys = [key_of(number) for number in numbers]
    values = [value_of(key_of(number), size_of(number)) for number in numbers]
    for outcome in store.put_from(keys, values):
        assert outcome in (Status.STORED, Status.EXISTS, Status.NO_ROOM), outcome
    check_readable(store, rng.sample(range(KEYS), 8))
    if rng.random() < 0.2:
        store.remove(keys[:2])


def use_after_a_fork(url: str) -> None:
    """Open the store and fork: the child is told to open it anew, and no more."""
    store = LocalStore.open(url, slot_bytes=SLOT_BYTES)
    key = key_of(1)
    store.put_from([key], [value_of(key, 100)])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            store.exists([key])
        except AkvError as error:
            store.close()
            status = 0 if "forked" in str(error) else 2
        try:
            LocalStore.open(url, slot_bytes=SLOT_BYTES)
            status = 3
        except AkvError as error:
            status = status or (0 if "forked" in str(error) else 4)
        finally:
            os._exit(status)
    _, result = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(result) == 0
    assert store.exists([key]) == [Status.HIT]
    assert store.put_from([key], [value_of(key, 100)]) == [Status.EXISTS]
    store.close()


def claim_and_leave_a_child(url: str) -> None:
    """Claim a slot and die, with a child that goes on for a while."""
    store = LocalStore.open(url, slot_bytes=SLOT_BYTES)
    opened = store._opened
    opened.index.claim([key_of(1)], opened.owner.number, opened.is_dead)
    if os.fork() == 0:
        time.sleep(3)


def check_readable(store: BlockStore, numbers: list[int]) -> int:
    """Assert that what can be read is right to the last byte; how many hits."""
    keys = [key_of(number) for number in numbers]
    buffers = [empty_buffer(size_of(number)) for number in numbers]
    outcomes = store.get_into(keys, buffers)
    for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        assert outcome in (Status.HIT, Status.MISS), outcome
        assert outcome is Status.MISS or is_value_of(key, buffer), key
    return outcomes.count(Status.HIT)


def _main() -> None:
    jobs: dict[str, Callable[..., None]] = {
        job.__name__: job
        for job in (
            put_for_ever,
            work,
            open_once,
            hold_open,
            use_after_a_fork,
            claim_and_leave_a_child,
        )
    }
    for line in sys.stdin:
        name, _, rest = line.partition(" ")
        if name == "wait":
            _, status = os.waitpid(int(rest), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        child = os.fork()
        if child == 0:
            try:
                jobs[name](**json.loads(rest))
            except (AssertionError, AkvError, OSError):
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    _main()
