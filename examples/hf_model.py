"""A Hugging Face model whose KV cache can begin with blocks that were not computed.

The torch side of `asgi_server.py`. The caches of all answers lie in one tensor, the
pool, and akv loads and saves its blocks in place. All of it is on CPUs, where work has
ended when the call returns: akv needs no marks.
"""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

import akv
from akv.device.layout import build_geometry, open_device
from akv.identity import weights_identity

if TYPE_CHECKING:
    import anyio

BLOCK = 16  # tokens of a block
CHUNK = 256  # tokens of a prompt that are computed before others have their turn


@dataclass(kw_only=True)
class Run:
    """One answer while it is made, in blocks of the pool that nobody else has."""

    blocks: range
    number: int = field(default_factory=itertools.count(1).__next__)
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    prompt: list[int] = field(default_factory=list)
    hashes: tuple[bytes, ...] = ()  # of the prompt's full blocks
    cached: int = 0  # tokens of the prompt that were loaded
    copied: anyio.Event | None = None  # of a save: set when it has read the blocks
    cache: Any = None
    temperature: float = 1.0
    most: int = 0  # tokens that the answer may have
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None

    def span(self, first: int, end: int) -> akv.Span:
        """The prompt's blocks from ``first`` to before ``end``, and where they lie."""
        ids = tuple(self.blocks[first:end])
        return akv.Span(first_block=first, hashes=self.hashes[first:end], block_ids=ids)


class PoolLayer(DynamicLayer):  # type: ignore[misc]  # Any, as all of transformers
    """One layer of a run's cache, in place; ``room`` is (2, 1, head, token, width)."""

    def __init__(self, room: torch.Tensor, loaded: int) -> None:
        super().__init__()
        self.room, self.is_initialized = room, True
        self.keys, self.values = room[..., :loaded, :]

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> Any:
        """Put new tokens behind those that are there; all of them, as views."""
        start = self.get_seq_length()
        end = start + keys.shape[-2]
        self.room[..., start:end, :] = torch.stack((keys, values))
        self.keys, self.values = self.room[..., :end, :]
        return self.keys, self.values


class Model:
    """The weights, and the pool. `encode` and `step` take long: one at a time."""

    def __init__(self, path: str, *, slots: int, context: int) -> None:
        self.name = Path(path).resolve().name
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.net: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = self.net.eval().config
        if any(layer.is_sliding for layer in DynamicCache(config=config).layers):
            raise SystemExit(f"{path}: models with sliding windows are not served here")
        self.ends = {config.eos_token_id, self.tokenizer.eos_token_id}
        size = min(context, config.max_position_embeddings) // BLOCK
        self.context = size * BLOCK
        self.slots = [range(n * size, (n + 1) * size) for n in range(slots)]
        heads = (config.num_hidden_layers, 2, 1, config.num_key_value_heads)
        self.pool = torch.zeros(*heads, slots * self.context, config.head_dim)
        # To akv all is one layer with many heads, in each of which a block is one run.
        layer = self.pool.view(-1, slots * size, BLOCK, config.head_dim).transpose(0, 1)
        sizes = {"num_blocks": len(layer), "block_size": BLOCK, "hash_unit": BLOCK}
        self.geometry, memory = build_geometry({"pool": layer}, **sizes)
        self.device = open_device(self.geometry, memory)
        # All that gives the bytes their meaning: the weights, and the order above.
        layout = ["layer, key or value, head, token", *heads, BLOCK, "float32"]
        weights = weights_identity(path)
        self.identity = akv.fingerprint({"weights": weights, "layout": layout})

    def encode(self, messages: list[Any]) -> Any:
        """The tokens of a conversation, up to where the answer begins."""
        chat = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return chat["input_ids"]

    def begin(self, run: Run, loaded: int) -> None:
        """Make the run's cache of its blocks, ``loaded`` of which are filled."""
        run.cached = loaded * BLOCK
        first = run.blocks.start * BLOCK
        room = self.pool[..., first : first + self.context, :]
        run.cache = Cache([PoolLayer(layer, run.cached) for layer in room])

    @torch.inference_mode()
    def step(self, run: Run) -> None:
        """Compute a chunk of the prompt, or one more token of the answer."""
        known = run.cache.get_seq_length()
        tokens = [*run.prompt, *run.tokens][known : known + CHUNK]
        ids = torch.tensor([tokens])
        found = self.net(ids, past_key_values=run.cache, logits_to_keep=1)
        if known + len(tokens) < len(run.prompt):
            return
        logits = found.logits[0, -1]
        chosen = logits.argmax()
        if run.temperature:
            chosen = torch.multinomial((logits / run.temperature).softmax(-1), 1)
        run.tokens.append(int(chosen))
        if run.tokens[-1] in self.ends:
            run.finish = "stop"
        elif len(run.tokens) == run.most:
            run.finish = "length"
        text = self.tokenizer.decode(run.tokens, skip_special_tokens=True)
        if run.finish or not text.endswith("\ufffd"):  # half a character may follow
            run.text = text
