"""WallTime turns times of the guest into wall times: near the host's clock, in order, and always the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.guests.common import wall_time
from emulated_kernel.guests.common.wall_time import GRANULARITY_NS, WallTime

STEPS = st.integers(0, 5 * GRANULARITY_NS)


@given(st.lists(st.tuples(STEPS, STEPS), max_size=50))
def test_whichever_clock_is_the_faster_one(steps: list[tuple[int, int]]) -> None:
    wall, guest, noted = 10**18, 10**9, dict[int, int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wall_time, "time_ns", lambda: wall)
        times = WallTime(lambda: guest)
        for of_wall, of_guest in steps:
            wall, guest = wall + of_wall, guest + of_guest + 1
            times.remember()
            noted[guest] = times.to_wall(guest)
            assert 0 <= wall - noted[guest] < GRANULARITY_NS
    assert list(noted.values()) == sorted(noted.values())
    assert noted == {moment: times.to_wall(moment) for moment in noted}


def test_times_that_were_set_are_kept() -> None:
    times = WallTime(lambda: 5)
    for moment in (-1, 0, 1, 10**18):
        assert times.to_wall(times.to_guest(moment)) == moment


def test_a_wild_guests_time_is_anything() -> None:
    now = [1 << 64]
    times = WallTime(lambda: now[0])
    for now[0] in (5, (1 << 64) - 1, 7, 1 << 63):
        times.remember()
        times.to_wall(now[0])
