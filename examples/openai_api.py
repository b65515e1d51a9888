"""OpenAI's chat API as far as `asgi_server.py` serves it: requests, answers, errors."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import pydantic
from starlette.responses import JSONResponse


class ApiError(Exception):
    """An answer that says in OpenAI's form what is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": None}
        self.body = {"error": error}
        self.response = JSONResponse(self.body, status)


class Turn(pydantic.BaseModel):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Ask(pydantic.BaseModel):
    """A request. What would change the answer and is not served is refused."""

    messages: list[Turn] = pydantic.Field(min_length=1)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float = pydantic.Field(1.0, ge=0, le=2)
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    cache_salt: str = ""  # parts those who must not profit from each other's prompts
    n: Literal[1] = 1
    tools: None = None
    stop: None = None
    response_format: None = None
    logprobs: Literal[False] | None = None


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """How many tokens it was."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Shape:
    """The JSON around the words of one answer."""

    def __init__(self, run_id: str, model: str) -> None:
        self._about = {"id": run_id, "created": int(time.time()), "model": model}

    def whole(self, text: str, finish: str, numbers: dict[str, Any]) -> dict[str, Any]:
        """An answer at once."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        more = {"object": "chat.completion", "choices": [choice], "usage": numbers}
        return self._about | more

    def piece(self, delta: dict[str, str], finish: str | None = None) -> bytes:
        """A piece of an answer, as a server-sent event."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return self._event(choices=[choice])

    def last(self, numbers: dict[str, Any]) -> bytes:
        """The numbers of a stream, after its last piece."""
        return self._event(choices=[], usage=numbers)

    def _event(self, **more: Any) -> bytes:
        return sse(self._about | {"object": "chat.completion.chunk"} | more)


def sse(data: Any) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data)}\n\n".encode()


DONE = b"data: [DONE]\n\n"
