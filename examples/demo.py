"""The main job, shown: a model answers from blocks that an earlier process computed.

`python3 noxfile.py -s demo` runs this. It starts vLLM in a process of its own, asks a
question about a document of about 2,000 tokens and stops the engine. Then it starts a
second engine process on the same store and asks again. What each engine says of
itself (vLLM's log) goes into a file; this program shows where things stand.

Nothing stays behind, whatever happens: each engine leads a session of its own, and
the whole session is ended when this program ends. If this program is killed, the
engine notices that the pipe from it has closed, and ends itself and its children.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

from smollm2 import default_model_dir, ensure_model  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

QUESTION = "What is the name of the lighthouse keeper's dog?"
WARM_UP = "Name a colour."
CAPACITY_MIB = 512
SHARED_MEMORY = Path("/dev/shm")
REQUEST = "question"  # vLLM appends a suffix of its own to a request's id

# Seconds.
TICK = 0.1
PLAIN_TICK = 10.0  # between two lines where the output is no terminal
GRACE = 5.0  # an engine's time to end after it was asked to
SETTLE = 30.0  # at most this long for the first engine's blocks to reach the store


# --- what is said between the two kinds of process -----------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an engine process is to do."""

    model: str
    document: str
    question: str
    max_tokens: int
    connector: str
    store: str
    events: str
    scratch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it."""

    text: str
    first_token: float
    total: float
    prompt_tokens: int
    cached_tokens: int
    asked_at: float

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that the model had to work through."""
        return self.prompt_tokens - self.cached_tokens


class DemoError(Exception):
    """Something that ends the demo, with a sentence for the person."""


# --- the engine process --------------------------------------------------------------


def engine_main(lifeline: int, reports: int) -> int:
    """Run one engine: the job on standard input, reports on a pipe."""
    job = Job(**json.loads(sys.stdin.readline()))
    threading.Thread(target=die_with, args=(lifeline, job.scratch), daemon=True).start()
    with os.fdopen(reports, "w", buffering=1) as out:

        def report(**values: Any) -> None:
            out.write(json.dumps(values) + "\n")

        report(phase="loading vLLM's code")
        answer = asyncio.run(ask(job, report))
        report(answer=dataclasses.asdict(answer))
    return 0


def die_with(lifeline: int, scratch: str) -> NoReturn:
    """Wait for the demo to vanish; then clean up for it and end this session."""
    while os.read(lifeline, 1):
        pass
    kill_group(os.getpgid(0))
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def kill_group(group: int) -> None:
    """End a process group at once, but for the caller and Python's resource trackers.

    A tracker ends by itself when those that it serves are gone, and then removes the
    shared memory that they left.
    """
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        return
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            # The fields that follow the name: state, parent, process group, ...
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) != group or pid == os.getpid():
                continue
            if b"resource_tracker" not in (folder / "cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


async def ask(job: Job, report: Any) -> Answer:
    """Start vLLM, warm it up, ask the question, stop vLLM."""
    import torch
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    gpu = torch.cuda.is_available()
    options: dict[str, Any] = {}
    if job.connector != "none":
        options["kv_transfer_config"] = KVTransferConfig(**connector_options(job))
    if gpu:
        options["gpu_memory_utilization"] = 0.3
    report(phase="starting vLLM")
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=job.model,
            # Without AVX-512 a CPU computes bfloat16 at a third of the speed.
            dtype="auto" if gpu else "float32",
            enforce_eager=True,
            max_model_len=4096,
            **options,
        )
    )
    try:
        tokenizer: Any = engine.get_tokenizer()
        greedy = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
        report(phase="warming up")
        short = prompt_tokens(tokenizer, WARM_UP)
        async for _ in engine.generate(tokens_prompt(short), greedy, "warm-up"):
            pass

        prompt = prompt_tokens(tokenizer, f"{job.document}\n\n{job.question}")
        report(phase=f"asking: {len(prompt):,} tokens, waiting for the first")
        asked_at = time.monotonic()
        first_token = 0.0
        output: Any = None
        async for output in engine.generate(tokens_prompt(prompt), greedy, REQUEST):
            if not first_token and output.outputs[0].token_ids:
                first_token = time.monotonic() - asked_at
                report(phase="answering")
        total = time.monotonic() - asked_at
        report(phase="waiting until the blocks are in the store")
        await settled(job.events)
        report(phase="stopping vLLM")
    finally:
        engine.shutdown()
    return Answer(
        text=output.outputs[0].text.strip(),
        first_token=first_token,
        total=total,
        prompt_tokens=len(prompt),
        cached_tokens=output.num_cached_tokens or 0,
        asked_at=asked_at,
    )


