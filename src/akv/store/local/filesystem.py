"""What the operating system says about the place where a store lies.

Shared memory or disk, how much room there is, which boot this is, and memory
that is really there before it is written to. Linux only, like vLLM. Called
while opening; populating runs without the GIL and takes seconds for some GiB.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

__all__ = (
    "PAGE",
    "available_memory",
    "boot_id",
    "free_bytes",
    "is_memory",
    "populate",
    "reserve",
)

PAGE = 4096

_TMPFS_MAGIC = 0x01021994
_RAMFS_MAGIC = 0x858458F6
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_STEP = 256 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def is_memory(path: Path) -> bool:
    """Whether ``path`` lies in shared memory, so that a boot empties it."""
    facts = ctypes.create_string_buffer(512)
    if _libc.statfs(os.fsencode(path), facts) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    kind = ctypes.c_ulong.from_buffer(facts).value
    return kind in (_TMPFS_MAGIC, _RAMFS_MAGIC)


def free_bytes(path: Path) -> int:
    """What this user can still write there."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def available_memory() -> int:
    """Memory that this container can still take, without swapping."""
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available
    if not limit.isdecimal():
        return available
    return min(available, max(0, int(limit) - used))


def boot_id() -> bytes:
    """Names the boot: what was only in the page cache is gone after it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return bytes(36)
    return boot.strip()[:36].ljust(36)


def reserve(descriptor: int, size: int) -> None:
    """Take the blocks of the first ``size`` bytes, or raise ``OSError``.

    A sparse file would be a SIGBUS at the first write to a full filesystem.
    In steps, so that a Ctrl-C is heard.
    """
    for start in range(0, size, _STEP):
        os.posix_fallocate(descriptor, start, min(_STEP, size - start))


def populate(address: int, size: int, *, write: bool) -> bool:
    """Map the pages now; False where the kernel is too old to be asked.

    The first touch of a fresh page costs six times its copy.
    """
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    for start in range(0, size, _STEP):
        length = min(_STEP, size - start)
        while True:
            done = _libc.madvise(
                ctypes.c_void_p(address + start), ctypes.c_size_t(length), advice
            )
            if done == 0:
                break
            number = ctypes.get_errno()
            if number == errno.EINVAL:
                return False
            if number not in (errno.EINTR, errno.EAGAIN):
                raise OSError(number, os.strerror(number))
    return True
