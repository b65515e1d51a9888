"""Mooncake's return codes by name, and what each means for the caller.

Mooncake answers each key of a batch with a number: zero or a count of bytes
when it went well, else one of these. The table is that of 0.3.13; a number
that is not in it is a failure that carries the number. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from akv.store.base import Failure, Outcome, Status

__all__ = (
    "ALREADY_EXISTS",
    "CODES",
    "Code",
    "describe",
    "is_settled",
    "is_unreachable",
    "name_of",
    "outcome_of",
)

ALREADY_EXISTS = -705


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One return code.

    :ivar meaning: what the caller should make of it, in a few words
    :ivar status: the outcome of the key; None makes it a :class:`Failure`
    :ivar settled: nothing is under way on the key's memory any more, however
        long the call took
    """

    number: int
    name: str
    meaning: str
    status: Status | None = None
    settled: bool = False


_ALL = (
    Code(number=-1, name="INTERNAL_ERROR", meaning="Mooncake failed inside"),
    Code(number=-10, name="BUFFER_OVERFLOW", meaning="a buffer was too small"),
    Code(number=-100, name="SHARD_INDEX_OUT_OF_RANGE", meaning="a bad shard index"),
    Code(
        number=-101,
        name="SEGMENT_NOT_FOUND",
        meaning="the segment that held it is gone",
    ),
    Code(number=-102, name="SEGMENT_ALREADY_EXISTS", meaning="the segment is known"),
    Code(
        number=-103,
        name="CLIENT_NOT_FOUND",
        meaning="the master has dropped this client; it will register again",
    ),
    Code(
        number=-200,
        name="NO_AVAILABLE_HANDLE",
        meaning="the pool is full and nothing could be evicted",
        status=Status.NO_ROOM,
        settled=True,
    ),
    Code(number=-300, name="INVALID_VERSION", meaning="versions do not fit"),
    Code(number=-400, name="INVALID_KEY", meaning="the key is refused"),
    Code(number=-500, name="WRITE_FAIL", meaning="a write failed"),
    Code(
        number=-600,
        name="INVALID_PARAMS",
        meaning="refused: the object is longer than its buffer, or has no bytes",
        settled=True,
    ),
    Code(
        number=-601,
        name="ILLEGAL_CLIENT",
        meaning="the master does not let this client do it",
        settled=True,
    ),
    Code(number=-700, name="INVALID_WRITE", meaning="the write is not allowed"),
    Code(number=-701, name="INVALID_READ", meaning="the read is not allowed"),
    Code(number=-702, name="INVALID_REPLICA", meaning="the replica is unusable"),
    # Being written: may be there the next moment, so it is not remembered.
    Code(
        number=-703,
        name="REPLICA_IS_NOT_READY",
        meaning="somebody has begun to write it and has not ended",
        status=Status.MISS,
        settled=True,
    ),
    Code(
        number=-704,
        name="OBJECT_NOT_FOUND",
        meaning="not there",
        status=Status.MISS,
        settled=True,
    ),
    Code(
        number=ALREADY_EXISTS,
        name="OBJECT_ALREADY_EXISTS",
        meaning="there already",
        status=Status.EXISTS,
        settled=True,
    ),
    Code(
        number=-706,
        name="OBJECT_HAS_LEASE",
        meaning="a reader may be using it: not removed until its lease ends",
        settled=True,
    ),
    Code(
        number=-707,
        name="LEASE_EXPIRED",
        meaning="the lease ended before the bytes had come: they may be anybody's",
        settled=True,
    ),
    Code(
        number=-708,
        name="OBJECT_HAS_REPLICATION_TASK",
        meaning="it is being copied elsewhere",
    ),
    Code(
        number=-709, name="OBJECT_NO_REPLICATION_TASK", meaning="it is not being copied"
    ),
    Code(
        number=-710,
        name="REPLICA_NOT_FOUND",
        meaning="no replica of it is left",
        status=Status.MISS,
        settled=True,
    ),
    Code(number=-711, name="REPLICA_ALREADY_EXISTS", meaning="the replica is there"),
    Code(
        number=-712,
        name="REPLICA_IS_GONE",
        meaning="its replica was there and is gone",
        status=Status.MISS,
        settled=True,
    ),
    Code(
        number=-713,
        name="REPLICA_NOT_IN_LOCAL_MEMORY",
        meaning="its replica lies elsewhere",
    ),
    Code(number=-714, name="OBJECT_REPLICA_BUSY", meaning="its replica is in use"),
    Code(
        number=-800,
        name="TRANSFER_FAIL",
        meaning="the bytes did not come through",
    ),
    Code(
        number=-801,
        name="CHECKSUM_MISMATCH",
        meaning="the bytes that came are not those that were stored",
        settled=True,
    ),
    Code(
        number=-900,
        name="RPC_FAIL",
        meaning="the master cannot be reached",
        settled=True,
    ),
    Code(
        number=-901,
        name="RPC_TIMEOUT",
        meaning="the master did not answer in time",
        settled=True,
    ),
    Code(number=-1000, name="ETCD_OPERATION_ERROR", meaning="etcd failed"),
    Code(number=-1001, name="ETCD_KEY_NOT_EXIST", meaning="etcd lacks the key"),
    Code(number=-1002, name="ETCD_TRANSACTION_FAIL", meaning="etcd refused"),
    Code(number=-1003, name="ETCD_CTX_CANCELLED", meaning="etcd was cancelled"),
    Code(
        number=-1010,
        name="UNAVAILABLE_IN_CURRENT_STATUS",
        meaning="the master is not serving now",
        settled=True,
    ),
    Code(
        number=-1011,
        name="UNAVAILABLE_IN_CURRENT_MODE",
        meaning="the master does not do this in its mode",
        settled=True,
    ),
    Code(number=-1100, name="FILE_NOT_FOUND", meaning="its file is gone"),
    Code(number=-1101, name="FILE_OPEN_FAIL", meaning="its file cannot be opened"),
    Code(number=-1102, name="FILE_READ_FAIL", meaning="its file cannot be read"),
    Code(number=-1103, name="FILE_WRITE_FAIL", meaning="its file cannot be written"),
    Code(number=-1104, name="FILE_INVALID_BUFFER", meaning="a bad file buffer"),
    Code(number=-1105, name="FILE_LOCK_FAIL", meaning="its file cannot be locked"),
    Code(number=-1106, name="FILE_INVALID_HANDLE", meaning="a bad file handle"),
    Code(number=-1200, name="BUCKET_NOT_FOUND", meaning="its bucket is gone"),
    Code(number=-1201, name="BUCKET_ALREADY_EXISTS", meaning="the bucket is there"),
    Code(number=-1202, name="KEYS_EXCEED_BUCKET_LIMIT", meaning="the bucket is full"),
    Code(number=-1203, name="KEYS_ULTRA_LIMIT", meaning="too many keys"),
    Code(number=-1300, name="UNABLE_OFFLOAD", meaning="offloading is off"),
    Code(number=-1301, name="UNABLE_OFFLOADING", meaning="offloading failed"),
    Code(number=-1400, name="TASK_NOT_FOUND", meaning="the task is unknown"),
    Code(number=-1401, name="TASK_PENDING_LIMIT_EXCEEDED", meaning="too many tasks"),
    Code(
        number=-1700,
        name="TENANT_QUOTA_EXCEEDED",
        meaning="the tenant has used up its share of the pool",
        status=Status.NO_ROOM,
        settled=True,
    ),
    Code(
        number=-1701,
        name="TENANT_NOT_REGISTERED",
        meaning="the master does not know this tenant_id",
        settled=True,
    ),
)

