"""An OpenAI-compatible chat server around a Hugging Face model, cached by akv.

`python examples/asgi_server.py --model DIR` serves `/v1/chat/completions` (streaming
or not), `/v1/models`, `/health` and `/metrics`, on CPUs. For each request the longest
prefix of the prompt that anybody has stored is loaded into the model's cache, the rest
is computed, and what was computed is stored while the answer streams. Servers with the
same `--store` share it, at once and after a restart.

The event loop only waits. The model runs in one thread, a chunk of a prompt or one
token at a time, so that requests take turns. `--slots` bounds how many are served at
once, `--waiting` how many more may wait. A client that hangs up ends the work for its
own answer, whatever that is waiting for, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
import prometheus_client as prometheus
import pydantic
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from typing_extensions import TypedDict

import akv
from akv.sinks.fanout import Fanout
from akv.sinks.logs import LogSink
from akv.sinks.metrics import PrometheusSink
from hf_model import BLOCK, Model, Run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import TaskGroup
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from akv.core.events import Observer

LOG = logging.getLogger("asgi_server")
GRACE = 5  # seconds for answers and saves to end in when the server stops


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(pydantic.BaseModel):
    """What a client asks for. Of what is not served, all that is named is refused."""

    messages: list[Message] = pydantic.Field(min_length=1)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float = pydantic.Field(1.0, ge=0, le=2)
    stream: bool = False
    cache_salt: str = ""  # parts those who must not profit from each other's prompts
    n: Literal[1] = 1
    tools: None = None
    stop: None = None
    response_format: None = None
    logprobs: Literal[False] | None = None


class Refused(HTTPException):
    """A request that cannot be served; ``param`` is its field that says why."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param


def refuse(_: object, error: Exception) -> JSONResponse:
    """Say in OpenAI's form what is wrong."""
    status, message, param = 500, "this went wrong here: see the server's log", None
    if isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        status, message = 400, f"{param or 'the body'}: {first['msg']}"
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
        param = getattr(error, "param", None)
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": body}, status)


