"""The embedded store: a slab of slots and an index beside it.

``store`` moves blocks and answers; ``opening`` makes, checks and shares what
lies at an address, with ``planning`` for what it shall look like and
``place`` for the directory; ``slab`` and ``index`` are its two files, the
second with ``records`` for rows, ``environment`` for LMDB and ``audit`` for
contradictions; ``ticks`` is the order of eviction, ``owners`` who is alive,
``address`` the URL and ``filesystem`` what the operating system says.
"""

from __future__ import annotations

from akv.store.local.address import LocalAddress, default_url
from akv.store.local.store import LocalStore

__all__ = ("LocalAddress", "LocalStore", "default_url")
