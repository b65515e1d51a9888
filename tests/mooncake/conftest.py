"""A real master for each test that asks for one; skipped where Mooncake is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from mooncake_master import Master, make_master

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def master() -> Iterator[Master]:
    """A master of this test's own."""
    with make_master() as master:
        yield master


@pytest.fixture
def hasty_master() -> Iterator[Master]:
    """A master whose leases end after 0.2 s, so that nearly all can be evicted."""
    with make_master("--default_kv_lease_ttl=200") as master:
        yield master


@pytest.fixture(scope="class")
def class_master() -> Iterator[Master]:
    """A master for all tests of a class, whose pool is empty between them.

    The objects of a test go with the segment of its store.
    """
    with make_master() as master:
        yield master
