"""A session in the place of an engine, which writes an event log."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import akv
from akv.core.keys import fingerprint
from akv.sinks.jsonl import JsonLines
from harness import OBJECT, Memory, prompt, span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from akv.store.base import BlockStore

__all__ = ("HASHES", "Serving", "serving")

HASHES = prompt(7, 10)


class Serving:
    """A session in the place of an engine: prompts in, blocks out and in."""

    def __init__(self, session: akv.Session, memory: Memory, space: bytes) -> None:
        self.session = session
        self._memory = memory
        self._space = space
        self._number = 0

    async def lookup(self, name: str, hashes: Sequence[bytes]) -> int:
        """Look a prompt up."""
        spec = akv.LookupSpec(
            request_id=name,
            space=self._space,
            hashes=tuple(hashes),
            askable_blocks=len(hashes),
        )
        return await self.session.lookup(spec)

    async def load(self, name: str, hashes: Sequence[bytes]) -> akv.LoadOutcome:
        """Load all of these blocks."""
        self._number += 1
        spec = akv.LoadSpec(
            request_id=name,
            space=self._space,
            load_id=self._number,
            local=0,
            usable=16 * len(hashes),
            spans=(span(hashes, range(16, 16 + len(hashes))),),
        )
        return await self.session.load(spec)

    async def save(self, name: str, hashes: Sequence[bytes]) -> akv.SaveOutcome:
        """Compute and save all of these blocks."""
        self._number += 1
        for number, block_hash in enumerate(hashes):
            self._memory.write(number, block_hash)
        spec = akv.SaveSpec(
            request_id=name,
            space=self._space,
            job_id=self._number,
            chain=self._number,
            spans=(span(hashes, range(len(hashes))),),
        )
        return await self.session.save(spec)


@asynccontextmanager
async def serving(
    log: Path, store: BlockStore, *, model: str = "m", namespace: str = "n"
) -> AsyncIterator[Serving]:
    """A session of a model on ``store`` that writes to ``log``."""
    memory = Memory()
    config = akv.Config(
        store="memory:", max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT
    )
    sink = JsonLines(str(log), role="session")
    async with akv.open_session(
        config, memory.geometry, memory.device, store=store, observer=sink
    ) as session:
        space = await session.key_space(namespace, fingerprint({"model": model}))
        yield Serving(session, memory, space.prefix)
    sink.close()
