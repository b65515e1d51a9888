"""akv against vLLM's own MooncakeStoreConnector, each in an engine without a model.

Three engines stand side by side in this process: one with upstream's connector, one
with akv on the same Mooncake master, one with akv on the local store. They have the
same vLLM, shapes and requests, and take turns. In each round every engine saves
prompts that nobody has seen, then loads them again. A save is timed from the first
request to the last block that is in the store, a load from the first request until
all have ended (one token each, and of the prompt all but one token is loaded).

The runner computes nothing. Before a save the engine's memory is filled with pages
that tell layer and block, before a load with other bytes, and after it each page of
the prompt is compared with the one that was saved. Where a byte is missing there is no
ratio, neither for the load nor for the save. Upstream's own rows show it against one
thread that copies as many pages in the same round. `CPU s/GB` is what all threads of
the process take of the processors while a load runs; the master is another process.

`8 at once`: requests with one and the same prompt, which no engine has, against one
request with it just before. What is fetched is what the scheduler has taken from the
connector, all requests together.

`peer/lookup` has pages of one layer, so that a prompt of 128k tokens is saved in no
time. A lookup is timed from the scheduler's first question about a request until it
is told a number; each prompt is then loaded and compared too. Upstream looks up in a
thread of its own here (`lookup_async`).

What both sides get alike: each puts into the segment that it lends itself (with two
segments in a pool Mooncake would spread objects over both, and half of all bytes would
go over TCP), and the pages of both segments are there before the first put (akv asks
for them by itself; for upstream it is done here, or its saves would pay for it). What
vLLM's CPU worker does at its start is done for upstream's connector: the parallel
groups of one rank, and the stand-in for CUDA's events where there is no CUDA.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import numpy as np

import akv
from akv.core.errors import StoreUnavailableError
from akv.core.keys import KeySpace
from measure import Case, Row, Settings, Skip, Spread, Target, Unit, without_gc
from memory import need_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

    import numpy.typing as npt

__all__ = ("CASES", "lookups_left_alone", "tests_master")

_UPSTREAM = "upstream"
_HOOK = "get_num_new_matched_tokens"
_LOOKUP_HOOKS = ("on_new_request", _HOOK)
_VOCABULARY = 1000
_LOOKUPS = 2000
_LOCAL = "akv local"
_AT_ONCE = 8
_LOADS = 3
_HOOK_TARGET = Target(100.0, at_least=False)
_LOOKUP_TARGET = Target(50.0, at_least=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """An engine's KV cache, in float32: a page is what a layer keeps of a block."""

    layers: int
    heads: int
    head_size: int
    block: int

    @property
    def page(self) -> int:
        return 2 * self.heads * self.head_size * 4 * self.block

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Some requests at once, and what akv's two stores should reach at least."""

    requests: int
    tokens: int
    pool: float
    local: float

    def __str__(self) -> str:
        many = f"{self.requests} requests" if self.requests > 1 else "1 request"
        return f"{many} of {_count(self.tokens)}"


