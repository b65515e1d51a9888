"""A set that forgets the oldest, and only that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from akv.core.recent import RecentSet

batches = st.lists(st.lists(st.integers(0, 60), max_size=8), max_size=40)


@given(batches=batches, most=st.integers(2, 30))
def test_it_holds_the_last_half_and_never_more_than_its_limit(
    batches: list[list[int]], most: int
) -> None:
    """Bounded, and what was added just now is there."""
    recent: RecentSet[int] = RecentSet(most)
    added: list[int] = []
    for batch in batches:
        recent.update(batch)
        added += batch
        assert len(recent) <= most
        last = batch[-(most // 2) :]
        assert all(item in recent for item in last)
        assert not last or not recent.isdisjoint(last)
    strangers = [item for item in range(61) if item not in added]
    assert recent.isdisjoint(strangers)


def test_what_is_discarded_is_gone_at_once() -> None:
    """From both generations."""
    recent: RecentSet[int] = RecentSet(4)
    recent.update([1, 2])
    recent.update([3, 4])
    recent.discard([1, 4, 9])
    assert [item for item in range(10) if item in recent] == [2, 3]
    recent.clear()
    assert len(recent) == 0
