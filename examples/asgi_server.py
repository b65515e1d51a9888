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
import itertools
import logging
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import prometheus_client as prometheus
import pydantic
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import akv
from akv.sinks.fanout import Fanout
from akv.sinks.logs import LogSink
from akv.sinks.metrics import PrometheusSink
from hf_model import BLOCK, Model, Run
from openai_api import DONE, ApiError, Ask, Shape, sse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from anyio.abc import TaskGroup
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from akv.core.events import Observer
    from akv.store import BlockStore

T = TypeVar("T")
CHUNK = 256  # tokens of a prompt that are computed before others have their turn
GRACE = 5  # seconds for answers and saves to end in when the server stops
LOG = logging.getLogger("asgi_server")


class Server:
    """What all requests share. Lives on the loop, while ``opened`` is."""

    session: akv.Session
    saves: TaskGroup

    def __init__(
        self, model: Model, *, name: str, waiting: int, store: BlockStore | None = None
    ) -> None:
        self.model = model
        self.name = name
        self.store = store  # an open one, in place of the setting
        self.space: bytes | None = None
        self.ready = anyio.Event()
        self.most_waiting = waiting
        self.waiting = 0
        self.ids = itertools.count(1)
        self.turn = anyio.CapacityLimiter(1)
        self.places = anyio.Semaphore(model.slots)
        firsts = range(0, len(model.pool), model.slot_blocks)
        self.free = [range(first, first + model.slot_blocks) for first in firsts]
        self.registry = prometheus.CollectorRegistry()

    @property
    def running(self) -> int:
        """Requests that have blocks of the pool."""
        return self.model.slots - len(self.free)

    @asynccontextmanager
    async def opened(self, config: akv.Config, *more: Observer) -> AsyncIterator[None]:
        """Serve for as long as this is open; then saves have a moment to end."""
        sinks: list[Observer] = [LogSink(role="server"), PrometheusSink(self.registry)]
        options: Any = {"observer": Fanout([*sinks, *more]), "store": self.store}
        memory = self.model.geometry, self.model.device
        async with (
            akv.open_session(config, *memory, **options) as self.session,
            anyio.create_task_group() as self.saves,
        ):
            self.saves.start_soon(self.find_space, config.namespace)
            yield
            with anyio.move_on_after(GRACE):
                await self.session.flush()
            self.saves.cancel_scope.cancel()

    async def find_space(self, namespace: str) -> None:
        """Where our keys are; until the store has said so, everything is computed."""
        while self.space is None:
            try:
                space = await self.session.key_space(namespace, self.model.identity)
                self.space = space.prefix
                self.ready.set()
            except akv.StoreError as error:
                LOG.warning("the store does not answer, trying again: %s", error)
                await anyio.sleep(GRACE)

    async def thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Let the model work, in turn; a step that has begun is waited for."""
        step = partial(function, *args, **kwargs)
        return await anyio.to_thread.run_sync(step, limiter=self.turn)

    async def next_token(self, run: Run) -> None:
        """Compute one more token of the answer."""
        await self.thread(self.model.compute, run, run.tokens[-1:])

    @asynccontextmanager
    async def slot(self, run: Run) -> AsyncIterator[None]:
        """Give ``run`` blocks of the pool, after all who asked before."""
        if self.waiting >= self.most_waiting and not self.places.value:
            raise ApiError(503, f"{self.waiting} requests wait already: try again soon")
        self.waiting += 1
        try:
            await self.places.acquire()
        finally:
            self.waiting -= 1
        run.blocks = self.free.pop()
        try:
            yield
        finally:
            if run.copied is not None:  # the save reads the blocks until then
                with anyio.CancelScope(shield=True):
                    await run.copied.wait()
            self.free.append(run.blocks)
            self.places.release()

    async def prefill(self, run: Run) -> None:
        """Look up, load, compute the rest, and begin to save that."""
        run.passed("queue")
        await self.thread(self.model.begin, run)
        hashes = akv.block_hashes(run.prompt, BLOCK, salt=run.ask.cache_salt)
        loaded = await self.load(run, hashes)
        await self.thread(self.model.fill, run, run.blocks[:loaded])
        for start in range(run.cached, len(run.prompt), CHUNK):
            tokens = run.prompt[start : start + CHUNK]
            last = start + CHUNK >= len(run.prompt)
            await self.thread(self.model.compute, run, tokens, choose=last)
        run.passed("compute")
        ids = run.blocks[loaded : len(hashes)]
        if self.space is None or not ids:
            return
        mark = await self.thread(self.model.keep, run, ids)
        span = akv.Span(
            first_block=loaded, hashes=hashes[loaded:], block_ids=tuple(ids)
        )
        number = next(self.ids)
        spec = akv.SaveSpec(
            request_id=run.id,
            space=self.space,
            job_id=number,
            chain=number,
            spans=(span,),
        )
        run.copied = anyio.Event()
        save = partial(self.session.save, spec, mark=mark, on_copied=run.copied.set)
        self.saves.start_soon(save)  # not the request's task: it outlives a hang-up

    async def load(self, run: Run, hashes: tuple[bytes, ...]) -> int:
        """How many of the run's blocks hold their tokens now, from the store."""
        if self.space is None:
            return 0
        # The last token has to be computed: it gives the first one of the answer.
        most = (len(run.prompt) - 1) // BLOCK
        lookup = akv.LookupSpec(
            request_id=run.id, space=self.space, hashes=hashes, askable_blocks=most
        )
        found = await self.session.lookup(lookup)
        run.passed("lookup")
        if not found:
            return 0
        ids = tuple(run.blocks[:found])
        span = akv.Span(first_block=0, hashes=hashes[:found], block_ids=ids)
        spec = akv.LoadSpec(
            request_id=run.id,
            space=self.space,
            load_id=next(self.ids),
            local=0,
            usable=found * BLOCK,
            spans=(span,),
        )
        outcome = await self.session.load(spec, mark=self.model.device.mark())
        run.passed("load")
        # What failed is computed, together with all that comes after it.
        return min((ids.index(block) for block in outcome.failed_blocks), default=found)


