"""What is known of one job from poll to poll, and when to poll. Pure: times are passed in.

Slurm forgets an ended job, or each task of an array, MinJobAge after its end. The tracker keeps the
ends, so that the end of an early share is still known when the last share ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flows.backends.slurm.records import JobRecord

ENDING_SECONDS = 1.0
"""Between two polls of a job that has written its exit file."""


class JobTracker:
    """The newest records of a job, or of each of its shares."""

    def __init__(self, name: str, indices: Sequence[int | None], now: float) -> None:
        """name: of the job; indices: of its shares, or None for a whole job."""
        self.records: list[JobRecord] = []
        """At least one for each share that was ever listed; newer records first."""
        self._name = name
        self._listed: list[JobRecord] = []
        self._known_at = dict.fromkeys(indices, now)

    def add(self, found: Sequence[JobRecord], now: float) -> bool:
        """Add the records of one poll; False if none belongs to this job."""
        # A cluster that was reinstalled counts ids from 1 again.
        self._listed = [record for record in found if record.name in ("", self._name)]
        if not self._listed:
            return False
        listed = {index for record in self._listed for index in record.shares}
        kept = [r for r in self.records if r.has_ended and not listed.issuperset(r.shares)]
        self.records = [*self._listed, *kept]
        # An ended share that is listed as waiting was requeued: the newer record counts.
        known = (i for i in self._known_at if i is None or i in listed or self._is_settled(i))
        self._known_at.update(dict.fromkeys(known, now))
        return True

    def record(self, index: int | None) -> JobRecord | None:
        """The newest record of a share, or of the job; None if there is none."""
        if index is None:
            return self.records[0] if self.records else None
        return next((record for record in self.records if index in record.shares), None)

    @property
    def unsettled(self) -> set[int]:
        """Shares whose end is not known yet."""
        return {i for i in self._known_at if i is not None and not self._is_settled(i)}

    def is_over(self, exits: Collection[int | None], forgotten_seconds: float, now: float) -> bool:
        """Whether no part of the job runs any more.

        exits: shares with an exit file, which proves their end if Slurm has forgotten them. A share
        that Slurm has not listed for forgotten_seconds has ended, too."""
        if not all(record.has_ended for record in self._listed):
            return False
        return all(
            self._is_settled(index) or index in exits or now - since > forgotten_seconds
            for index, since in self._known_at.items()
        )

    def _is_settled(self, index: int | None) -> bool:
        record = self.record(index)
        return record is not None and record.has_ended


class PollSchedule:
    """When to ask the controller about one job.

    One controller serves all jobs of a cluster, so polls are rare. When a job writes its exit file,
    they become frequent for one poll interval, since Slurm reports the end a moment later; not for
    longer, since a requeued job keeps the exit file of its previous run."""

    def __init__(self, poll_seconds: float, num_files: int) -> None:
        """num_files: the number of exit files that the job will write."""
        self._poll_seconds = poll_seconds
        self._num_files = num_files
        self._exits = -1
        self._changed_at = self._asked_at = 0.0

    def is_due(self, exits: int, now: float) -> bool:
        """Whether to poll now; if so, this counts as a poll.

        exits: number of exit files; now: of a monotonic clock."""
        has_changed = exits != self._exits
        if has_changed:
            self._exits, self._changed_at = exits, now
        is_ending = exits == self._num_files and now - self._changed_at < self._poll_seconds
        pause = min(ENDING_SECONDS, self._poll_seconds) if is_ending else self._poll_seconds
        if not has_changed and now - self._asked_at < pause:
            return False
        self._asked_at = now
        return True
