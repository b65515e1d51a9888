"""Whether the tables of an index agree: each slot in one place, each key whole.

Pure: it is given the tables as they were in one view, and says in words what
contradicts itself. Used when a store is opened, by tests and by the command
line.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from akv.store.local.records import Record, slot_number

__all__ = ("Tables",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """All of an index that speaks of slots, as packed."""

    high: int
    """Slots below were handed out at least once."""
    slots: int
    slot_bytes: int
    records: dict[bytes, bytes]
    ready: dict[bytes, bytes]
    claims: dict[bytes, bytes]
    free: dict[bytes, bytes]

    def problems(self) -> list[str]:
        """What is wrong, in words; nothing if all is well."""
        named = {"ready": self.ready, "claims": self.claims, "free": self.free}
        if any(len(slot) != 4 for table in named.values() for slot in table):
            return ["a table has a key that is no slot number"]
        found: list[str] = []
        if self.high > self.slots:
            found.append(f"{self.high} slots were handed out of {self.slots}")
        for first, second in itertools.combinations(named, 2):
            found += [
                f"slot {slot_number(slot)} is in {first} and {second}"
                for slot in named[first].keys() & named[second].keys()
            ]
        known = {slot_number(slot) for table in named.values() for slot in table}
        handed_out = set(range(min(self.high, self.slots)))
        found += [f"slot {slot} is lost" for slot in sorted(handed_out - known)]
        found += [f"slot {slot} is none yet" for slot in sorted(known - handed_out)]
        return found + self._problems_of_keys()

    def _problems_of_keys(self) -> list[str]:
        found: list[str] = []
        holders = {slot_number(slot): key for slot, key in self.ready.items()}
        for key, packed in self.records.items():
            try:
                record = Record.unpack(packed)
            except ValueError:
                found.append(f"the record of key {key.hex()} is damaged")
                continue
            if record.length > self.slot_bytes:
                found.append(f"key {key.hex()} is longer than a slot")
            if holders.get(record.slot) != key:
                found.append(f"key {key.hex()} is not what slot {record.slot} holds")
        found += [
            f"slot {slot} holds key {key.hex()}, which has no record"
            for slot, key in holders.items()
            if key not in self.records
        ]
        return found
