"""The chat server as its users meet it: real processes, a real model, a real client."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import httpx
import pytest

import akv
from akv.core.events import LoadCancelled, LoadLanded, LoadStarted
from akv.store import MemoryStore
from akv.testing.stores import GatedStore
from smollm2 import default_model_dir, ensure_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from starlette.applications import Starlette

    from akv.core.events import Event
    from hf_model import Model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16
DOCUMENT = (ROOT / "examples" / "harbour.txt").read_text()[:2600]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": f"{DOCUMENT}\n\nWho keeps the lighthouse?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Name a colour: émeraude, 緑, or another one."},
        {"role": "assistant", "content": "Green."},
        {"role": "user", "content": "Another one."},
    ],
]
LONG = [{"role": "user", "content": "Tell a long story about a harbour."}]
TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Words:
    """What one request got."""

    text: str
    finish: str
    prompt: int
    cached: int
    first_token: float


class Running:
    """One server process and a client of it."""

    def __init__(self, model: Path, store: str) -> None:
        command = [sys.executable, str(ROOT / "examples" / "asgi_server.py")]
        command += ["--model", str(model), "--store", store, "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--slots", "2", "--context", "1024"],
            stderr=subprocess.PIPE,
            text=True,
            # Other tests' engines may have both cores: nothing here is about time.
            env=os.environ | {"AKV_LOOKUP_DEADLINE": "30", "AKV_LOAD_DEADLINE": "60"},
        )
        self.log: list[str] = []
        self._url: str | None = None
        self._known = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"running on (http://[\d.:]+)", line)
            if found:
                self._url = found[1]
                self._known.set()
        self._known.set()

    @contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """A client, when the server has its store."""
        assert self._known.wait(120)
        assert self._url is not None, "".join(self.log)
        with httpx.Client(base_url=self._url, timeout=120) as client:
            until(lambda: client.get("/health").json()["cache"])
            yield client

    def stop(self) -> int:
        """End it as an operator would; its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()


def until(true: Callable[[], object], seconds: float = 60) -> None:
    """Wait for another process."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def model() -> Path:
    """The small model, built once."""
    return ensure_model(default_model_dir())


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[Sequence[httpx.Client]]:
    """Two server processes on one store; both end as they should."""
    folder = Path(tempfile.mkdtemp(prefix="akv-chat-", dir="/dev/shm"))
    store = f"local:{folder}/store?capacity=256MiB"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        running = []
        for _ in range(2):
            running.append(Running(model, store))
            stack.callback(running[-1].stop)
        yield [stack.enter_context(one.client()) for one in running]
        for one in running:
            # uvicorn stops in order, then lets the signal have its usual effect.
            assert one.stop() == -signal.SIGTERM
            log = "".join(one.log)
            assert "Application shutdown complete" in log
            assert "Traceback" not in log


@pytest.fixture(scope="module")
def torch_side(model: Path) -> Model:
    """The model in this process."""
    from hf_model import Model

    return Model(str(model), slots=2, context=512)


@pytest.fixture(scope="module")
def alone(torch_side: Model) -> Sequence[str]:
    """What the model says with neither the server nor akv around it."""
    tokenizer = torch_side.tokenizer
    answers = []
    for chat in CHATS:
        text = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        made = torch_side.net.generate(**ids, do_sample=False, max_new_tokens=TOKENS)
        new = made[0, ids["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    assert "Paris" in answers[0]
    return answers


def body_of(chat: object, *, stream: bool, tokens: int = TOKENS, **more: Any) -> Any:
    """A request as OpenAI's clients send it."""
    return {
        "model": "any",
        "messages": chat,
        "temperature": 0,
        "max_tokens": tokens,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
        **more,
    }