def connector_options(job: Job) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`."""
    if job.connector == "akv":
        return {
            "kv_connector": "AkvConnector",
            "kv_connector_module_path": "akv.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "store": job.store,
                "log_events": job.events,
            },
        }
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": f"{job.scratch}/example"},
    }


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """One user turn in the model's chat template, as token ids."""
    turns = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def tokens_prompt(ids: list[int]) -> Any:
    """The token ids as vLLM takes them."""
    from vllm.inputs import TokensPrompt

    return TokensPrompt(prompt_token_ids=ids)


async def settled(events: str) -> None:
    """Wait until each save that began has ended, and for a moment more."""
    deadline = time.monotonic() + SETTLE
    quiet = 0
    while quiet < 5 and time.monotonic() < deadline:
        await asyncio.sleep(TICK)
        quiet = 0 if saves_are_open(events) else quiet + 1


def saves_are_open(events: str) -> bool:
    """Whether a save that akv has begun has not ended yet."""
    names = [fact["event"] for fact in read_events(Path(events))]
    ended = names.count("akv.save.stored") + names.count("akv.save.dropped")
    return names.count("akv.save.started") > ended


# --- the demo's own process ----------------------------------------------------------


class Ticker:
    """One line that says what is going on and for how long, kept up to date."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._text = ""
        self._since = time.monotonic()
        self._shown = 0.0

    def phase(self, text: str) -> None:
        """Something new has begun."""
        self.done()
        self._text = text
        self._since = time.monotonic()
        self._shown = 0.0
        self.tick()

    def tick(self) -> None:
        """Show that it is still going on."""
        if not self._text:
            return
        now = time.monotonic()
        elapsed = now - self._since
        if self._live:
            mark = "|/-\\"[int(elapsed / TICK) % 4]
            line = f"  {mark} {self._text} ... {elapsed:.1f} s"
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"\r\x1b[K{line[:width]}")
        elif not self._shown or now - self._shown >= PLAIN_TICK:
            self._shown = now
            so_far = f" {elapsed:.0f} s" if elapsed >= 1 else ""
            self._out.write(f"  . {self._text} ...{so_far}\n")
        self._out.flush()

    def done(self) -> None:
        """What was going on has ended."""
        if self._live and self._text:
            elapsed = time.monotonic() - self._since
            self._out.write(f"\r\x1b[K  + {self._text}: {elapsed:.1f} s\n")
            self._out.flush()
        self._text = ""


def run_engine(job: Job, log: Path, ticker: Ticker) -> Answer:
    """Run one engine process to its end, showing its phases."""
    lifeline, lifeline_ours = os.pipe()
    reports_ours, reports = os.pipe()
    # The read end of the one and the write end of the other go to the engine; while
    # it lives, only this process holds the other ends.
    command = [sys.executable, str(Path(__file__).resolve())]
    command += ["--engine", str(lifeline), str(reports)]
    ticker.phase("starting Python")
    answer: Answer | None = None
    engine: subprocess.Popen[str] | None = None
    try:
        with log.open("w") as sink:
            engine = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(lifeline, reports),
                start_new_session=True,
                env={**os.environ, **engine_environment()},
            )
        os.close(lifeline)
        os.close(reports)
        assert engine.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            engine.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            engine.stdin.close()
        for message in messages(reports_ours, ticker):
            if "phase" in message:
                ticker.phase(message["phase"])
            else:
                answer = Answer(**message["answer"])
        while engine.poll() is None:
            ticker.tick()
            time.sleep(TICK)
        ticker.done()
    finally:
        with uninterrupted():
            if engine is not None:
                end_session(engine, ticker)
            os.close(lifeline_ours)
            os.close(reports_ours)
    if answer is None:
        raise DemoError(
            f"the engine ended with status {engine.returncode} and gave no answer; "
            f"the end of its log:\n\n{tail(log)}"
        )
    return answer


def engine_environment() -> dict[str, str]:
    """What an engine needs to know of its surroundings."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    }


def messages(pipe: int, ticker: Ticker) -> Iterator[dict[str, Any]]:
    """What the engine reports, until it has no more to say."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(TICK):
                ticker.tick()
                continue
            data = os.read(pipe, 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (json.loads(line) for line in lines)


def end_session(engine: subprocess.Popen[str], ticker: Ticker) -> None:
    """End the engine and all that it has started; return when all are gone."""
    deadline = time.monotonic() + GRACE
    signalled = engine.returncode is not None  # asked to end only if it has not
    while session_lives(engine):
        if not signalled:
            signalled = True
            ticker.phase("ending the engine")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            kill_group(engine.pid)
        ticker.tick()
        time.sleep(TICK)
    ticker.done()


def session_lives(engine: subprocess.Popen[str]) -> bool:
    """Whether the engine or one of its children is still there."""
    engine.poll()  # takes leave of it, so that it does not count as alive
    try:
        os.killpg(engine.pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let no second Ctrl-C stop the cleaning up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def interrupt(number: int, _frame: object) -> NoReturn:
    """Being told to end is the same as Ctrl-C."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def tail(log: Path, lines: int = 25) -> str:
    """The end of a log, indented."""
    text = log.read_text(errors="replace").rstrip().splitlines()
    return textwrap.indent("\n".join(text[-lines:]), "    ")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the store, gone at the end: in shared memory if there is room."""
    parent: str | None = None
    needed = CAPACITY_MIB * 2**20 * 5 // 4
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= needed:
        parent = str(SHARED_MEMORY)
    path = Path(tempfile.mkdtemp(prefix="akv-demo-", dir=parent))
    if parent is None:
        print(f"{SHARED_MEMORY} has no {needed >> 20} MiB to spare: the store is on")
        print("a disk this time, which is slower")
    try:
        yield path
    finally:
        with uninterrupted():
            shutil.rmtree(path, ignore_errors=True)


# --- what came of it -----------------------------------------------------------------


def read_events(path: Path) -> list[dict[str, Any]]:
    """akv's own events, as written so far; a line still being written is left out."""
    facts: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                facts.append(json.loads(line))
    return facts


def of_question(facts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events of the timed request."""
    return [f for f in facts if str(f.get("request_id", "")).startswith(REQUEST)]


def bytes_of(facts: Sequence[Mapping[str, Any]], event: str) -> int:
    """The bytes of all events of this name."""
    return sum(int(fact["bytes"]) for fact in facts if fact["event"] == event)


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of the waterfall: its stretches of time, in seconds, and a remark."""

    label: str
    stretches: tuple[tuple[float, float], ...]
    remark: str = ""

    @property
    def seconds(self) -> float:
        """How long it was going on, in all."""
        return sum(end - start for start, end in self.stretches)


def bars_of_load(facts: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """The rows lookup, wait, fetch and place, from akv's events of one request."""
    times: dict[str, list[float]] = {}
    for fact in facts:
        times.setdefault(str(fact["event"]), []).append(float(fact["t"]))
    fetched = [f for f in facts if f["event"] == "akv.load.window_fetched"]
    placed = [f for f in facts if f["event"] == "akv.load.window_placed"]
    asked = times.get("akv.lookup.started", [])
    answered = times.get("akv.lookup.answered", [])
    started = times.get("akv.load.started", [])
    landed = times.get("akv.load.landed", [])
    if not (asked and answered and started and landed):
        return []
    found = sum(int(f["found"]) for f in facts if f["event"] == "akv.lookup.answered")
    # Waiting is everything before the store was asked for bytes: for the engine to
    # schedule the request, and for room in staging.
    waits = [(answered[-1], started[0])] if started[0] > answered[-1] else []
    for fact in fetched:
        began = float(fact["t"]) - float(fact["seconds"])
        waits.append((began - float(fact.get("wait_seconds", 0.0)), began))
    return [
        Bar("lookup", ((asked[0], answered[-1]),), f"{found} blocks are there"),
        Bar("wait", tuple(waits), "for the engine's next step and for staging"),
        Bar("fetch", spans(fetched), amount(fetched, "from the store")),
        Bar("place", spans(placed), amount(placed, "into the engine's blocks")),
    ]


def spans(facts: Sequence[Mapping[str, Any]]) -> tuple[tuple[float, float], ...]:
    """Start and end of facts that are noticed at their end."""
    return tuple((float(f["t"]) - float(f["seconds"]), float(f["t"])) for f in facts)


def amount(facts: Sequence[Mapping[str, Any]], where: str) -> str:
    """How much, and in how many windows."""
    windows = f"{len(facts)} window{'' if len(facts) == 1 else 's'}"
    return f"{megabytes(sum(int(f['bytes']) for f in facts))} in {windows} {where}"


def draw(bars: Sequence[Bar], width: int = 48) -> Iterator[str]:
    """The rows as lines of text, on one scale of time."""
    edges = [edge for bar in bars for stretch in bar.stretches for edge in stretch]
    start, end = min(edges), max(edges)
    scale = width / max(end - start, 1e-9)
    for bar in bars:
        cells = [" "] * width
        for a, b in bar.stretches:
            first = min(int((a - start) * scale), width - 1)
            last = max(math.ceil((b - start) * scale), first + 1)
            cells[first:last] = "█" * (min(last, width) - first)
        line = "".join(cells)
        yield f"  {bar.label:<7}|{line}| {bar.seconds * 1e3:7.1f} ms  {bar.remark}"
    ruler = f"{(end - start) * 1e3:.1f} ms"
    yield f"  {'':<7}|0{ruler:>{width - 1}}|"


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.1f} MB"


def print_outcome(
    answers: Sequence[Answer], events: Sequence[Path], job: Job
) -> tuple[bool, float]:
    """The table, the waterfall and the verdict; whether equal, and the ratio."""
    first, second = answers
    facts = [of_question(read_events(path)) for path in events]
    rows = [
        ("time to first token", *(f"{a.first_token:.3f} s" for a in answers)),
        ("tokens of the prompt", *(f"{a.prompt_tokens:,}" for a in answers)),
        ("  loaded", *(f"{a.cached_tokens:,}" for a in answers)),
        ("  computed", *(f"{a.computed_tokens:,}" for a in answers)),
        ("bytes loaded", *(megabytes(bytes_of(f, "akv.load.landed")) for f in facts)),
        ("bytes saved", *(megabytes(bytes_of(f, "akv.save.stored")) for f in facts)),
        ("time to the last token", *(f"{a.total:.3f} s" for a in answers)),
    ]
    print(f"\n  {'':<24}{'first process':>16}{'second process':>16}")
    for label, left, right in rows:
        print(f"  {label:<24}{left:>16}{right:>16}")
    print(f"\n  question  {job.question}")
    for which, answer in zip(("first", "second"), answers, strict=True):
        shown = textwrap.wrap(answer.text, 66) or [""]
        print(f"  {which:<10}" + ("\n" + " " * 12).join(shown))
    bars = bars_of_load(facts[1])
    if bars:
        print("\n  the load in the second process, from akv's own events:")
        for line in draw(bars):
            print(line)
        landed = [f for f in facts[1] if f["event"] == "akv.load.landed"][-1]
        after = second.asked_at + second.first_token - float(landed["t"])
        print(
            f"  then {second.computed_tokens} tokens computed and the first one ",
            end="",
        )
        print(f"sampled: {after * 1e3:.0f} ms")
    equal = first.text == second.text
    ratio = second.first_token / first.first_token
    print(f"\n  ratio of the times to the first token: {ratio:.3f}")
    print(f"  answers equal: {'yes' if equal else 'NO'}")
    return equal, ratio


def show(arguments: argparse.Namespace, scratch: Path, logs: Path) -> int:
    """Ask twice and compare; the exit status."""
    events = [logs / "events-1.jsonl", logs / "events-2.jsonl"]
    for path in events:
        path.unlink(missing_ok=True)  # of an earlier run; akv appends
    try:
        model = ensure_model(arguments.model.expanduser().resolve())
    except OSError as error:
        raise DemoError(f"no model: {error}") from error
    print(f"model: {model.name}; store: {scratch}; logs: {logs}")
    answers: list[Answer] = []
    for number, path in enumerate(events, 1):
        job = Job(
            model=str(model),
            document=arguments.document.read_text(),
            question=arguments.question,
            max_tokens=arguments.max_tokens,
            connector=arguments.connector,
            store=f"local:{scratch}/store?capacity={CAPACITY_MIB}MiB",
            events=str(path),
            scratch=str(scratch),
        )
        which = "first" if number == 1 else "second"
        print(f"\n[{number}/2] the {which} engine process", flush=True)
        answer = run_engine(job, logs / f"engine-{number}.log", Ticker(sys.stdout))
        print(f"  = first token after {answer.first_token:.3f} s", flush=True)
        answers.append(answer)
    equal, _ = print_outcome(answers, events, job)
    if not answers[1].cached_tokens:
        print(f"  nothing was loaded; see {logs}")
    return 0 if equal and answers[1].cached_tokens else 1


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Ask a real model on real vLLM the same question in two engine "
        "processes, one after the other, on one akv store, and compare.",
        epilog="Exit status: 0 if the answers are equal and the second engine loaded "
        "blocks, 1 if not, 130 after Ctrl-C.",
    )
    parser.add_argument(
        "--document",
        type=Path,
        default=HERE / "harbour.txt",
        help="the text that the question is about (default: %(default)s)",
    )
    parser.add_argument("--question", default=QUESTION, help="default: %(default)s")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=48,
        help="length of the answer at most (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=default_model_dir(),
        help="folder of the model (default: AKV_MODEL_DIR, else %(default)s)",
    )
    parser.add_argument(
        "--connector",
        choices=("akv", "example", "none"),
        default="akv",
        help="who keeps the blocks: akv, vLLM's example connector, or nobody",
    )
    parser.add_argument(
        "--logs", type=Path, help="keep vLLM's logs and akv's events in this folder"
    )
    parser.add_argument("--engine", nargs=2, type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Run the demo, or one engine of it."""
    arguments = parse()
    if arguments.engine:
        return engine_main(*arguments.engine)
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        with scratch_folder() as scratch:
            logs: Path = arguments.logs or scratch
            logs.mkdir(parents=True, exist_ok=True)
            return show(arguments, scratch, logs.resolve())
    except DemoError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the engine and the store are gone", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
