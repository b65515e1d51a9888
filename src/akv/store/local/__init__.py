"""The embedded store: a slab of slots and an index beside it.

``store`` moves blocks and answers, ``opening`` makes, checks and shares what
lies at an address, ``index`` and ``slab`` are the two files, ``ticks`` the
order of eviction, ``owners`` who is alive, ``address`` the URL, and
``filesystem`` what the operating system says.
"""

from __future__ import annotations

from akv.store.local.address import LocalAddress, default_url
from akv.store.local.store import LocalStore

__all__ = ("LocalAddress", "LocalStore", "default_url")
