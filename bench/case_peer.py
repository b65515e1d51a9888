"""akv against vLLM's own MooncakeStoreConnector, each in an engine without a model.

Three engines stand side by side in this process: one with upstream's connector, one
with akv on the same Mooncake master, one with akv on the local store. They have the
same vLLM, shapes and requests, and take turns. In each round every engine saves
prompts that nobody has seen, then loads them again. A save is timed from the first
request to the last block that is in the store, a load from the first request until
all have ended (one token each, and of the prompt all but one token is loaded).

The runner computes nothing. Before a save the engine's memory is filled with pages
that tell layer and block, before a load with other bytes, and after it each loaded
page is compared with the one that was saved. Where a byte is missing there is no
ratio, neither for the load nor for the save. Upstream's own rows show it against one
thread that copies as many pages in the same round.

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
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_VOCABULARY = 1000
_LOOKUPS = 2000
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
        return f"{many} of {self.tokens // 1024}k"


_LARGE = _Shape(layers=32, heads=4, head_size=64, block=128)
_SMALL = _Shape(layers=30, heads=3, head_size=32, block=16)
_WORKS = {
    "large": (
        _Work(requests=1, tokens=2048, pool=1.0, local=1.15),
        _Work(requests=8, tokens=1024, pool=1.2, local=1.4),
    ),
    "small": (
        _Work(requests=1, tokens=2048, pool=1.3, local=1.5),
        _Work(requests=8, tokens=1024, pool=1.5, local=1.8),
    ),
}


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
        connector = engine.scheduler.get_kv_connector()
        connector.update_state_after_alloc = self._noted(
            connector.update_state_after_alloc
        )

    def save(self, prompts: Sequence[Sequence[int]]) -> tuple[float, list[list[int]]]:
        """Save prompts; the seconds, and in which blocks each one was."""
        for layer, words in enumerate(self._layers):
            for block, page in enumerate(words):
                np.add(self._page, self._mark(layer, block), out=page)
        seconds, names = self._timed(prompts, "save")
        return seconds, [self._where.pop(name) for name in names]

    def load(
        self, prompts: Sequence[Sequence[int]], saved: Sequence[Sequence[int]]
    ) -> tuple[float, int]:
        """Load prompts; the seconds, and how many bytes are as they were saved."""
        for words in self._layers:
            words.fill(0)
        calls = self._engine.hook_times["scheduler"][_HOOK]
        before = len(calls)
        seconds, names = self._timed(prompts, "load")
        self.lookups += calls[before:]
        right = 0
        for name, source in zip(names, saved, strict=True):
            tokens = self._engine.external_tokens(name)
            target = self._where.pop(name)[: tokens // self._shape.block]
            for pair in zip(source, target, strict=False):
                right += sum(self._right(layer, *pair) for layer in self._each_layer())
        return seconds, right

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
    ) -> tuple[float, list[str]]:
        engine = self._engine
        if not engine.reset_prefix_cache():
            raise RuntimeError(f"{self.name}: blocks are in use between two rounds")
        names = [f"{what}-{next(self._numbers)}" for _ in prompts]
        with without_gc():
            start = time.perf_counter()
            for name, prompt in zip(names, prompts, strict=True):
                engine.add_request(prompt, 1, name)
            engine.run()
            if what == "save":
                # Upstream keeps blocks until they are stored. akv gives them back as
                # soon as they are copied, and its worker is asked to store the rest.
                engine.idle_until_quiet()
                engine.worker.debug_state()
            seconds = time.perf_counter() - start
        engine.idle_until_quiet()
        engine.assert_clean()
        return seconds, names

    def _noted(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Note which blocks a request has got."""

        def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> None:
            if request.request_id not in self._where:
                self._where[request.request_id] = list(blocks.get_block_ids()[0])
            hook(request, blocks, tokens)

        return update_state_after_alloc

    def _of_layer(self, cache: Any) -> npt.NDArray[np.uint64]:
        words: npt.NDArray[np.uint64] = cache.numpy().view(np.uint64)
        flat = words.reshape(len(words), -1)
        if not np.shares_memory(flat, words):
            raise RuntimeError("a layer's pages do not lie in one piece")
        return flat

    def _each_layer(self) -> range:
        return range(self._shape.layers)

    def _mark(self, layer: int, block: int) -> np.uint64:
        return np.uint64((block << 8 | layer) + 1)

    def _right(self, layer: int, source: int, target: int) -> int:
        expected = self._page + self._mark(layer, source)
        right = np.array_equal(self._layers[layer][target], expected)
        return self._shape.page if right else 0


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
    make: Callable[..., Any], shape: _Shape, master: Any, segment: int, path: Path
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
                    extra_config={"preferred_segment": own},
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
    make: Callable[..., Any], shape: _Shape, name: str, url: str
) -> Iterator[_Engine]:
    settings: Mapping[str, Any] = {
        "store": url,
        "max_pinned_fraction": 1.0,
        "load_deadline": 60.0,
        "save_deadline": 60.0,
    }
    with make(extra_config=settings) as engine:
        yield _Engine(name, engine, shape)


