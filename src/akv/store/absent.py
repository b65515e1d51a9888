"""What stands in for a store that could not be opened: a cache of nothing.

With ``on_store_unavailable = degrade`` the host goes on without a cache:
every lookup misses and every put finds no room, in no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from akv.core.errors import StoreUnavailableError
from akv.store.base import Buffer, Outcome, Status, StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey

__all__ = ("AbsentStore",)


class AbsentStore:
    """Answers for a store that is not there."""

    lease = 0.0

    def __init__(self, url: str) -> None:
        self.url = url

    def exists(
        self,
        keys: Sequence[BlockKey],
        *,
        promise: bool = False,  # noqa: ARG002
    ) -> list[Outcome]:
        """MISS for every key."""
        return [Status.MISS] * len(keys)

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """MISS for every key; the buffers are not touched."""
        del buffers
        return [Status.MISS] * len(keys)

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """NO_ROOM for every key."""
        del buffers
        return [Status.NO_ROOM] * len(keys)

    def remove(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """MISS for every key."""
        return [Status.MISS] * len(keys)

    def clear(self, prefix: bytes) -> int:
        """Nothing to remove."""
        del prefix
        return 0

    def generation(self, scope: bytes) -> int:
        """No generation was ever raised."""
        del scope
        return 0

    def raise_generation(self, scope: bytes) -> int:  # noqa: ARG002
        """Not confirmed: others may still find what an absent store holds."""
        raise StoreUnavailableError(f"{self.url} could not be opened")

    def statistics(self) -> StoreStatistics:
        """All zero."""
        return StoreStatistics(url=self.url, objects=0, bytes_used=0, bytes_capacity=0)

    def close(self) -> None:
        """Nothing to let go of."""
