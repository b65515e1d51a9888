"""The tools that akv gives to those who test a store, or something on a store."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import akv
from akv.core.plan import transfer_windows
from akv.store import Failure, MemoryStore, Status
from akv.testing import (
    Fault,
    FaultSchedule,
    FaultyStore,
    HostDevice,
    empty_buffer,
    is_value_of,
    key_of,
    value_of,
)
from akv.testing.strategies import (
    geometries,
    key_spaces,
    load_specs,
    lookup_specs,
    memory_sizes,
    save_specs,
)

if TYPE_CHECKING:
    from akv.core.keys import BlockKey

KEYS = [key_of(number) for number in range(4)]
SIZE = 64


def filled() -> MemoryStore:
    """A store with four values."""
    store = MemoryStore()
    store.put_from(KEYS, [value_of(key, SIZE) for key in KEYS])
    return store


def read(fault: Fault) -> tuple[list[object], list[memoryview]]:
    """What a get of all keys comes to."""
    store = FaultyStore(filled(), lambda verb, keys: fault)
    buffers = [empty_buffer(SIZE) for _ in KEYS]
    return list(store.get_into(KEYS, buffers)), buffers


def test_a_short_read_is_a_failure_with_junk_behind_its_last_byte() -> None:
    """The value's first bytes are there, and nothing else of it."""
    outcomes, buffers = read(Fault(short={2: 5}))
    assert outcomes == [
        Status.HIT,
        Status.HIT,
        Failure(f"5 of {SIZE} bytes were read"),
        Status.HIT,
    ]
    value = bytes(value_of(KEYS[2], SIZE))
    assert bytes(buffers[2]) == value[:5] + b"\xee" * (SIZE - 5)


def test_swapped_values_are_hits() -> None:
    """What only a comparison of bytes can find."""
    outcomes, buffers = read(Fault(swapped=(0, 3)))
    assert outcomes == [Status.HIT] * 4
    assert is_value_of(KEYS[3], buffers[0])
    assert is_value_of(KEYS[0], buffers[3])
    assert is_value_of(KEYS[1], buffers[1])


def test_hangs_and_delays_last_until_they_are_ended() -> None:
    """No test has to wait for them."""
    faults = [Fault(hang=True), Fault(delay=600), Fault(late=600)]
    store = FaultyStore(filled(), lambda verb, keys: faults.pop())
    threads = [threading.Thread(target=store.exists, args=(KEYS,)) for _ in faults[:]]
    for thread in threads:
        thread.start()
    assert all(thread.is_alive() for thread in threads)
    store.end_hangs()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_schedule_is_the_same_for_the_same_seed_in_any_order_of_calls() -> None:
    """Threads that come in another order get the same faults for their keys."""

    def drawn(seed: int, keys: list[BlockKey]) -> dict[bytes, object]:
        schedule = FaultSchedule(
            seed=seed, delay=(0, 1), errors=0.2, lost=0.3, short=0.2, hangs=0.1
        )
        faults: dict[bytes, object] = {}
        for key in keys:
            fault = schedule("get_into", [key])
            assert fault is not None
            faults[key] = (
                fault.delay,
                fault.hang,
                fault.outcomes,
                fault.short,
                type(fault.error),
            )
        return faults

    keys = [key_of(number) for number in range(200)]
    first = drawn(1, keys)
    assert first == drawn(1, keys[::-1])
    assert first != drawn(2, keys)


def test_a_schedule_keeps_to_its_rates() -> None:
    """Of 4,000 calls about as many as were asked for."""
    schedule = FaultSchedule(seed=3, errors=0.1, failures=0.05, code=-900)
    faults = [schedule("get_into", [key_of(n)]) or Fault() for n in range(4000)]
    errors = sum(fault.error is not None for fault in faults)
    failures = [o for fault in faults for o in fault.outcomes.values()]
    assert 320 <= errors <= 480
    assert 140 <= len(failures) <= 260
    assert set(failures) == {Failure("as scheduled", -900)}
    assert schedule("remove", KEYS) is None


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"errors": 1.5}, "errors=1.5: a rate"),
        ({"errors": 0.6, "lost": 0.6}, "at most 1"),
        ({"delay": (2.0, 1.0)}, "delay=.*least and most"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(
    bad: dict[str, object], text: str
) -> None:
    """With the field, the value and what to write."""
    with pytest.raises(akv.ConfigError, match=text):
        FaultSchedule(seed=1, **bad)  # type: ignore[arg-type]


@given(st.data())
def test_drawn_geometries_and_specs_fit_each_other(data: st.DataObject) -> None:
    """Everything that is drawn can be planned, and its memory can be made."""
    geometry = data.draw(geometries())
    device = HostDevice(
        geometry, [np.zeros(size, np.uint8) for size in memory_sizes(geometry)]
    )
    assert device.allocate(8).nbytes == 8
    for spec in (data.draw(load_specs(geometry)), data.draw(save_specs(geometry))):
        windows = transfer_windows(
            spec.spans, geometry, max_bytes=1 << 20, max_objects=1024
        )
        assert sum(len(window) for window in windows) == len(spec)
    lookup = data.draw(lookup_specs())
    assert lookup.first_block <= lookup.askable_blocks <= len(lookup.hashes)
    space = data.draw(key_spaces())
    assert len(space.prefix) == 36


def test_the_tools_need_no_hypothesis_and_the_strategies_say_so() -> None:
    """As in a process where it is not installed."""
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import akv.testing\n"
        "try:\n import akv.testing.strategies\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (
        "akv.testing.strategies needs hypothesis: pip install hypothesis"
    )