@dataclass(slots=True)
class _Figures:
    """Of one engine and one kind of work: GB/s of each round."""

    saves: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    refused: str = ""


def _measure(size: str, settings: Settings) -> list[Row]:
    shape = {"large": _LARGE, "small": _SMALL}[size]
    works = _WORKS[size]
    rounds = settings.rounds(3 if size == "large" else 4)
    sets = sum(work.requests * work.tokens for work in works) // shape.block
    kept = (rounds + 1) * sets * shape.block_bytes
    most = max(work.requests * (work.tokens // shape.block + 1) for work in works)
    segment = -(-kept * 4 // 3 >> 24) << 24
    need_memory(3 * (most + 8) * shape.block_bytes + 3 * segment)
    directory = settings.in_memory() / "peer"
    directory.mkdir(exist_ok=True)
    engine_class, master = _harness()
    make = partial(
        engine_class,
        layers=shape.layers,
        heads=shape.heads,
        head_size=shape.head_size,
        block_size=shape.block,
        num_blocks=most + 8,
        max_num_batched_tokens=16384,
        max_num_seqs=16,
        max_model_len=4096,
        verify=False,
        compute=False,
        stall_seconds=30.0,
    )
    with contextlib.ExitStack() as stack:
        from mooncake_master import free_port

        stack.enter_context(_without_native_logs(directory))
        stack.enter_context(master)
        stack.enter_context(_one_rank())
        own = f"127.0.0.1:{free_port()}"
        pool = master.url(
            protocol="tcp", segment=segment, hostname=own, preferred_segment=own
        )
        json_path = directory / "mooncake.json"
        local = f"local:{directory / size}?capacity={segment}"
        engines = [
            stack.enter_context(
                _lent(_upstream(make, shape, master, segment, json_path), segment)
            ),
            stack.enter_context(
                _lent(_akv(make, shape, "akv on Mooncake", pool), segment)
            ),
            stack.enter_context(_akv(make, shape, "akv local", local)),
        ]
        prompts = _prompts()
        rows: list[Row] = []
        for work in works:
            figures = _take_turns(engines, work, shape, prompts, rounds)
            rows += _rows(size, work, shape, figures)
        return [*rows, *_hook_rows(size, engines)]


def _prompts() -> Iterator[list[int]]:
    for seed in itertools.count():
        random = np.random.default_rng(seed)
        yield random.integers(0, _VOCABULARY, 4096).tolist()


def _take_turns(
    engines: Sequence[_Engine],
    work: _Work,
    shape: _Shape,
    source: Iterator[list[int]],
    rounds: int,
) -> dict[str, _Figures]:
    """All engines save and load, after one round that does not count."""
    amount = work.requests * work.tokens // shape.block * shape.block_bytes
    figures = {engine.name: _Figures() for engine in engines}
    for number in range(rounds + 1):
        some = [next(source)[: work.tokens + 1] for _ in range(work.requests)]
        turn = number % len(engines)
        for engine in (*engines[turn:], *engines[:turn]):
            saving, where = engine.save(some)
            if not number:
                engine.lookups.clear()
            loading, right = engine.load(some, where)
            mine = figures[engine.name]
            if right != amount:
                mine.refused = f"{engine.name} moved {right:,} of {amount:,}"
            if number:
                mine.saves.append(amount / saving / 1e9)
                mine.loads.append(amount / loading / 1e9)
                mine.copies.append(amount / engine.copy(amount) / 1e9)
    return figures


def _rows(
    size: str, work: _Work, shape: _Shape, figures: Mapping[str, _Figures]
) -> Iterator[Row]:
    """Each of akv's engines against upstream's, and upstream's against a copy."""
    upstream = figures[_UPSTREAM]
    amount = work.requests * work.tokens // shape.block * shape.block_bytes
    for name, mine in figures.items():
        limit = work.local if name == "akv local" else work.pool
        for what in ("load", "save"):
            judged = name != _UPSTREAM and (name, what) != ("akv local", "save")
            speeds = mine.loads if what == "load" else mine.saves
            others = upstream.loads if what == "load" else upstream.saves
            if name == _UPSTREAM:
                others = upstream.copies
            ratio = Spread.of([a / b for a, b in zip(speeds, others, strict=True)])
            refused = mine.refused or upstream.refused
            row = Row(
                case=f"peer/{size}",
                what=f"{name}, {what} {work}, pages of {shape.page >> 10} KiB",
                unit=Unit.GB_PER_SECOND,
                value=Spread.of(speeds),
                against="copy" if name == _UPSTREAM else _UPSTREAM,
                other=Spread.of(others),
                ratio=ratio,
                target=Target(limit, at_least=True) if judged else None,
                judged=ratio.median,
                amount=amount,
                rounds=len(speeds),
            )
            yield _refused(row, refused) if refused else row


def _refused(row: Row, why: str) -> Row:
    """No figure and no ratio: the sides did not move the same bytes."""
    none = {"value": None, "other": None, "ratio": None, "judged": None}
    return replace(row, refused=why, **none)  # type: ignore[arg-type]


def _hook_rows(size: str, engines: Sequence[_Engine]) -> Iterator[Row]:
    """The scheduler's thread in lookups of prompts that hit, of all rounds."""
    for engine in engines:
        yield _percentiles(
            f"peer/{size}",
            f"{_HOOK}, {engine.name}, all hit",
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


def _in_a_process(size: str, settings: Settings) -> list[Row]:
    """One shape in a process of its own.

    vLLM's stand-ins stay in a process for good, and so do some of upstream's threads.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(size, settings, theirs))
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


def _child(size: str, settings: Settings, answer: Connection) -> None:
    # Leave by way of all clean-ups, or the master would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        answer.send(_measure(size, settings))
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
    prompts = _prompts()
    with engine_class(
        extra_config={"store": url},
        num_blocks=1024,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        verify=False,
        compute=False,
    ) as engine:
        engine.add_request(next(prompts)[:1025], 1)
        engine.run()
        engine.idle_until_quiet()
        calls: list[float] = engine.hook_times["scheduler"][_HOOK]
        before = len(calls)
        with master.stopped():
            for _ in range(requests):
                engine.add_request(next(prompts)[:1025], 1)
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
    Case(
        name="peer/large",
        title=f"vLLM's MooncakeStoreConnector, pages of {_LARGE.page >> 10} KiB",
        run=partial(_in_a_process, "large"),
    ),
    Case(
        name="peer/small",
        title=f"vLLM's MooncakeStoreConnector, pages of {_SMALL.page >> 10} KiB",
        run=partial(_in_a_process, "small"),
    ),
    Case(
        name="peer/stopped",
        title="lookups while the master is stopped",
        run=_stopped,
    ),
]