def ask(
    client: httpx.Client, chat: object, *, stream: bool = True, salt: str = ""
) -> Words:
    """One request, read to its end."""
    path = "/v1/chat/completions"
    body = body_of(chat, stream=stream, cache_salt=salt)
    text, finish, usage = "", "", None
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        timing = re.search(
            r"first-token;dur=([\d.]+)", response.headers["server-timing"]
        )
        assert timing is not None
        if not stream:
            response.read()
            (choice,) = response.json()["choices"]
            text, finish = choice["message"]["content"], choice["finish_reason"]
            usage = response.json()["usage"]
        else:
            *pieces, last = events_of(response)
            assert last == "[DONE]"
            for piece in pieces:
                usage = piece.get("usage") or usage
                for choice in piece["choices"]:
                    text += choice["delta"].get("content", "")
                    finish = choice["finish_reason"] or finish
    assert usage is not None
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Words(
        text=text,
        finish=finish,
        prompt=usage["prompt_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        first_token=float(timing[1]) / 1000,
    )


def events_of(response: httpx.Response) -> Iterator[Any]:
    """The data of a stream's events."""
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def is_idle(client: httpx.Client) -> bool:
    """Whether nothing is in flight any more."""
    health = client.get("/health").json()
    names = ("running", "waiting", "lookups", "loads", "saves")
    return not any(health[name] for name in names)


def test_the_words_are_the_models_own_cold_warm_and_from_the_other_servers_blocks(
    servers: Sequence[httpx.Client], alone: Sequence[str]
) -> None:
    """The second server has computed nothing of what it answers from."""
    first, second = servers
    salt = "blocks of no other test"
    cold = [ask(first, chat, salt=salt) for chat in CHATS]
    until(lambda: is_idle(first))
    warm = [ask(first, chat, salt=salt, stream=False) for chat in CHATS]
    other = [ask(second, chat, salt=salt) for chat in CHATS]
    for answers in (cold, warm, other):
        assert [answer.text for answer in answers] == list(alone)
        assert {answer.finish for answer in answers} <= {"stop", "length"}
    usable = [(answer.prompt - 1) // BLOCK * BLOCK for answer in cold]
    # The first tokens of the template are the same for all.
    assert all(answer.cached < BLOCK * 3 for answer in cold)
    assert [answer.cached for answer in warm] == usable
    assert [answer.cached for answer in other] == usable
    long = CHATS.index(max(CHATS, key=lambda chat: len(str(chat))))
    ratio = cold[long].first_token / other[long].first_token
    print(
        f"first token of {cold[long].prompt} tokens: {cold[long].first_token:.3f} s "
        f"computed, {other[long].first_token:.3f} s with {other[long].cached} of the "
        f"other server's: {ratio:.1f} times as fast"
    )


def test_a_client_that_hangs_up_leaves_nothing_behind_and_disturbs_nobody(
    servers: Sequence[httpx.Client], alone: Sequence[str]
) -> None:
    """In the middle of a long answer, while another one is made."""
    server = servers[0]
    until(lambda: is_idle(server))
    body = body_of(LONG, stream=True, tokens=800)
    with server.stream("POST", "/v1/chat/completions", json=body) as response:
        events = events_of(response)
        for _ in range(3):
            next(events)
        assert server.get("/health").json()["running"] == 1
        staying: list[Words] = []
        other = threading.Thread(target=lambda: staying.append(ask(server, CHATS[0])))
        other.start()
        next(events)
    other.join()
    until(lambda: is_idle(server))
    assert [words.text for words in staying] == [alone[0]]
    # Both slots are free: two can be served at once, and they are served right.
    assert ask(server, CHATS[2]).text == alone[2]


def test_a_hang_up_while_the_prompt_is_computed_ends_the_work_for_it(
    servers: Sequence[httpx.Client],
) -> None:
    """Nothing has been answered yet: the client just goes."""
    server = servers[0]
    until(lambda: is_idle(server))
    body = body_of([{"role": "user", "content": DOCUMENT[::-1][:1500]}], stream=True)
    with pytest.raises(httpx.ReadTimeout):
        server.post(
            "/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=0.1)
        )
    until(lambda: is_idle(server))


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ("no json", 400, None, "JSON"),
        ({}, 400, "messages", "required"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "pope", "content": "x"}]}, 400, "messages.0.role", ""),
        ({"messages": CHATS[0], "n": 2}, 400, "n", "1"),
        ({"messages": CHATS[0], "tools": [{}]}, 400, "tools", "null"),
        ({"messages": CHATS[0], "temperature": 3}, 400, "temperature", "2"),
        ({"messages": CHATS[0], "max_tokens": 5000}, 400, "messages", "1024 that fit"),
    ],
)
def test_what_cannot_be_served_is_refused_in_openais_form(
    servers: Sequence[httpx.Client], body: Any, status: int, param: str, says: str
) -> None:
    """The field, and what is wrong with it."""
    content = body if isinstance(body, str) else json.dumps(body)
    answer = servers[0].post("/v1/chat/completions", content=content)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


