"""Cancelled or failed at every point there is: one end, no byte of others, no leak."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest
from pipeline.scenes import NAMES, SCENES, scene_of
from pipeline.seams import awaits_of

import akv
from akv.pipeline import load

if TYPE_CHECKING:
    from pipeline.scenes import Scene
    from pipeline.seams import Place

pytestmark = pytest.mark.anyio
both_loops = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])

PAIRS = [
    ("leader", "leader"),
    ("leader", "joiner"),
    ("joiner", "joiner"),
    ("joiner", "leader"),
    ("stranger", "stranger"),
]
"""Who is cancelled, and at whose awaits."""

ERRORS = [OSError("wire"), akv.StoreError("gone"), SystemExit(3), KeyboardInterrupt()]


@both_loops
@pytest.mark.parametrize("kind", SCENES)
@pytest.mark.parametrize(("victim", "watched"), PAIRS)
async def test_a_request_is_cancelled_at_every_await(
    kind: type[Scene], victim: str, watched: str
) -> None:
    """Its own awaits, or those of another request with the same blocks."""
    async with scene_of(kind) as scene:
        for number in count():
            if not await scene.cancel_at(victim, watched, number):
                break
        assert number >= 1


@both_loops
@pytest.mark.parametrize("kind", SCENES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_every_call_of_store_and_device_raises_once(
    kind: type[Scene], error: BaseException
) -> None:
    """Exactly what the call was for has failed, and nobody is left waiting."""
    async with scene_of(kind) as scene:
        for number in count():
            if not await scene.fail_at(number, error):
                break
        assert number >= 2


@pytest.mark.parametrize("kind", SCENES)
async def test_a_host_that_cancels_again_and_again_gets_no_late_byte(
    kind: type[Scene],
) -> None:
    """asyncio's own ``cancel``, which no scope shields from, at every await after."""
    async with scene_of(kind) as scene:
        for number in count():
            if not await scene.cancel_at("leader", "leader", number, insisting=True):
                break
        assert number >= 1


async def test_no_await_of_a_load_is_left_out() -> None:
    """The scenes reach each one that is written in the pipeline.

    Whether a call has begun when its request is cancelled is up to its thread, so
    what one sweep has not reached another one may.
    """
    reached: set[Place] = set()
    for _ in range(20):
        reached |= await _cancelled_places()
        missed = [
            place
            for place, lines in awaits_of(load).items()
            if not any((place[0], line) in reached for line in lines)
        ]
        if not missed:
            break
    assert missed == []


async def _cancelled_places() -> set[Place]:
    """Where requests were cancelled in one sweep over all loads."""
    reached: set[Place] = set()
    for kind in SCENES:
        if "Load" not in kind.__name__:
            continue
        async with scene_of(kind) as scene:
            for name in NAMES:
                for number in count():
                    if not await scene.cancel_at(name, name, number):
                        break
            reached |= scene.places
    return reached