class Server:
    """What all requests share, and the endpoints. Lives on the loop."""

    session: akv.Session
    tasks: TaskGroup

    def __init__(self, model: Model, *, waiting: int) -> None:
        self.model = model
        self.most_waiting = waiting
        self.slots = anyio.CapacityLimiter(len(model.slots))
        self.free = list(model.slots)
        self.space: bytes | None = None
        self.registry = prometheus.CollectorRegistry()
        # The model works in turn. A step that has begun is waited for.
        turn = anyio.CapacityLimiter(1)
        self.thread = partial(anyio.to_thread.run_sync, limiter=turn)

    def app(self, config: akv.Config) -> Starlette:
        """The application; it opens the session when it is started."""
        errors = (pydantic.ValidationError, HTTPException, Exception)
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ],
            lifespan=lambda _: self.opened(config),
            exception_handlers=dict.fromkeys(errors, refuse),
        )

    @asynccontextmanager
    async def opened(
        self, config: akv.Config, *observers: Observer, **options: Any
    ) -> AsyncIterator[None]:
        """Serve for as long as this is open; then saves have a moment to end."""
        sinks: list[Observer] = [LogSink(role="server"), PrometheusSink(self.registry)]
        options |= {"observer": Fanout([*sinks, *observers])}
        memory = self.model.geometry, self.model.device
        async with (
            akv.open_session(config, *memory, **options) as self.session,
            anyio.create_task_group() as self.tasks,
        ):
            self.tasks.start_soon(self.find_space, config.namespace)
            yield
            with anyio.move_on_after(GRACE):
                await self.session.flush()
            self.tasks.cancel_scope.cancel()

    async def find_space(self, namespace: str) -> None:
        """Where our keys are; until the store has said so, everything is computed."""
        while self.space is None:
            try:
                space = await self.session.key_space(namespace, self.model.identity)
                self.space = space.prefix
            except akv.StoreError as error:
                LOG.warning("the store does not answer, trying again: %s", error)
                await anyio.sleep(GRACE)

    async def chat(self, request: Request) -> ASGIApp:
        """The endpoint for chats: what makes the answer and sends it."""
        chat = ChatRequest.model_validate_json(await request.body())
        return partial(self.reply, chat)

    async def reply(
        self, chat: ChatRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the answer; when the client hangs up, cancel what is done for it."""
        began = time.monotonic()

        async def until_hung_up() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_hung_up)
            try:
                async with self.slot() as run:
                    await self.prefill(run, chat)
                    spent = 1000 * (time.monotonic() - began)
                    answer = await self.answer(run, stream=chat.stream)
                    answer.headers["server-timing"] = f"first-token;dur={spent:.1f}"
                    await answer(scope, receive, send)
            except Refused as error:
                await refuse(None, error)(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def answer(self, run: Run, *, stream: bool) -> Response:
        """The whole answer, or the stream that makes it."""
        if stream:
            return StreamingResponse(self.events(run), media_type="text/event-stream")
        while not run.finish:
            await self.thread(self.model.step, run)
        message = {"role": "assistant", "content": run.text}
        return JSONResponse(self.shape(run, "chat.completion", message=message))

    async def events(self, run: Run) -> AsyncIterator[str]:
        """The words as they come, as server-sent events."""
        delta, shown = {"role": "assistant", "content": run.text}, len(run.text)
        while True:
            chunk = self.shape(run, "chat.completion.chunk", delta=delta)
            yield f"data: {json.dumps(chunk)}\n\n"
            if run.finish:
                break
            await self.thread(self.model.step, run)
            delta, shown = {"content": run.text[shown:]}, len(run.text)
        yield "data: [DONE]\n\n"

    def shape(self, run: Run, kind: str, **said: dict[str, str]) -> Any:
        """OpenAI's form of an answer or a chunk; the last one has the numbers."""
        about = {"id": run.id, "created": run.created, "model": self.model.name}
        choice = {"index": 0, **said, "finish_reason": run.finish}
        body: Any = about | {"object": kind, "choices": [choice]}
        if run.finish:
            prompt, answer = len(run.prompt), len(run.tokens)
            body["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": answer,
                "total_tokens": prompt + answer,
                "prompt_tokens_details": {"cached_tokens": run.cached},
            }
        return body

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Run]:
        """A run with blocks of the pool, after all who asked before."""
        waiting = self.slots.statistics().tasks_waiting
        if waiting >= self.most_waiting and not self.slots.available_tokens:
            raise Refused(503, f"{waiting} requests wait already: try again soon")
        async with self.slots:
            run = Run(blocks=self.free.pop())
            try:
                yield run
            finally:
                if run.copied is not None:  # the save reads the blocks until then
                    with anyio.CancelScope(shield=True):
                        await run.copied.wait()
                self.free.append(run.blocks)

    async def prefill(self, run: Run, chat: ChatRequest) -> None:
        """Look up, load, compute the rest, and begin to save that."""
        run.prompt = await self.thread(self.model.encode, chat.messages)
        room = self.model.context - len(run.prompt)
        asked = chat.max_completion_tokens or chat.max_tokens
        run.most, run.temperature = asked or max(room, 1), chat.temperature
        if run.most > room:
            wanted = f"{len(run.prompt)} tokens of prompt and {run.most} of answer"
            message = f"{wanted} are more than the {self.model.context} that fit"
            raise Refused(400, message, "messages")
        run.hashes = akv.block_hashes(run.prompt, BLOCK, salt=chat.cache_salt)
        loaded = await self.load(run)
        self.model.begin(run, loaded)
        while not run.tokens:
            await self.thread(self.model.step, run)
        if self.space is None or loaded == len(run.hashes):
            return
        spans = (run.span(loaded, len(run.hashes)),)
        about: Any = {"request_id": run.id, "space": self.space, "spans": spans}
        spec = akv.SaveSpec(**about, job_id=run.number, chain=run.number)
        run.copied = anyio.Event()
        save = partial(self.session.save, spec, on_copied=run.copied.set)
        self.tasks.start_soon(save)  # not the request's task: it outlives a hang-up

    async def load(self, run: Run) -> int:
        """How many of the run's blocks hold their tokens now, from the store."""
        if self.space is None:
            return 0
        about: Any = {"request_id": run.id, "space": self.space}
        # The last token has to be computed: it gives the first one of the answer.
        askable = (len(run.prompt) - 1) // BLOCK
        lookup = akv.LookupSpec(**about, hashes=run.hashes, askable_blocks=askable)
        found = await self.session.lookup(lookup)
        if not found:
            return 0
        about |= {"usable": found * BLOCK, "spans": (run.span(0, found),)}
        spec = akv.LoadSpec(**about, load_id=run.number, local=0)
        failed = (await self.session.load(spec)).failed_blocks
        # What failed is computed, together with all that comes after it.
        return min((run.blocks.index(block) for block in failed), default=found)

    async def models(self, _: Request) -> Response:
        """The endpoint that names the one model."""
        model = {"id": self.model.name, "object": "model", "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, _: Request) -> Response:
        """The endpoint that says whether there is a cache, and what is in flight."""
        numbers, slots = await self.session.statistics(), self.slots.statistics()
        cache = self.space is not None and numbers.store_works
        about = {"status": "ok", "store": self.session.store_url, "cache": cache}
        own = {"running": slots.borrowed_tokens, "waiting": slots.tasks_waiting}
        akvs = {name: getattr(numbers, name) for name in ("lookups", "loads", "saves")}
        return JSONResponse(about | own | akvs)

    async def metrics(self, _: Request) -> Response:
        """The endpoint for Prometheus, with akv's numbers."""
        text = prometheus.generate_latest(self.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)


def main() -> None:
    """Read the command line, load the model, serve until a signal comes."""
    parser = argparse.ArgumentParser(
        description="An OpenAI-compatible chat server with akv as its prefix cache.",
        epilog="akv's other settings are read from AKV_CONFIG and AKV_<SETTING>.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--model", required=True, help="folder of the model")
    option("--store", help="akv's store, as local:/dev/shm/chat")
    option("--host", default="127.0.0.1", help="address to listen at")
    option("--port", type=int, default=8000, help="0: any that is free")
    option("--slots", type=int, default=4, help="requests served at once")
    option("--waiting", type=int, default=64, help="requests that may wait")
    option("--context", type=int, default=2048, help="tokens of prompt and answer")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    config = akv.Config.load({"store": args.store} if args.store else {})
    model = Model(args.model, slots=args.slots, context=args.context)
    app = Server(model, waiting=args.waiting).app(config)
    uvicorn.run(app, host=args.host, port=args.port, timeout_graceful_shutdown=GRACE)


if __name__ == "__main__":
    main()
