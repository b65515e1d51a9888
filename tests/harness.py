"""A small engine memory, with bytes that tell where they belong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import akv
from akv.core.keys import KeySpace, block_hashes, fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.events import Event

LAYERS = 3
PAGE = 256
BLOCKS = 32
BLOCK = 16
OBJECT = LAYERS * PAGE
SPACE = KeySpace(namespace="tests", fingerprint=fingerprint({"model": "tests"})).prefix


@dataclass
class Recorder:
    """Keeps every event."""

    events: list[Event]

    def on(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def names(self) -> list[str]:
        """What happened, in order."""
        return [event.name for event in self.events]


class Memory:
    """KV memory of a pretended engine: ``LAYERS`` layers of ``BLOCKS`` blocks."""

    def __init__(self) -> None:
        self.layers = [
            np.full(BLOCKS * PAGE, 0xA5, dtype=np.uint8) for _ in range(LAYERS)
        ]
        self.geometry = akv.Geometry(
            num_blocks=BLOCKS,
            hash_unit=BLOCK,
            groups=(
                akv.Group(
                    block_size=BLOCK,
                    regions=tuple(
                        akv.Region(
                            name=f"layer {n}",
                            memory=n,
                            offset=0,
                            stride=PAGE,
                            size=PAGE,
                        )
                        for n in range(LAYERS)
                    ),
                ),
            ),
        )
        self.device = akv.HostDevice(self.geometry, self.layers)

    def block(self, number: int) -> npt.NDArray[np.uint8]:
        """All bytes of one block, as a copy."""
        return np.concatenate(
            [layer[number * PAGE : (number + 1) * PAGE] for layer in self.layers]
        )

    def write(self, number: int, block_hash: bytes) -> None:
        """Compute a block: its bytes follow from its hash."""
        content = expected(block_hash)
        for n, layer in enumerate(self.layers):
            layer[number * PAGE : (number + 1) * PAGE] = content[
                n * PAGE : (n + 1) * PAGE
            ]

    def holds(self, number: int, block_hash: bytes) -> bool:
        """Whether a block holds what belongs to ``block_hash``."""
        return bool((self.block(number) == expected(block_hash)).all())

    def untouched(self, number: int) -> bool:
        """Whether nobody ever wrote to a block."""
        return bool((self.block(number) == 0xA5).all())


def expected(block_hash: bytes) -> npt.NDArray[np.uint8]:
    """The bytes of the block with this hash."""
    seed = int.from_bytes(block_hash[:8], "little")
    return np.random.default_rng(seed).integers(0, 255, OBJECT, dtype=np.uint8)


def prompt(seed: int, blocks: int) -> tuple[bytes, ...]:
    """The block hashes of some prompt."""
    return block_hashes([seed, *range(blocks * BLOCK - 1)], BLOCK)


def span(hashes: Sequence[bytes], ids: Sequence[int]) -> akv.Span:
    """A span from block 0 on."""
    return akv.Span(first_block=0, hashes=tuple(hashes), block_ids=tuple(ids))


def load_spec(
    hashes: Sequence[bytes], ids: Sequence[int], *, load_id: int = 1, name: str = "r"
) -> akv.LoadSpec:
    """A load of these blocks."""
    return akv.LoadSpec(
        request_id=name,
        space=SPACE,
        load_id=load_id,
        local=0,
        usable=BLOCK * len(ids),
        spans=(span(hashes, ids),),
    )


def save_spec(
    hashes: Sequence[bytes], ids: Sequence[int], *, job_id: int = 1, chain: int = 1
) -> akv.SaveSpec:
    """A save of these blocks."""
    return akv.SaveSpec(
        request_id="r",
        space=SPACE,
        job_id=job_id,
        chain=chain,
        spans=(span(hashes, ids),),
    )


def lookup_spec(hashes: Sequence[bytes], *, first_block: int = 0) -> akv.LookupSpec:
    """A lookup of this prompt."""
    return akv.LookupSpec(
        request_id="r",
        space=SPACE,
        hashes=tuple(hashes),
        askable_blocks=len(hashes),
        first_block=first_block,
    )


def descriptors() -> int:
    """Open files of this process, network sockets not counted: akv has none.

    Other tests may have left a client of a network store behind, which tries
    to reach its dead master again and again.
    """
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    local = {line.split()[6] for line in lines}
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
        except FileNotFoundError:
            continue  # closed meanwhile: the listing's own
        inode = target.removeprefix("socket:[").removesuffix("]")
        count += not target.startswith("socket:") or inode in local
    return count