def _count(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


_SHAPES = {
    "large": _Shape(layers=32, heads=4, head_size=64, block=128),
    "small": _Shape(layers=30, heads=3, head_size=32, block=16),
    "lookup": _Shape(layers=1, heads=4, head_size=8, block=16),
}
_WORKS = {
    "large": (
        _Work(requests=1, tokens=2048, pool=1.0, local=1.15),
        _Work(requests=8, tokens=1024, pool=1.2, local=1.4),
        _Work(requests=32, tokens=256, pool=1.4, local=1.6),
    ),
    "small": (
        _Work(requests=1, tokens=2048, pool=1.3, local=1.5),
        _Work(requests=8, tokens=1024, pool=1.5, local=1.8),
        _Work(requests=32, tokens=512, pool=2.0, local=2.5),
    ),
    "lookup": tuple(
        _Work(requests=1, tokens=tokens << 10, pool=0.5, local=0.2)
        for tokens in (1, 8, 32, 128)
    ),
}
_CPU_LIMITS = {"large": 1.0, "small": 0.7}
_SAME_TOKENS = 4096


def tests_master() -> Any:
    """The class that starts a real master, from the tests' folder."""
    os.environ.setdefault("GLOG_minloglevel", "3")
    tests = str(Path(__file__).resolve().parent.parent / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    from mooncake_master import Master

    return Master


def _harness() -> tuple[Any, Any]:
    """The tests' engine and master, which are no part of the library."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "3")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        master = tests_master()

        from engine.engine import Engine

        return Engine, master()
    except ImportError as error:
        raise Skip(f"the engine without a model cannot be imported: {error}") from error
    except StoreUnavailableError as error:
        raise Skip(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What a load of some prompts at once has come to.

    :ivar cpu: seconds of all processors, all threads of this process
    :ivar right: bytes of the blocks that are whole as they were saved
    :ivar taken: tokens that the scheduler has taken from the connector
    :ivar answered: seconds from the first question about a request to its answer,
        of the request that took longest
    :ivar hooks: seconds in the worker's hooks a step, 99th percentile of all steps
    """

    seconds: float
    cpu: float
    right: int
    taken: int
    answered: float
    hooks: float


class _Engine:
    """One engine without a model, and the pages that its connector moves."""

    def __init__(self, name: str, engine: Any, shape: _Shape) -> None:
        self.name = name
        self.lookups: list[float] = []
        self._engine = engine
        self._shape = shape
        self._numbers = itertools.count()
        caches = engine.worker.runner.kv_caches.values()
        self._layers = [self._of_layer(cache) for cache in caches]
        page = np.random.default_rng(6).bytes(shape.page)
        self._page = np.frombuffer(page, dtype=np.uint64)
        self._where: dict[str, list[int]] = {}
        self._asked: dict[str, float] = {}
        self._answered: dict[str, float] = {}
        self._steps: list[float] = []
        engine.worker.execute = self._summed(engine.worker.execute)
        connector = engine.scheduler.get_kv_connector()
        connector.update_state_after_alloc = self._noted(
            connector.update_state_after_alloc
        )
        connector.get_num_new_matched_tokens = self._clocked(
            connector.get_num_new_matched_tokens
        )

    def save(self, prompts: Sequence[Sequence[int]]) -> tuple[float, list[list[int]]]:
        """Save prompts; the seconds, and in which blocks each one was."""
        for layer, words in enumerate(self._layers):
            np.add(self._page, self._marks(layer, range(len(words))), out=words)
        seconds, _, names = self._timed(prompts, "save")
        return seconds, [self._where.pop(name) for name in names]

    def load(
        self, prompts: Sequence[Sequence[int]], saved: Sequence[Sequence[int]]
    ) -> _Loaded:
        """Load prompts whose blocks were ``saved`` there."""
        for words in self._layers:
            words.fill(0)
        times = self._engine.hook_times["scheduler"]
        before = {hook: len(times[hook]) for hook in _LOOKUP_HOOKS}
        self._asked.clear()
        self._answered.clear()
        self._steps.clear()
        seconds, cpu, names = self._timed(prompts, "load")
        for hook, seen in before.items():
            self.lookups += times[hook][seen:]
        whole = 0
        for name, prompt, source in zip(names, prompts, saved, strict=True):
            blocks = len(prompt) // self._shape.block
            whole += self._whole(source[:blocks], self._where.pop(name)[:blocks])
        return _Loaded(
            seconds=seconds,
            cpu=cpu,
            right=whole * self._shape.block_bytes,
            taken=sum(map(self._engine.external_tokens, names)),
            answered=max(self._answered[name] - self._asked[name] for name in names),
            hooks=float(np.percentile(self._steps, 99)),
        )

    def copy(self, amount: int) -> float:
        """Copy as many pages, one by one in this thread; the seconds."""
        half = len(self._layers[0]) // 2
        pairs = itertools.cycle(
            (words[block], words[half + block])
            for block in range(half)
            for words in self._layers
        )
        pages = list(itertools.islice(pairs, amount // self._shape.page))
        start = time.perf_counter()
        for source, target in pages:
            np.copyto(target, source)
        return time.perf_counter() - start

    def _timed(
        self, prompts: Sequence[Sequence[int]], what: str
    ) -> tuple[float, float, list[str]]:
        engine = self._engine
        if not engine.reset_prefix_cache():
            raise RuntimeError(f"{self.name}: blocks are in use between two rounds")
        names = [f"{what}-{next(self._numbers)}" for _ in prompts]
        with without_gc():
            start, cpu = time.perf_counter(), time.process_time()
            for name, prompt in zip(names, prompts, strict=True):
                engine.add_request(prompt, 1, name)
            engine.run()
            if what == "save":
                # Upstream keeps blocks until they are stored. akv gives them back as
                # soon as they are copied, and its worker is asked to store the rest.
                engine.idle_until_quiet()
                engine.worker.debug_state()
            seconds = time.perf_counter() - start
            cpu = time.process_time() - cpu
        engine.idle_until_quiet()
        engine.assert_clean()
        return seconds, cpu, names

    def _noted(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Note which blocks a request has got."""

        def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> None:
            if request.request_id not in self._where:
                self._where[request.request_id] = list(blocks.get_block_ids()[0])
            hook(request, blocks, tokens)

        return update_state_after_alloc

    def _clocked(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Note when a request is asked about first, and when it is told a number."""

        def get_num_new_matched_tokens(request: Any, tokens: int) -> Any:
            self._asked.setdefault(request.request_id, time.perf_counter())
            answer = hook(request, tokens)
            if answer[0] is not None:
                self._answered.setdefault(request.request_id, time.perf_counter())
            return answer

        return get_num_new_matched_tokens

    def _summed(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        """Add up what the worker's hooks take in a step."""
        times = self._engine.worker.hook_times()

        def execute_one(envelope: Any) -> Any:
            before = {hook: len(calls) for hook, calls in times.items()}
            result = execute(envelope)
            self._steps.append(
                sum(sum(times[hook][seen:]) for hook, seen in before.items())
            )
            return result

        return execute_one

    def _of_layer(self, cache: Any) -> npt.NDArray[np.uint64]:
        words: npt.NDArray[np.uint64] = cache.numpy().view(np.uint64)
        flat = words.reshape(len(words), -1)
        if not np.shares_memory(flat, words):
            raise RuntimeError("a layer's pages do not lie in one piece")
        return flat

    def _marks(self, layer: int, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """What each block's page of a layer has on top of the others' content."""
        marks: npt.NDArray[np.uint64] = np.asarray(blocks, dtype=np.uint64)
        return (marks * np.uint64(256) + np.uint64(layer))[:, None]

    def _whole(self, source: Sequence[int], target: Sequence[int]) -> int:
        """How many blocks are in each layer what was saved from elsewhere."""
        whole = np.ones(len(source), dtype=np.bool_)
        for layer, words in enumerate(self._layers):
            expected = self._page + self._marks(layer, source)
            whole &= (words[target] == expected).all(axis=1)
        return int(whole.sum())


@contextlib.contextmanager
def _without_native_logs(directory: Path) -> Iterator[None]:
    """Keep what Mooncake says of itself off the terminal, but for a case that breaks.

    It heeds no setting of its level that is made in a process that has begun.
    """
    path = directory / "native.log"
    terminal = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
    except Exception:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        print("", *lines[-20:], sep="\n", file=sys.stderr)
        raise
    finally:
        os.close(terminal)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """What vLLM's CPU worker has set up before it makes a connector."""
    import torch
    from mooncake_master import free_port
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if not torch.cuda.is_available():
        import vllm.v1.worker.cpu.shm  # noqa: F401 - replaces torch.cuda.Event
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
            local_rank=0,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(backend="gloo")
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@contextlib.contextmanager
def _upstream(
    make: Callable[..., Any],
    shape: _Shape,
    master: Any,
    segment: int,
    path: Path,
    **options: Any,
) -> Iterator[_Engine]:
    from mooncake_master import free_port

    from akv.store.mooncake.prefault import mappings, prefault

    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "protocol": "tcp",
                "device_name": "",
                "master_server_address": f"127.0.0.1:{master.port}",
                "global_segment_size": segment,
                "local_buffer_size": 16 << 20,
            }
        ),
        encoding="utf-8",
    )
    own = f"127.0.0.1:{free_port()}"
    before = mappings()
    with contextlib.ExitStack() as stack:
        with _environment(
            MOONCAKE_CONFIG_PATH=str(path), MOONCAKE_REQUESTER_LOCAL_HOSTNAME=own
        ):
            engine = stack.enter_context(
                make(
                    "MooncakeStoreConnector",
                    None,
                    extra_config={
                        "preferred_segment": own,
                        # A name of its own for the socket of its lookups.
                        "lookup_rpc_port": free_port(),
                        **options,
                    },
                )
            )
        _lends_as(engine.worker.runner.connector.connector_worker.store, own)
        prefault(before, segment)
        yield _Engine(_UPSTREAM, engine, shape)


@contextlib.contextmanager
def _lent(engine: AbstractContextManager[_Engine], segment: int) -> Iterator[_Engine]:
    """An engine whose segment has its pages; first puts into others are slower."""
    before = _resident()
    with engine as opened:
        grown = _resident() - before
        if grown < segment:
            raise RuntimeError(
                f"{opened.name}: {grown >> 20} MiB are there of a segment of "
                f"{segment >> 20} MiB, so its saves would be slower than they are"
            )
        yield opened


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _lends_as(store: Any, name: str) -> None:
    found = store.get_hostname()
    if found != name:
        raise RuntimeError(f"Mooncake calls its segment {found}, not {name}")


@contextlib.contextmanager
def _akv(
    make: Callable[..., Any], shape: _Shape, name: str, url: str, **options: Any
) -> Iterator[_Engine]:
    settings: Mapping[str, Any] = {
        "store": url,
        "max_pinned_fraction": 1.0,
        "load_deadline": 60.0,
        "save_deadline": 60.0,
        **options,
    }
    with make(extra_config=settings) as engine:
        yield _Engine(name, engine, shape)


@contextlib.contextmanager
def _engines(
    size: str, settings: Settings, kept: int, most: int, **options: Any
) -> Iterator[list[_Engine]]:
    """Upstream's engine, akv's on the same master, akv's on the local store.

    :param kept: blocks that each store has room for
    :param most: blocks that are in use in an engine at once
    :param options: of upstream's connector
    """
    shape = _SHAPES[size]
    segment = max(-(-kept * shape.block_bytes * 4 // 3 >> 24) << 24, 64 << 20)
    need_memory(3 * (most + 8) * shape.block_bytes + 3 * segment)
    directory = settings.in_memory() / "peer"
    directory.mkdir(exist_ok=True)
    engine_class, master = _harness()
    make = _maker(engine_class, shape, most + 8)
    with contextlib.ExitStack() as stack:
        from mooncake_master import free_port

        stack.enter_context(_without_native_logs(directory))
        stack.enter_context(master)
        stack.enter_context(_one_rank())
        own = f"127.0.0.1:{free_port()}"
        pool = master.url(
            protocol="tcp", segment=segment, hostname=own, preferred_segment=own
        )
        path = directory / "mooncake.json"
        # A directory of its own: the store is gone with the case, and not kept until
        # all cases have ended.
        store = directory / size
        stack.callback(shutil.rmtree, store, ignore_errors=True)
        local = f"local:{store}?capacity={segment}"
        upstream = _upstream(make, shape, master, segment, path, **options)
        on_pool = _akv(make, shape, "akv on Mooncake", pool)
        yield [
            stack.enter_context(_lent(upstream, segment)),
            stack.enter_context(_lent(on_pool, segment)),
            stack.enter_context(_akv(make, shape, _LOCAL, local)),
        ]


def _maker(engine_class: Any, shape: _Shape, num_blocks: int, **options: Any) -> Any:
    return partial(
        engine_class,
        layers=shape.layers,
        heads=shape.heads,
        head_size=shape.head_size,
        block_size=shape.block,
        num_blocks=num_blocks,
        max_num_batched_tokens=160 << 10,
        max_num_seqs=32,
        max_model_len=160 << 10,
        verify=False,
        compute=False,
        stall_seconds=30.0,
        **options,
    )


def _prompt(seed: Sequence[int], tokens: int) -> list[int]:
    """So many tokens, and the one that is computed."""
    prompt: list[int] = (
        np.random.default_rng(seed).integers(0, _VOCABULARY, tokens + 1).tolist()
    )
    return prompt


@dataclass(slots=True)
class _Figures:
    """Of one engine and one kind of work: a figure of each round, by name."""

    of: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: str = ""

    def add(self, **figures: float) -> None:
        """One round."""
        for name, figure in figures.items():
            self.of[name].append(figure)

    def check(self, engine: _Engine, loaded: _Loaded, amount: int) -> None:
        """Take note of bytes that are not as they were saved."""
        if loaded.right != amount:
            self.refused = f"{engine.name} moved {loaded.right:,} of {amount:,}"


class _Turn(Protocol):
    """Who takes turns: an engine, here or in another process."""

    name: str
    lookups: list[float]


_T = TypeVar("_T", bound=_Turn)


def _take_turns(
    engines: Sequence[_T],
    rounds: int,
    one_round: Callable[[_T, _Figures, int], None],
) -> dict[str, _Figures]:
    """All engines do the same, after one round that does not count."""
    figures = {engine.name: _Figures() for engine in engines}
    for number in range(rounds + 1):
        turn = number % len(engines)
        for engine in (*engines[turn:], *engines[:turn]):
            one_round(engine, figures[engine.name], number)
            if not number:
                figures[engine.name].of.clear()
                engine.lookups.clear()
    return figures


def _row(
    what: tuple[str, str],
    unit: Unit,
    mine: tuple[_Figures, str],
    other: tuple[_Figures, str],
    *,
    against: str = _UPSTREAM,
    limit: float | None = None,
) -> Row:
    """One figure against another one, round for round.

    :param what: the case, and what is measured
    :param mine: whose figure, and which one
    :param limit: of the ratio
    """
    (ours, name), (theirs, other_name) = mine, other
    values, others = ours.of[name], theirs.of[other_name]
    ratio = Spread.of([a / b for a, b in zip(values, others, strict=True)])
    refused = ours.refused or theirs.refused
    row = Row(
        case=what[0],
        what=what[1],
        unit=unit,
        value=Spread.of(values),
        against=against,
        other=Spread.of(others),
        ratio=ratio,
        target=None if limit is None else Target(limit, at_least=unit.more_is_better),
        judged=ratio.median,
        rounds=len(values),
    )
    return _refused(row, refused) if refused else row


def _refused(row: Row, why: str) -> Row:
    """No figure and no ratio: the sides did not move the same bytes."""
    none = {"value": None, "other": None, "ratio": None, "judged": None}
    return replace(row, refused=why, **none)  # type: ignore[arg-type]


def _speeds(size: str, work: _Work, settings: Settings) -> list[Row]:
    """Saves and loads of some requests at once."""
    shape = _SHAPES[size]
    rounds = settings.rounds(3 if size == "large" else 4)
    blocks = work.requests * work.tokens // shape.block
    amount = blocks * shape.block_bytes

    def one_round(engine: _Engine, mine: _Figures, number: int) -> None:
        prompts = [
            _prompt((number, request), work.tokens) for request in range(work.requests)
        ]
        saving, where = engine.save(prompts)
        loaded = engine.load(prompts, where)
        mine.check(engine, loaded, amount)
        mine.add(
            save=amount / saving / 1e9,
            load=amount / loaded.seconds / 1e9,
            cpu=loaded.cpu / amount * 1e9,
            hooks=loaded.hooks * 1e6,
            copy=amount / engine.copy(amount) / 1e9,
        )

    kept, most = (rounds + 1) * blocks, blocks + work.requests
    with _engines(size, settings, kept=kept, most=most) as engines:
        figures = _take_turns(engines, rounds, one_round)
        rows = list(_rows(size, work, figures))
        if work == _WORKS[size][-1]:
            rows += [
                _row(
                    (f"peer/{size}", f"{name}, worker hooks a step, p99, {work}"),
                    Unit.MICROSECONDS,
                    (mine, "hooks"),
                    (figures[_UPSTREAM], "hooks"),
                    limit=1.0,
                )
                for name, mine in figures.items()
                if name != _UPSTREAM
            ]
            rows += _hook_rows(size, engines)
        return rows


def _rows(size: str, work: _Work, figures: Mapping[str, _Figures]) -> Iterator[Row]:
    """Each of akv's engines against upstream's, and upstream's against a copy."""
    upstream = figures[_UPSTREAM]
    case, what = f"peer/{size}", f"{work}, {_pages(size)}"
    for name, mine in figures.items():
        for verb in ("load", "save"):
            text = (case, f"{name}, {verb} {what}")
            if name == _UPSTREAM:
                copy = (mine, "copy")
                yield _row(text, Unit.GB_PER_SECOND, (mine, verb), copy, against="copy")
            else:
                limit = work.local if name == _LOCAL else work.pool
                yield _row(
                    text,
                    Unit.GB_PER_SECOND,
                    (mine, verb),
                    (upstream, verb),
                    limit=None if (name, verb) == (_LOCAL, "save") else limit,
                )
        if name != _UPSTREAM:
            yield _row(
                (case, f"{name}, CPU s/GB, load {what}"),
                Unit.COUNT,
                (mine, "cpu"),
                (upstream, "cpu"),
                limit=_CPU_LIMITS[size],
            )


def _same(size: str, settings: Settings) -> list[Row]:
    """One cold prompt, and as many requests that have it as come at once."""
    shape = _SHAPES[size]
    rounds = settings.rounds(3 if size == "large" else 4)
    blocks = _SAME_TOKENS // shape.block
    amount = blocks * shape.block_bytes

    def one_round(engine: _Engine, mine: _Figures, number: int) -> None:
        prompt = _prompt((number,), _SAME_TOKENS)
        _, where = engine.save([prompt])
        alone = engine.load([prompt], where)
        mine.check(engine, alone, amount)
        together = engine.load([prompt] * _AT_ONCE, where * _AT_ONCE)
        mine.check(engine, together, amount * _AT_ONCE)
        mine.add(
            alone=alone.seconds * 1e6,
            together=together.seconds * 1e6,
            taken=together.taken * amount / _SAME_TOKENS / 1e9,
        )

    kept, most = (rounds + 1) * blocks, _AT_ONCE * (blocks + 1)
    with _engines(size, settings, kept=kept, most=most) as engines:
        figures = _take_turns(engines, rounds, one_round)
    upstream = figures[_UPSTREAM]
    case, rows = f"peer/{size}", []
    what = f"{_AT_ONCE} at once of the same {_count(_SAME_TOKENS)}, {_pages(size)}"
    for name, mine in figures.items():
        rows.append(
            _row(
                (case, f"{name}, {what}"),
                Unit.MICROSECONDS,
                (mine, "together"),
                (mine, "alone"),
                against="one alone",
                limit=None if name == _UPSTREAM else 1.5,
            )
        )
        if name != _UPSTREAM:
            rows.append(
                _row(
                    (case, f"{name}, GB fetched, {what}"),
                    Unit.COUNT,
                    (mine, "taken"),
                    (upstream, "taken"),
                    limit=1.01 / _AT_ONCE,
                )
            )
    return rows


def _lookups(settings: Settings) -> list[Row]:
    """Prompts of all lengths in small blocks; each one is saved once a round."""
    shape, works = _SHAPES["lookup"], _WORKS["lookup"]
    rounds = settings.rounds(5)
    blocks = [work.tokens // shape.block for work in works]

    def one_round(work: _Work, engine: _Engine, mine: _Figures, number: int) -> None:
        prompt = _prompt((work.tokens, number), work.tokens)
        _, where = engine.save([prompt])
        loads = [engine.load([prompt], where) for _ in range(_LOADS)]
        for loaded in loads:
            mine.check(engine, loaded, work.tokens // shape.block * shape.block_bytes)
        mine.add(answered=statistics.median(one.answered for one in loads) * 1e6)

    rows: list[Row] = []
    calls: dict[str, list[float]] = defaultdict(list)
    kept, most = (rounds + 1) * sum(blocks), max(blocks) + 1
    with _engines(
        "lookup", settings, kept=kept, most=most, lookup_async=True
    ) as engines:
        for work in works:
            figures = _take_turns(engines, rounds, partial(one_round, work))
            rows += [
                _row(
                    (
                        "peer/lookup",
                        f"{name}, asked to answered, {_count(work.tokens)}, all hit",
                    ),
                    Unit.MICROSECONDS,
                    (mine, "answered"),
                    (figures[_UPSTREAM], "answered"),
                    limit=work.local if name == _LOCAL else work.pool,
                )
                for name, mine in figures.items()
                if name != _UPSTREAM
            ]
            for engine in engines:
                calls[engine.name] += engine.lookups
        for engine in engines:
            engine.lookups = calls[engine.name]
        return [*rows, *_hook_rows("lookup", engines)]


def _pages(size: str) -> str:
    return f"pages of {_SHAPES[size].page >> 10} KiB"


def _hook_rows(size: str, engines: Sequence[_Engine]) -> Iterator[Row]:
    """The scheduler's thread in lookups of prompts that hit, of all rounds."""
    for engine in engines:
        yield _percentiles(
            f"peer/{size}",
            f"lookup hooks, {engine.name}, all hit",
            engine.lookups,
            None if engine.name == _UPSTREAM else _HOOK_TARGET,
        )


def _percentiles(
    case: str, what: str, seconds: Sequence[float], target: Target | None
) -> Row:
    """The 99th percentile of calls; its spread is that of three parts of them."""
    times = np.asarray(seconds) * 1e6
    parts = [float(np.percentile(part, 99)) for part in np.array_split(times, 3)]
    p99 = float(np.percentile(times, 99))
    return Row(
        case=case,
        what=what,
        unit=Unit.MICROSECONDS,
        value=Spread(p99, min(parts), max(parts)),
        target=target,
        judged=p99,
        rounds=1,
        amount=len(times),
        extra={
            "p50": float(np.percentile(times, 50)),
            "p99": p99,
            "max": float(times.max()),
        },
    )


def _in_a_process(
    measure: Callable[[Settings], list[Row]], settings: Settings
) -> list[Row]:
    """One kind of work in a process of its own.

    vLLM's stand-ins stay in a process for good, and so do some of upstream's threads.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(measure, settings, theirs))
    child.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"its process ended with {child.exitcode}") from None
    finally:
        ours.close()
        if child.is_alive():
            child.join(10)
        if child.is_alive():
            child.terminate()
            child.join(10)
    if isinstance(answer, Exception):
        raise answer
    rows: list[Row] = answer
    return rows


def _child(
    measure: Callable[[Settings], list[Row]], settings: Settings, answer: Connection
) -> None:
    # Leave by way of all clean-ups, or the master would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        answer.send(measure(settings))
    except Skip as skip:
        answer.send(skip)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        answer.send(RuntimeError(f"{type(error).__name__}: {error}"))
    answer.close()
    sys.stdout.flush()
    # Upstream's threads wait for messages that never come.
    os._exit(0)


def _stopped(settings: Settings) -> list[Row]:
    """The master takes part in nothing any more: it is stopped, not ended."""
    engine_class, master = _harness()
    with _without_native_logs(settings.disk), master:
        url = master.url(protocol="tcp", segment="64MiB", hostname="127.0.0.1")
        requests = 60 if settings.quick else 150
        hooks = _stopped_engine(engine_class, master, url, requests)
        lookups = anyio.run(lookups_left_alone, url, master.stopped)
    return [
        _percentiles("peer/stopped", f"{_HOOK}, master stopped", hooks, _HOOK_TARGET),
        _percentiles(
            "peer/stopped",
            "session.lookup of 64 blocks, breaker open",
            lookups,
            _LOOKUP_TARGET,
        ),
    ]


def _stopped_engine(
    engine_class: Any, master: Any, url: str, requests: int
) -> list[float]:
    """Seconds of each call of the hook, from the moment the master stops."""
    numbers = itertools.count()
    with engine_class(
        extra_config={"store": url},
        num_blocks=1024,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        verify=False,
        compute=False,
    ) as engine:
        engine.add_request(_prompt((next(numbers),), 1024), 1)
        engine.run()
        engine.idle_until_quiet()
        calls: list[float] = engine.hook_times["scheduler"][_HOOK]
        before = len(calls)
        with master.stopped():
            for _ in range(requests):
                engine.add_request(_prompt((next(numbers),), 1024), 1)
                engine.run()
        engine.idle_until_quiet()
        return calls[before:]


async def lookups_left_alone(
    url: str, fault: Callable[[], AbstractContextManager[Any]]
) -> list[float]:
    """Seconds of each lookup once the session leaves the store alone."""
    region = akv.Region(name="object", memory=0, offset=0, stride=4096, size=4096)
    group = akv.Group(block_size=16, regions=(region,))
    geometry = akv.Geometry(num_blocks=1, hash_unit=16, groups=(group,))
    space = KeySpace(namespace="bench", fingerprint=akv.fingerprint({"model": "bench"}))
    random = np.random.default_rng(8).bytes(32 * 64)
    spec = akv.LookupSpec(
        request_id="r",
        space=space.prefix,
        hashes=tuple(random[start : start + 32] for start in range(0, 32 * 64, 32)),
        askable_blocks=64,
        first_block=0,
    )
    times: list[float] = []
    async with akv.open_session(akv.Config(store=url), geometry) as session:
        await session.lookup(spec)
        with fault():
            with anyio.fail_after(20):
                while session.store_works:
                    await session.lookup(spec)
            for _ in range(_LOOKUPS):
                start = time.perf_counter()
                await session.lookup(spec)
                times.append(time.perf_counter() - start)
            if session.store_works:
                raise RuntimeError("the breaker has closed without a master")
    return times


CASES = [
    *(
        Case(
            name=f"peer/{size}/{work.requests}",
            title=f"vLLM's MooncakeStoreConnector, {work}, {_pages(size)}",
            run=partial(_in_a_process, partial(_speeds, size, work)),
        )
        for size in ("large", "small")
        for work in _WORKS[size]
    ),
    *(
        Case(
            name=f"peer/{size}/same",
            title=f"vLLM's MooncakeStoreConnector, one prompt, {_pages(size)}",
            run=partial(_in_a_process, partial(_same, size)),
        )
        for size in ("large", "small")
    ),
    Case(
        name="peer/lookup",
        title="vLLM's MooncakeStoreConnector, lookups of up to 128k tokens",
        run=partial(_in_a_process, _lookups),
    ),
    Case(
        name="peer/stopped",
        title="lookups while the master is stopped",
        run=_stopped,
    ),
]
