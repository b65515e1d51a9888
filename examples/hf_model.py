"""A Hugging Face model whose KV cache can begin with blocks that were not computed.

The torch side of `asgi_server.py`: a pool of KV blocks that akv can load into and save
from, and the two copies between the pool and the `DynamicCache` of one answer.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import akv
from akv.device.layout import build_geometry, open_device
from akv.identity import weights_identity
from openai_api import ApiError, usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import anyio

    from openai_api import Ask

BLOCK = 16  # tokens of a block


@dataclass(kw_only=True)
class Run:
    """One answer while it is made: the model's cache, and the tokens so far."""

    ask: Ask
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    since: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    most: int = 0  # tokens that the answer may have
    blocks: range = range(0)  # of the pool
    copied: anyio.Event | None = None  # set when no save reads them any more
    cache: Any = None
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None

    def passed(self, name: str) -> None:
        """Note how long this took, since what was noted last."""
        now = time.monotonic()
        self.seconds[name], self.since = now - self.since, now

    def usage(self) -> dict[str, Any]:
        """The tokens so far."""
        return usage(len(self.prompt), len(self.tokens), self.cached)


class Model:
    """The torch side. Its methods take long and run in a thread, one at a time."""

    def __init__(self, path: str, *, slots: int, context: int) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.net: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = self.net.eval().config
        if any(layer.is_sliding for layer in DynamicCache(config=config).layers):
            raise SystemExit(f"{path}: models with sliding windows are not served here")
        self.context = min(context, config.max_position_embeddings)
        self.ends = {config.eos_token_id, self.tokenizer.eos_token_id}
        self.slots = slots
        self.slot_blocks = self.context // BLOCK
        # A block of all layers is one run of bytes: one copy for akv.
        self.shape = (config.num_hidden_layers, 2, config.num_key_value_heads)
        self.width = config.head_dim
        rows = self.shape[0] * self.shape[1] * self.shape[2]
        self.pool = torch.zeros(slots * self.slot_blocks, rows, BLOCK, self.width)
        self.geometry, memory = build_geometry(
            {"all layers": self.pool},
            num_blocks=len(self.pool),
            block_size=BLOCK,
            hash_unit=BLOCK,
        )
        self.device = open_device(self.geometry, memory)
        # All that gives the bytes their meaning: the weights, and the order above.
        layout = [*self.shape, BLOCK, "layer, key or value, head, token", "float32"]
        weights = weights_identity(path)
        self.identity = akv.fingerprint({"weights": weights, "layout": layout})

    def begin(self, run: Run) -> None:
        """Find the prompt's tokens, and room for them and for the answer."""
        ask = run.ask
        text = self.tokenizer.apply_chat_template(
            [turn.model_dump() for turn in ask.messages],
            add_generation_prompt=True,
            tokenize=False,
        )
        run.prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        room = self.context - len(run.prompt)
        most = ask.max_completion_tokens or ask.max_tokens
        if room < (most or 1):
            wanted = f"{len(run.prompt)} tokens of prompt and {most or 1} of answer"
            message = f"{wanted} are more than the {self.context} that fit"
            raise ApiError(400, message, "messages")
        run.most = most or room

    @torch.inference_mode()
    def fill(self, run: Run, blocks: Sequence[int]) -> None:
        """Begin the model's cache with these blocks of the pool."""
        run.cache = DynamicCache(config=self.net.config)
        run.cached = len(blocks) * BLOCK
        if blocks:
            kv = self.pool[list(blocks)].view(-1, *self.shape, BLOCK, self.width)
            kv = kv.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
            for layer, (keys, values) in enumerate(kv):
                run.cache.update(keys[None], values[None], layer)

    @torch.inference_mode()
    def keep(self, run: Run, blocks: Sequence[int]) -> Any:
        """Copy what was computed into the pool; what akv's own copy waits for."""
        part = slice(run.cached, run.cached + len(blocks) * BLOCK)
        layers = [torch.cat((k[:, :, part], v[:, :, part])) for k, v, _ in run.cache]
        kv = torch.stack(layers).view(*self.shape, len(blocks), BLOCK, self.width)
        self.pool[list(blocks)] = kv.permute(3, 0, 1, 2, 4, 5).flatten(1, 3)
        return self.device.mark()

    @torch.inference_mode()
    def compute(self, run: Run, tokens: Sequence[int], *, choose: bool = True) -> None:
        """Put tokens through the model, and choose the one that follows them."""
        ids = torch.tensor([tokens])
        found = self.net(input_ids=ids, past_key_values=run.cache, logits_to_keep=1)
        if not choose:
            return
        logits = found.logits[0, -1]
        if run.ask.temperature:
            chances = (logits / run.ask.temperature).softmax(-1)
            token = int(torch.multinomial(chances, 1))
        else:
            token = int(logits.argmax())
        run.tokens.append(token)
        if token in self.ends:
            run.finish = "stop"
        elif len(run.tokens) == run.most:
            run.finish = "length"
        text = self.tokenizer.decode(run.tokens, skip_special_tokens=True)
        if run.finish or not text.endswith("\ufffd"):  # half a character may follow
            run.text = text
