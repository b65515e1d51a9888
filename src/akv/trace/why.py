"""Why a request was not served from the store, or not more of it.

Each finding is one sentence for a person who has never seen akv, with what can
be done about it. Found out from events alone: nothing here asks a store.
Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from akv.core.events import (
    READING_OFF,
    BreakerOpened,
    LoadDeclined,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from akv.core.events import KeySpaceUsed
    from akv.trace.story import Background, Load, Lookup, Save, Story

__all__ = ("Finding", "explain")

_ALONE = "left alone"
_NEWEST = 100
"""Saves of one block that are looked at: it is saved again when it was evicted."""

_WORTH = (
    "akv expects computing them to take less time than loading them, by what both "
    "have taken so far; load_or_compute=false loads all the same."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason, by a name for scripts, a sentence, and what to do about it.

    Names: ``miss``, ``evicted before the lookup``, ``still being saved``,
    ``dropped save``, ``other key space``, ``lookup deadline``, ``lookup failed``,
    ``store left alone``, ``not worth loading``, ``declined``, ``not looked up``,
    ``evicted before the load``, ``load deadline``, ``load failed``, ``cancelled``,
    ``waited for another request``, ``rounded``.
    """

    name: str
    text: str
    advice: str = ""


def explain(story: Story, background: Background) -> list[Finding]:
    """Every reason for which less than the whole prompt came from the store."""
    findings: list[Finding] = []
    for lookup in story.lookups:
        findings += _lookup(lookup, background)
    for joined in story.joined:
        findings.append(
            Finding(
                "waited for another request",
                f"It waited for the load of request {joined.leader}, which brought "
                f"the tokens {joined.local} to {joined.usable - 1} for both.",
            )
        )
    findings += _decision(story, background, told=bool(findings))
    for load in story.loads:
        findings += _load(load, background)
    findings += _rounding(story, background)
    return list(dict.fromkeys(findings))


def _lookup(lookup: Lookup, background: Background) -> list[Finding]:
    match lookup.outcome:
        case "answered" if lookup.found < lookup.asked:
            return [_miss(lookup, background)]
        case "expired":
            return [
                Finding(
                    "lookup deadline",
                    f"The store had not answered after {lookup.deadline:g} s "
                    f"(lookup_deadline); {lookup.found} of {lookup.asked} blocks were "
                    "known by then.",
                    "`akv bench` measures this machine's store; a far or busy one "
                    "needs a longer lookup_deadline.",
                )
            ]
        case "failed":
            return [
                Finding(
                    "lookup failed",
                    f"The store could not answer the lookup: {lookup.reason}.",
                    "`akv check` tries the store and says what to do.",
                )
            ]
        case "skipped":
            return [_left_alone(lookup.started, lookup.pid, "lookup", background)]
        case _:
            return []


def _left_alone(at: float, pid: int, what: str, background: Background) -> Finding:
    text = f"The store was being left alone (breaker open), so the {what} did not begin"
    outage = background.outage_at(at, pid)
    if outage is not None and isinstance(
        outage.event, BreakerOpened | StoreUnavailable
    ):
        text += (
            f": {outage.event.url} had failed {at - outage.at:.3g} s before, with "
            f"{outage.event.reason!r}"
        )
    return Finding(
        "store left alone",
        text + ".",
        "`akv check` tries the store and says what to do; akv itself tries it every "
        "two seconds.",
    )


def _miss(lookup: Lookup, background: Background) -> Finding:
    number = lookup.first_block + lookup.found
    size = background.block_tokens(lookup.pid)
    tokens = f" (tokens {number * size} to {(number + 1) * size - 1})" if size else ""
    lost = f"Block {number}{tokens} was not in the store"
    drops = background.drops.get(lookup.missed, [])
    stop = bisect_right(drops, lookup.started, key=lambda drop: drop.at)
    before = drops[max(0, stop - 1) : stop]
    saves = background.saves.get(lookup.missed, [])
    end = bisect_right(saves, lookup.started, key=lambda save: save.started)
    saves = saves[max(0, end - _NEWEST) : end]
    # Records that do not name a key space are of the lookup's.
    here = [save for save in saves if save.space in {lookup.space, ""}]
    elsewhere = [save for save in saves if save not in here]
    stored = [
        save
        for save in here
        if (save.stored or save.existed) and _ended(save, lookup.started)
    ]
    if before and not any(save.started > before[-1].at for save in stored):
        drop = before[-1]
        return Finding(
            "dropped save",
            f"{lost}: request {drop.request_id} computed it "
            f"{lookup.started - drop.at:.3g} s before, and its save was dropped "
            f"({drop.reason}).",
            "Saves are best effort. More staging (max_save_bytes), more pins "
            "(max_pinned_fraction), a longer save_deadline or a larger store lets "
            "more of them through.",
        )
    if stored:
        save = stored[-1]
        since = lookup.started - (save.ended or save.started)
        return Finding(
            "evicted before the lookup",
            f"{lost}: request {save.request_id} had saved it {since:.3g} s before, so "
            "it has been evicted since, or the store was emptied.",
            "A larger store keeps blocks for longer; `akv store stat` says how full "
            "it is.",
        )
    if here:
        return Finding(
            "still being saved",
            f"{lost}: the save of request {here[-1].request_id} that brings it had "
            "begun and not ended.",
            "The next request with this prompt finds it.",
        )
    if elsewhere:
        return _elsewhere(lost, lookup, elsewhere[-1], background)
    return Finding(
        "miss",
        f"{lost}, and no save in this log says it ever was"
        f"{_others(lookup, background)}.",
        "The first request with a prompt computes it; the next one finds it. Were "
        "there others with this prompt, give the logs of all engines: akv trace A B.",
    )


