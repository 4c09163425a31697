"""All that Slurm has told of one job, look by look. Pure: times are handed in.

Slurm forgets what has ended MinJobAge after its end, task of an array by task: what was told of an
end is kept, or a share that failed early would have no witness when the last one ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flows.backends.slurm.records import JobRecord


class JobTracker:
    """The last words on a job, or on each of its shares."""

    def __init__(self, name: str, indices: Sequence[int | None], now: float) -> None:
        """name: of the job; indices: of its shares, None of a job that is not made in any."""
        self.records: list[JobRecord] = []
        """One at least for each share that was ever told of; what is newer stands first."""
        self._name = name
        self._listed: list[JobRecord] = []
        self._known_at = dict.fromkeys(indices, now)

    def take_in(self, found: Sequence[JobRecord], now: float) -> bool:
        """Take in what one look has found; False when that was nothing of this job."""
        # A cluster that was set up anew counts from 1 again.
        self._listed = [record for record in found if record.name in ("", self._name)]
        if not self._listed:
            return False
        listed = {index for record in self._listed for index in record.shares}
        kept = [r for r in self.records if r.has_ended and not listed.issuperset(r.shares)]
        self.records = [*self._listed, *kept]
        # One that ended and is listed as waiting was requeued: that is newer, and counts.
        known = (i for i in self._known_at if i is None or i in listed or self._is_settled(i))
        self._known_at.update(dict.fromkeys(known, now))
        return True

    def record(self, index: int | None) -> JobRecord | None:
        """The last word on a share, or on the job; None when there was none."""
        if index is None:
            return self.records[0] if self.records else None
        return next((record for record in self.records if index in record.shares), None)

    @property
    def unsettled(self) -> set[int]:
        """Shares of which no end was told yet."""
        return {i for i in self._known_at if i is not None and not self._is_settled(i)}

    def is_over(self, exits: Collection[int | None], forgotten_seconds: float, now: float) -> bool:
        """True when nothing of the job runs any more.

        exits: whose exit file is there. That tells the end of what Slurm knows no more; so does
        its silence for so many seconds."""
        if not all(record.has_ended for record in self._listed):
            return False
        return all(
            self._is_settled(index) or index in exits or now - since > forgotten_seconds
            for index, since in self._known_at.items()
        )

    def _is_settled(self, index: int | None) -> bool:
        record = self.record(index)
        return record is not None and record.has_ended
