"""Places for stores: a fresh path in shared memory, and a very small filesystem."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store.nursery import Nursery

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A path in shared memory where nothing is yet."""
    directory = Path("/dev/shm") / f"akv-test-{uuid.uuid4().hex}"
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def tiny_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB in memory; only root can mount one."""
    place = tmp_path / "tiny"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small filesystem")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"a small filesystem cannot be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where children that get killed come from."""
    with Nursery() as nursery:
        yield nursery