CODES = {code.number: code for code in _ALL}
"""Every known code by its number."""

_UNREACHABLE = frozenset({-900, -901, -1010})

GIVES_UP_AFTER = 60.0
"""Seconds after which Mooncake stops to wait for a transfer, without ending it."""


def name_of(number: int) -> str:
    """The code's name."""
    code = CODES.get(number)
    return "unknown" if code is None else code.name


def describe(number: int) -> str:
    """The code's name and number, and its meaning."""
    code = CODES.get(number)
    if code is None:
        return f"unknown code {number}"
    return f"{code.name} ({number}): {code.meaning}"


def outcome_of(number: int) -> Outcome:
    """What a negative code comes to for its key."""
    code = CODES.get(number)
    if code is not None and code.status is not None:
        return code.status
    return Failure(describe(number), number, unasked=is_unreachable(number))


def is_unreachable(number: int) -> bool:
    """Whether the master could not be asked: the next keys will fare the same."""
    return number in _UNREACHABLE


def is_settled(number: int, seconds: float) -> bool:
    """Whether no transfer can still touch the memory of a key.

    A call gives up on a transfer after 60 s and leaves it under way; every
    result that comes sooner means that the transfer has ended.
    """
    if number >= 0 or seconds < GIVES_UP_AFTER - 1:
        return True
    code = CODES.get(number)
    return code is not None and code.settled