class Reply(Response):
    """Makes one answer and sends it, for as long as the client is there."""

    def __init__(self, server: Server, run: Run) -> None:
        super().__init__()
        self.server = server
        self.run = run
        self.shape = Shape(run.id, server.name)
        self.begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; when the client hangs up, cancel what is done for it."""

        async def until_hung_up() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_hung_up)
            try:
                async with self.server.slot(self.run):
                    await self.server.prefill(self.run)
                    if self.run.ask.stream:
                        await self.stream(send)
                    else:
                        await (await self.whole())(scope, receive, send)
            except Exception as error:
                if not isinstance(error, ApiError):
                    LOG.exception("no answer to %s", self.run.id)
                    error = ApiError(500, "this went wrong here: see the server's log")
                if self.begun:
                    await self.write(send, sse(error.body), last=True)
                else:
                    await error.response(scope, receive, send)
            tasks.cancel_scope.cancel()

    def timing(self) -> dict[str, str]:
        """Milliseconds until the first token, and where they went."""
        seconds = self.run.seconds | {"first-token": sum(self.run.seconds.values())}
        parts = [f"{name};dur={1000 * value:.1f}" for name, value in seconds.items()]
        return {"server-timing": ", ".join(parts)}

    async def whole(self) -> Response:
        """The answer at once."""
        while not self.run.finish:
            await self.server.next_token(self.run)
        body = self.shape.whole(self.run.text, self.run.finish, self.run.usage())
        return JSONResponse(body, 200, self.timing())

    async def stream(self, send: Send) -> None:
        """The words as they come, as server-sent events."""
        pairs = {"content-type": "text/event-stream", **self.timing()}.items()
        headers = [(name.encode(), value.encode()) for name, value in pairs]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.begun, shown = True, 0
        await self.write(send, self.shape.piece({"role": "assistant", "content": ""}))
        while True:
            words = self.run.text[shown:]
            if words:
                await self.write(send, self.shape.piece({"content": words}))
                shown += len(words)
            if self.run.finish:
                break
            await self.server.next_token(self.run)
        await self.write(send, self.shape.piece({}, self.run.finish))
        if (self.run.ask.stream_options or {}).get("include_usage"):
            await self.write(send, self.shape.last(self.run.usage()))
        await self.write(send, DONE, last=True)

    async def write(self, send: Send, body: bytes, *, last: bool = False) -> None:
        """Send a part of the body."""
        message = {"type": "http.response.body", "body": body, "more_body": not last}
        await send(message)


def make_app(server: Server, config: akv.Config) -> Starlette:
    """The application; it opens the session when it is started."""

    async def chat(request: Request) -> Response:
        try:
            ask = Ask.model_validate_json(await request.body())
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            message = f"{field or 'the body'}: {first['msg']}"
            raise ApiError(400, message, field or None) from None
        return Reply(server, Run(ask=ask))

    async def models(_: Request) -> Response:
        model = {"id": server.name, "object": "model", "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_: Request) -> Response:
        numbers = await server.session.statistics()
        cache = server.space is not None and numbers.store_works
        own = {"running": server.running, "waiting": server.waiting}
        akvs = {name: getattr(numbers, name) for name in ("lookups", "loads", "saves")}
        about = {"status": "ok", "store": server.session.store_url, "cache": cache}
        return JSONResponse(about | own | akvs)

    async def metrics(_: Request) -> Response:
        text = prometheus.generate_latest(server.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    async def refuse(_: Request, error: Any) -> Response:
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, error.detail)
        response: Response = error.response
        return response

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        lifespan=lambda _: server.opened(config),
        exception_handlers={ApiError: refuse, HTTPException: refuse},
    )


def main() -> None:
    """Read the command line, load the model, serve until a signal comes."""
    parser = argparse.ArgumentParser(
        description="An OpenAI-compatible chat server with akv as its prefix cache.",
        epilog="akv's other settings are read from AKV_CONFIG and AKV_<SETTING>.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--store", help="akv's store, as local:/dev/shm/chat")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--slots", type=int, default=4, help="requests served at once")
    parser.add_argument(
        "--waiting", type=int, default=64, help="requests that may wait"
    )
    parser.add_argument(
        "--context", type=int, default=2048, help="tokens of a prompt and its answer"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    config = akv.Config.load({"store": options.store} if options.store else {})
    model = Model(options.model, slots=options.slots, context=options.context)
    name = Path(options.model).resolve().name
    app = make_app(Server(model, name=name, waiting=options.waiting), config)
    at = {"host": options.host, "port": options.port}
    uvicorn.run(app, **at, timeout_graceful_shutdown=GRACE)


if __name__ == "__main__":
    main()