def test_it_says_which_model_how_it_is_and_what_akv_has_done(
    servers: Sequence[httpx.Client],
) -> None:
    """The endpoints that operators and clients look at."""
    server = servers[1]
    (only,) = server.get("/v1/models").json()["data"]
    assert only["id"] == default_model_dir().name
    ask(server, CHATS[0])
    assert server.get("/health").json()["store"].startswith("local:/dev/shm/akv-chat-")
    assert re.search(r"^akv_\w+ [1-9]", server.get("/metrics").text, re.MULTILINE)
    assert server.get("/nothing").json()["error"]["message"] == "Not Found"


# --- with a store that the test holds -------------------------------------------------


class Client:
    """The other end of one request, without a network."""

    def __init__(self, app: Starlette) -> None:
        self.app = app
        self.gone = anyio.Event()
        self.asked = b""
        self.status = 0
        self.body = b""

    async def receive(self) -> dict[str, Any]:
        """The request, and then nothing until the client hangs up."""
        if self.asked:
            body, self.asked = self.asked, b""
            return {"type": "http.request", "body": body}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Keep what the server sends."""
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")

    async def ask(self, chat: Any) -> None:
        """One request from its beginning to its end."""
        self.asked = json.dumps(body_of(chat, stream=False)).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        await self.app({**scope, "headers": []}, self.receive, self.send)


class Watch:
    """Tells when loads begin and end."""

    def __init__(self) -> None:
        self.loads = 0
        self._changed = anyio.Event()

    def on(self, event: Event) -> None:
        """Called on the loop, as all events of a load are."""
        if isinstance(event, LoadStarted):
            self.loads += 1
        elif isinstance(event, LoadCancelled | LoadLanded):
            self.loads -= 1
        self._changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for something that an event brings about."""
        with anyio.fail_after(60):
            while not true():
                self._changed = anyio.Event()
                await self._changed.wait()


@pytest.mark.anyio
async def test_a_hang_up_cancels_its_own_load_and_nothing_else(
    torch_side: Model, alone: Sequence[str]
) -> None:
    """Two clients load the same blocks, a third finds no place, one of them goes."""
    from asgi_server import Server

    store = GatedStore(MemoryStore(), gated=("get_into",))
    server = Server(torch_side, waiting=0)
    config = akv.Config(load_deadline=60)
    app = server.app(config)
    watch = Watch()
    chat = CHATS[2]
    async with server.opened(config, watch, store=store):
        await watch.until(lambda: server.space is not None)
        writer, goes, stays, refused = (Client(app) for _ in range(4))
        await writer.ask(chat)
        await server.session.flush()
        async with anyio.create_task_group() as tasks:
            left = anyio.Event()

            async def go() -> None:
                await goes.ask(chat)
                left.set()

            tasks.start_soon(go)
            tasks.start_soon(stays.ask, chat)
            await watch.until(lambda: watch.loads == 2)
            await refused.ask(chat)
            assert refused.status == 503
            assert json.loads(refused.body)["error"]["type"] == "server_error"
            goes.gone.set()
            with anyio.fail_after(30):
                await left.wait()
            assert (goes.status, goes.body) == (0, b"")
            assert watch.loads == 1
            assert server.slots.borrowed_tokens == 1
            store.open()
        numbers = server.slots.statistics()
        assert numbers.borrowed_tokens == numbers.tasks_waiting == 0
    for client in (writer, stays):
        answer = json.loads(client.body)
        assert answer["choices"][0]["message"]["content"] == alone[2]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (answer["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK > 0


@pytest.mark.anyio
async def test_without_its_store_it_answers_all_the_same(
    torch_side: Model, alone: Sequence[str], tmp_path: Path
) -> None:
    """Nothing is looked up, everything is computed, and health says so."""
    from asgi_server import Server

    (tmp_path / "file").touch()
    server = Server(torch_side, waiting=1)
    config = akv.Config(store=f"local:{tmp_path}/file/store?capacity=64MiB")
    app = server.app(config)
    async with server.opened(config):
        client = Client(app)
        await client.ask(CHATS[0])
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://it") as http:
            health = (await http.get("/health")).json()
    answer = json.loads(client.body)
    assert answer["choices"][0]["message"]["content"] == alone[0]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert health["cache"] is False


def test_its_help_names_every_option() -> None:
    """And needs no model."""
    command = [sys.executable, str(ROOT / "examples" / "asgi_server.py"), "--help"]
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    for option in ("--model", "--store", "--port", "--slots", "--waiting", "--context"):
        assert option in said.stdout