def _ended(save: Save, at: float) -> bool:
    return save.ended is not None and save.ended <= at


def _elsewhere(
    lost: str, lookup: Lookup, save: Save, background: Background
) -> Finding:
    mine = background.spaces.get(lookup.space)
    theirs = background.spaces.get(save.space)
    advice = "Blocks are shared only where every part of the key space is the same."
    if mine is None or theirs is None:
        how = f"in key space {save.space}, not in {lookup.space}"
    else:
        parts = _differences(mine, theirs)
        how = " and ".join(
            f"under another {name} ({there}, here {here})"
            for name, here, there in parts
        )
        if parts and parts[0][0] == "fingerprint":
            advice = (
                "Another fingerprint means that the bytes mean something else: other "
                "weights, dtype, block size, parallel shape or version of vLLM. Start "
                "the engines with the same ones, or take it as it is."
            )
        elif parts and parts[0][0] == "namespace":
            advice = "The setting namespace parts deployments on purpose."
        elif parts:
            advice = "The cache was reset in between (reset_prefix_cache)."
    return Finding(
        "other key space",
        f"{lost}: request {save.request_id} saved the same tokens {how}.",
        advice,
    )


def _differences(mine: KeySpaceUsed, theirs: KeySpaceUsed) -> list[tuple[str, ...]]:
    names = ("fingerprint", "namespace", "generation", "epoch")
    return [
        (name, str(getattr(mine, name)), str(getattr(theirs, name)))
        for name in names
        if getattr(mine, name) != getattr(theirs, name)
    ]


def _others(lookup: Lookup, background: Background) -> str:
    """Whether somebody saved anything in another key space by then."""
    spaces = [
        space
        for space, first in background.saved_spaces.items()
        if first <= lookup.started and space != lookup.space
    ]
    if not spaces or not lookup.space:
        return ""
    return (
        f"; other prompts were saved in {len(spaces)} other key "
        f"space{'s' if len(spaces) > 1 else ''}"
    )


def _decision(story: Story, background: Background, *, told: bool) -> list[Finding]:
    if not story.lookups and story.declined is None and story.promised is None:
        if story.loads:
            return []
        return [
            Finding(
                "not looked up",
                "This log has no lookup of the request: its scheduler wrote to another "
                "file, lookups are off, or the prompt has no whole block.",
                "Give the logs of all processes: akv trace A B --request ID.",
            )
        ]
    declined = story.declined
    if declined is None:
        return []
    if declined.reason.startswith("not worth loading"):
        text = f"{declined.hit} tokens were found and left: {declined.reason}."
        return [Finding("not worth loading", text, _WORTH)]
    outage = background.outage_at(story.began, story.pid)
    if declined.reason == "the store has not been there yet" and outage is not None:
        return [_left_alone(story.began, story.pid, "lookup", background)]
    if declined.reason.startswith("the load of ") and story.joined:
        return []
    if told and declined.reason.startswith("nothing found"):
        return []
    return [_declined(declined)]


def _declined(declined: LoadDeclined) -> Finding:
    advice = {
        "no whole block beyond what the engine has": "Only whole blocks below the "
        "last token of a prompt are loaded.",
        READING_OFF: "skip_reading_prefix_cache, "
        "enable_lookup=false or kv_role=kv_producer turn it off.",
        "the lookup was not answered in time": "The engine waits twice "
        "lookup_deadline for an answer.",
    }.get(declined.reason, "")
    return Finding("declined", f"No load was promised: {declined.reason}.", advice)


def _load(load: Load, background: Background) -> list[Finding]:
    if load.outcome == "cancelled":
        return [Finding("cancelled", "The load ended because its request did.")]
    if load.outcome != "failed":
        return []
    if _ALONE in load.reason:
        found = _left_alone(load.started, load.pid, "load", background)
        return [found]
    lost = f"{load.failed} of {load.objects} blocks were promised and did not land"
    if "load_deadline" in load.reason:
        return [
            Finding(
                "load deadline",
                f"{lost}: the load was {load.reason}; {load.wait:.3g} s of it were "
                f"spent on waiting for staging, {load.fetch:.3g} s in the store.",
                "Waiting for staging: raise max_load_bytes. In the store: `akv bench` "
                "measures it; a slow one needs a longer load_deadline.",
            )
        ]
    if load.reason == "lost after lookup":
        return [
            Finding(
                "evicted before the load",
                f"{lost}: the store had them at the lookup and not any more when they "
                "were fetched. They were evicted in between, or removed.",
                "The store is too small for what is saved beside this load: give it "
                "more capacity.",
            )
        ]
    return [
        Finding(
            "load failed",
            f"{lost}: {load.reason}.",
            "`akv check` tries the store and says what to do.",
        )
    ]


def _rounding(story: Story, background: Background) -> list[Finding]:
    promised = story.promised
    size = background.block_tokens(story.pid)
    rounded, left = story.rounded(size)
    if promised is None:
        return []
    findings = []
    if rounded:
        findings.append(
            Finding(
                "rounded",
                f"{rounded} of the {promised.hit} tokens found could not be used: the "
                f"engine computes a prompt's last token itself, and only whole blocks "
                f"of {size} tokens are loaded.",
            )
        )
    if left:
        because = f": {promised.reason}" if promised.reason else ""
        findings.append(
            Finding("not worth loading", f"{left} tokens were left{because}.", _WORTH)
        )
    return findings
