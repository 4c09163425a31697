"""When Slurm's controller is asked how a job is. Pure: times are handed in.

One controller answers for every job of a cluster, so it is asked now and then, and at once when a
job has left an exit file. That is there a moment before Slurm knows of the end, so for as long as
it would not be asked otherwise it is asked more often then. Not for ever: a job that is requeued
keeps the file of the run before, while it waits."""

from __future__ import annotations

ENDING_SECONDS = 1.0
"""Between two questions about a job that has left its exit file."""


class PollSchedule:
    """The questions about one job."""

    def __init__(self, poll_seconds: float, num_files: int) -> None:
        """poll_seconds: between two questions; num_files: exit files that there will be."""
        self._poll_seconds = poll_seconds
        self._num_files = num_files
        self._exits = -1
        self._came = self._asked = 0.0

    def is_due(self, exits: int, now: float) -> bool:
        """Whether to ask, which is then taken for done. exits: the exit files that are there;
        now: by a clock that only goes forward."""
        has_news = exits != self._exits
        if has_news:
            self._exits, self._came = exits, now
        is_ending = exits == self._num_files and now - self._came < self._poll_seconds
        pause = min(ENDING_SECONDS, self._poll_seconds) if is_ending else self._poll_seconds
        if not has_news and now - self._asked < pause:
            return False
        self._asked = now
        return True
