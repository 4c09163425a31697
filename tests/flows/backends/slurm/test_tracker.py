"""How often a controller is asked."""

from __future__ import annotations

from collections.abc import Callable

from flows.backends.slurm.tracker import PollSchedule


def asked(
    poll_seconds: float, exits: Callable[[float], int], until: float, num: int = 1
) -> list[float]:
    """The times at which it is asked, of a look every half second."""
    pace = PollSchedule(poll_seconds, num)
    looks = [100 + look / 2 for look in range(int(2 * until))]
    return [now - 100 for now in looks if pace.is_due(exits(now - 100), now)]


def test_it_is_asked_now_and_then() -> None:
    assert asked(10.0, lambda now: 0, 35) == [0, 10, 20, 30]


def test_it_is_asked_at_once_when_a_job_says_its_end_and_soon_again() -> None:
    assert asked(10.0, lambda now: int(now >= 12.5), 16) == [0, 10, 12.5, 13.5, 14.5, 15.5]


def test_a_requeued_job_that_waits_is_asked_no_more_often_than_others() -> None:
    assert asked(10.0, lambda now: 1, 60) == [*range(10), 19, 29, 39, 49, 59]


def test_an_array_is_asked_about_whenever_a_share_has_ended() -> None:
    ends = {3.0: 1, 4.5: 2, 20.0: 3}

    def exits(now: float) -> int:
        return max((count for at, count in ends.items() if now >= at), default=0)

    assert asked(10.0, exits, 23, num=3) == [0, 3, 4.5, 14.5, 20, 21, 22]


def test_a_short_poll_is_kept() -> None:
    assert asked(0.5, lambda now: int(now >= 1), 2.5) == [0, 0.5, 1, 1.5, 2]
