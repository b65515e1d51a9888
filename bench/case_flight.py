"""Many requests with one cold prefix: what is fetched, and how long they wait.

The engine without a model runs vLLM's own scheduler around the connector, both roles in
one process. One engine has saved a prompt; another one gets requests that all begin
with it, all at once, and its own prefix cache is empty.

`flight/fetched`: 8 requests, the same 100 blocks; objects that are read from the store.
Each byte that a request reads is checked.

`flight/wait`: 50 requests with one prefix of 10,000 tokens, all there between two
steps, on a store whose gets take 50 ms longer for a window of 8 MiB. A request waits
until it may go on: the one that loads until its load is reported, the others until akv
says that there is nothing to wait for. The median of the 50 against one request alone,
in turn. The runner checks no bytes here, which takes longer than everything else.

`flight/hook`: what `get_num_new_matched_tokens` takes in one step altogether, with 100
requests whose lookups are pending, and with 100 that wait for one load.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from akv.store import MemoryStore
from case_pressure import engine_for, kit_of_tests
from measure import Case, Row, Settings, Spread, Target, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("CASES",)

_BLOCK = 16
_HOOK = "get_num_new_matched_tokens"
_PAGES: dict[str, Any] = {"layers": 4, "heads": 8, "head_size": 32}
"""128 KiB a block in float32, as a small model has with 16 tokens."""

_GET_SECONDS = 0.05
_STAGING = {"max_load_bytes": "32MiB", "max_save_bytes": "32MiB"}


def _prompt(tokens: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(1).integers(0, 1000, tokens).tolist()
    return prompt


def _engine(url: str, blocks: int, requests: int, **options: Any) -> Any:
    """Room for one prefix, and for the last block of each request."""
    settings = {**_STAGING, "max_pinned_fraction": 1.0, "lookup_deadline": 5.0}
    return engine_for(
        url,
        settings | {"load_deadline": 60.0},
        num_blocks=blocks + 3 * requests + 8,
        max_model_len=16 * blocks + 64,
        max_num_seqs=requests,
        max_num_batched_tokens=8192,
        **options,
    )


def _seed(url: str, prompt: list[int], **options: Any) -> None:
    with _engine(url, len(prompt) // _BLOCK, 8, **options) as engine:
        engine.add_request(prompt, 1, "seed")
        engine.run()
        engine.idle_until_quiet()
        engine.assert_clean(grace=30)


@contextlib.contextmanager
def _memory() -> Iterator[str]:
    name = uuid.uuid4().hex
    keeper = MemoryStore(name=name)
    try:
        yield f"memory:{name}"
    finally:
        keeper.close()


# --- what is fetched ------------------------------------------------------------------


def _fetched(_: Settings) -> list[Row]:
    kit_of_tests()
    prompt, requests = _prompt(1601), 8
    with _memory() as url:
        _seed(url, prompt)
        with _engine(url, 100, requests) as engine:
            for number in range(requests):
                engine.add_request([*prompt, number], 2, f"r{number}")
            engine.run()
            engine.assert_outputs()
            engine.idle_until_quiet()
            blocks = [one.blocks for one in engine.monitor.reported]
    return [
        Row(
            case="flight",
            what="8 requests, the same 100 cold blocks: gets",
            unit=Unit.COUNT,
            value=Spread(sum(blocks), min(blocks), max(blocks)),
            against=f"{len(blocks)} load",
            target=Target(101, at_least=False),
            judged=sum(blocks),
            rounds=1,
            amount=requests,
        )
    ]


# --- how long they wait ---------------------------------------------------------------


@contextlib.contextmanager
def _slow_gets(seconds: float) -> Iterator[None]:
    """Let each get of a window take longer, as it does over a network."""
    kit = kit_of_tests()
    trouble = kit.Trouble(seed=1)
    trouble.verbs = frozenset({"get_into"})
    trouble.begin(kit.Faults(hang=1.0, hang_seconds=seconds))
    with kit.through(trouble):
        yield


class _Answers:
    """When each request was told for good what it has."""

    def __init__(self, engine: Any) -> None:
        self.times: dict[str, float] = {}
        connector = engine.scheduler.get_kv_connector()
        ask = connector.get_num_new_matched_tokens

        def asking(request: Any, tokens: int) -> tuple[int | None, bool]:
            answer: tuple[int | None, bool] = ask(request, tokens)
            if answer[0] is not None:
                self.times[request.request_id] = time.perf_counter()
            return answer

        connector.get_num_new_matched_tokens = asking


def _waits(
    engine: Any, answers: _Answers, prompt: list[int], requests: int, name: str
) -> list[float]:
    """Seconds till each of so many requests that come at once has its prefix."""
    if not engine.reset_prefix_cache():
        raise RuntimeError("the engine's prefix cache could not be emptied")
    names = [
        engine.add_request([*prompt, number], 1, f"{name}-{number}")
        for number in range(requests)
    ]
    gc.collect()
    # What vLLM takes to hash the prompts of those behind is not what they wait for.
    since = time.perf_counter()
    while engine.unfinished():
        loading = set(engine.monitor.outstanding)
        engine.step()
        # Who has a load of its own has its prefix when that is reported.
        for request in loading - set(engine.monitor.outstanding):
            answers.times[request] = time.perf_counter()
    engine.idle_until_quiet()
    return [answers.times[request] - since for request in names]


def _wait(settings: Settings) -> list[Row]:
    prompt, requests = _prompt(10_001), 50
    blocks = len(prompt) // _BLOCK
    url = f"local:{settings.in_memory() / 'flight'}?capacity=256MiB"
    rounds = settings.rounds(9)
    alone: list[float] = []
    many: list[float] = []
    loaded = 0
    kit_of_tests()
    _seed(url, prompt, **_PAGES)
    with (
        _slow_gets(_GET_SECONDS),
        _engine(url, blocks, requests, verify=False, **_PAGES) as engine,
    ):
        answers = _Answers(engine)
        _waits(engine, answers, prompt, requests, "warm")
        for number in range(rounds):
            alone += _waits(engine, answers, prompt, 1, f"alone{number}")
            before = len(engine.monitor.reported)
            waits = _waits(engine, answers, prompt, requests, f"r{number}")
            many.append(statistics.median(waits))
            loaded += sum(one.blocks for one in engine.monitor.reported[before:])
        engine.assert_outputs()
        engine.assert_clean(grace=30)
    ratio = Spread.of([ours / single for ours, single in zip(many, alone, strict=True)])
    return [
        Row(
            case="flight",
            what=f"50 requests, one cold prefix of {blocks} blocks: gets a round",
            unit=Unit.COUNT,
            value=Spread.of([loaded / rounds]),
            target=Target(blocks + 1, at_least=False),
            judged=loaded / rounds,
            rounds=rounds,
            amount=requests,
        ),
        Row(
            case="flight",
            what="wait of the median of these 50",
            unit=Unit.MICROSECONDS,
            value=Spread.of([seconds * 1e6 for seconds in many]),
            against="one alone",
            other=Spread.of([seconds * 1e6 for seconds in alone]),
            ratio=ratio,
            target=Target(1.2, at_least=False),
            judged=ratio.median,
            rounds=rounds,
            amount=requests,
        ),
    ]


# --- what asking costs ----------------------------------------------------------------


def _asking(engine: Any, kit: Any, trouble: Any, verb: str, steps: int) -> list[float]:
    """Seconds of all answers of a step, while calls of ``verb`` do not come back."""
    prompt = _prompt(8000)
    trouble.verbs = frozenset({verb})
    trouble.begin(kit.Faults(hang=1.0, hang_seconds=60.0))
    for number in range(100):
        engine.add_request([*prompt, number], 1, f"{verb}-{number}")
    engine.run_steps(20)
    while verb == "get_into" and not trouble.hanging:
        engine.run_steps(1)
    calls = engine.hook_times["scheduler"][_HOOK]
    sums: list[float] = []
    gc.collect()
    gc.disable()
    for _ in range(steps):
        before = len(calls)
        engine.run_steps(1)
        sums.append(sum(calls[before:]))
    gc.enable()
    if verb == "exists" and len(calls) - before != 100:
        raise RuntimeError(f"{len(calls) - before} requests were asked about, not 100")
    trouble.calm()
    engine.run()
    engine.idle_until_quiet()
    return sums


def _hook(settings: Settings) -> list[Row]:
    kit = kit_of_tests()
    trouble = kit.Trouble(seed=1)
    steps = 200 if settings.quick else 1000
    rows: list[Row] = []
    with _memory() as url, kit.through(trouble):
        _seed(url, _prompt(8000))
        with _engine(url, 520, 128) as engine:
            for verb, text in (
                ("exists", "100 lookups pending"),
                ("get_into", "100 wait for one load"),
            ):
                sums = _asking(engine, kit, trouble, verb, steps)
                engine.reset_prefix_cache()
                p99 = float(np.percentile(sums, 99)) * 1e6
                rows.append(
                    Row(
                        case="flight",
                        what=f"{_HOOK}, all of a step, {text}",
                        unit=Unit.MICROSECONDS,
                        value=Spread(p99, min(sums) * 1e6, max(sums) * 1e6),
                        target=Target(2000.0, at_least=False),
                        judged=p99,
                        rounds=1,
                        amount=steps,
                        extra={
                            "p50": float(np.percentile(sums, 50)) * 1e6,
                            "p99": p99,
                            "max": max(sums) * 1e6,
                        },
                    )
                )
            engine.assert_clean(grace=30)
    return rows


def _case(name: str, title: str, run: Callable[[Settings], list[Row]]) -> Case:
    return Case(name=f"flight/{name}", title=title, run=run)


CASES = [
    _case("fetched", "8 requests with one cold prefix", _fetched),
    _case("wait", "50 requests with one cold prefix of 10,000 tokens", _wait),
    _case("hook", "100 requests that wait, inside the hook that is asked", _hook),
]
