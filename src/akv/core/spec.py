"""What one request wants looked up, loaded or saved, as frozen values.

Specs are made by whoever schedules (the vLLM bridge, an embedder), cross to
the process that holds the KV memory by pickling, and are never changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from akv.core.errors import PlanError

__all__ = ("LoadSpec", "LookupSpec", "SaveSpec", "Span")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of consecutive blocks of one group.

    ``hashes[i]`` names what belongs into block ``block_ids[i]``;
    ``first_block`` is the place of the first one in its request's prefix.
    """

    first_block: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    group: int = 0

    def __post_init__(self) -> None:
        if len(self.hashes) != len(self.block_ids):
            raise PlanError(
                f"{len(self.hashes)} hashes for {len(self.block_ids)} blocks"
            )
        _not_negative("first_block", self.first_block)

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSpec:
    """Which prefix of these blocks is in the store?

    :ivar space: prefix of the keys (``KeySpace.prefix``)
    :ivar askable_blocks: blocks of the longest prefix that could be used
    :ivar first_block: blocks before this one are not asked for
    :ivar hashes: the request's block hashes, from block 0 on
    """

    request_id: str
    space: bytes
    hashes: tuple[bytes, ...]
    askable_blocks: int
    first_block: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        _not_negative("first_block", self.first_block)
        _not_negative("askable_blocks", self.askable_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """Load tokens ``[local, usable)`` of one request: whole blocks only.

    :ivar space: prefix of the keys (``KeySpace.prefix``)
    :ivar load_id: unique in this engine, as request ids may come back
    """

    request_id: str
    space: bytes
    load_id: int
    local: int
    usable: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        _not_negative("local", self.local)
        _not_negative("usable", self.usable)

    def __len__(self) -> int:
        return sum(len(span) for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSpec:
    """Save computed, full, hashed blocks of one request.

    :ivar space: prefix of the keys (``KeySpace.prefix``)
    :ivar job_id: unique in this engine; reported once when the blocks of the
        engine are no longer needed
    :ivar chain: the same for all saves of one life of a request: when a block
        of a chain was dropped, no later block of it is saved
    """

    request_id: str
    space: bytes
    job_id: int
    chain: int
    spans: tuple[Span, ...]

    def __len__(self) -> int:
        return sum(len(span) for span in self.spans)


def _not_negative(name: str, value: int) -> None:
    if value < 0:
        raise PlanError(f"{name} is {value}: it counts from 0")
