"""Which client the store uses now, and when it takes another one.

A call on a closed client crashes the process, so each call says that it uses
the client, and a client is closed by the last one out. A client of 0.3.13
finds its way back by itself: after SIGKILL and a restart of the master its
segment is mounted again within 1.2 s, after 60 s of SIGSTOP at once. What it
does not get over are transfers: more than 2,048 queued at one peer can leave
it with -800 for every key, for good; and after 60 s it gives up on a transfer
without ending it. In both cases a new client takes over, with all memory
registered, and the old one is closed first, which ends what it left behind.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from akv.core.errors import AkvError, StoreError, StoreUnavailableError
from akv.store.mooncake.client import Client, master_answers
from akv.store.mooncake.codes import is_settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from akv.store.mooncake.address import MooncakeAddress
    from akv.store.mooncake.memory import Memory

__all__ = ("Link",)

_TRANSFER_FAIL = -800
_BROKEN_AFTER = 20.0
"""Seconds of nothing but failed transfers: longer than a dead peer is listed (10)."""
_BETWEEN_CLIENTS = 60.0
_BETWEEN_TRIES = 1.0


class Link:
    """Hands out the client. Any thread; made by :meth:`open`.

    :param open_client: how a client is made; tests give another one
    """

    def __init__(
        self,
        address: MooncakeAddress,
        memory: Memory,
        *,
        open_client: Callable[[], Client],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._memory = memory
        self._open_client = open_client
        self._clock = clock
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._client: Client | None = None
        self._uses = 0
        self._fenced: set[int] = set()
        self._replacing = False
        self._closed = False
        self._failing_since: float | None = None
        self._last_try = -_BETWEEN_CLIENTS
        self._last_client = -_BETWEEN_CLIENTS
        self.clients = 0
        """Clients that have been set up so far."""

    def __repr__(self) -> str:
        state = "closed" if self._closed else "up" if self._client else "down"
        return f"<Link {state} uses={self._uses} clients={self.clients}>"

    @classmethod
    def open(
        cls, address: MooncakeAddress, memory: Memory, *, lend_memory: bool
    ) -> Link:
        """Set up the first client.

        :raises StoreUnavailableError: that cannot be done
        """
        link = cls(
            address,
            memory,
            open_client=lambda: Client.open(address, lend_memory=lend_memory),
        )
        link._set_up()
        return link

    @contextmanager
    def use(self) -> Iterator[Client]:
        """The client, which is not closed meanwhile.

        :raises StoreUnavailableError: there is none now; comes at once but
            for the one call in a second that tries to set one up
        :raises StoreError: the store is closed
        """
        self._check_process()
        with self._changed:
            self.check_open()
            client = self._client if not self._replacing else None
            trying = client is None and self._may_try()
            if client is not None or trying:
                self._uses += 1
        if client is None and not trying:
            msg = f"{self._address.url}: a new client is being set up"
            raise StoreUnavailableError(msg)
        try:
            yield self._set_up() if client is None else client
        finally:
            self._leave()

    def transferred(self, client: Client, codes: Sequence[int], seconds: float) -> None:
        """What came of a transfer, told by the one who uses ``client`` for it.

        Returns when nothing of it can touch memory any more: mostly at once,
        after a transfer that was given up on not before the client is closed.
        """
        if not all(is_settled(code, seconds) for code in codes):
            self._replace(client)
            return
        failed = [code for code in codes if code == _TRANSFER_FAIL]
        with self._changed:
            now = self._clock()
            if len(failed) < sum(code >= 0 or code == _TRANSFER_FAIL for code in codes):
                self._failing_since = None
            elif failed and self._failing_since is None:
                self._failing_since = now
            broken = (
                self._failing_since is not None
                and now - self._failing_since > _BROKEN_AFTER
                and now - self._last_client > _BETWEEN_CLIENTS
            )
        if broken:
            self._replace(client)

    def close(self, farewell: Callable[[Client], object]) -> None:
        """Close the client, or let the last call that uses it do so.

        :param farewell: what to do with it before, if the master answers
        """
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._farewell = farewell
            last = self._uses == 0
        if last:
            self._shut()

    def _leave(self) -> None:
        with self._changed:
            self._uses -= 1
            last = self._closed and self._uses == 0
            self._changed.notify_all()
        if last:
            self._shut()

    def _shut(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        self._memory.detach()
        if not master_answers(*self._address.master):
            client.abandon()
            return
        with suppress(StoreError):
            self._farewell(client)
        client.close()

    def _may_try(self) -> bool:
        now = self._clock()
        if self._replacing or now - self._last_try < _BETWEEN_TRIES:
            return False
        self._last_try = now
        self._replacing = True
        return True

    def _set_up(self) -> Client:
        try:
            client = self._open_client()
            try:
                self._memory.attach(client)
            except StoreError:
                client.close()
                raise
            with self._changed:
                self._client = client
                self.clients += 1
                self._failing_since = None
                self._last_client = self._clock()
            return client
        finally:
            with self._changed:
                self._replacing = False
                self._changed.notify_all()

    def _replace(self, client: Client) -> None:
        """Close ``client``, whose callers all wait or have left, and take another."""
        me = threading.get_ident()
        with self._changed:
            self._fenced.add(me)
            self._changed.notify_all()
            first = self._client is client and not self._replacing
            if first:
                self._replacing = True
                self._changed.wait_for(lambda: self._uses <= len(self._fenced))
            else:
                self._changed.wait_for(lambda: self._client is not client)
        try:
            if first:
                self._take_another(client)
        finally:
            with self._changed:
                self._fenced.discard(me)

    def _take_another(self, client: Client) -> None:
        while not master_answers(*self._address.master):
            # Closing without a master would keep the GIL for seconds.
            time.sleep(_BETWEEN_TRIES)
        self._memory.detach()
        client.close()
        with self._changed:
            self._client = None
        # If it fails, a later call tries again.
        with suppress(StoreUnavailableError):
            self._set_up()

    def check_open(self) -> None:
        """Raise :class:`StoreError` if the store is closed."""
        if self._closed:
            msg = f"{self._address.url} is closed"
            raise StoreError(msg)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            msg = (
                f"{self._address.url} was opened by the process that this one was "
                f"forked from; start it with spawn, or fork before opening"
            )
            raise AkvError(msg)
