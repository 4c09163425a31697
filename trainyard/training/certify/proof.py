"""Proves that a run lost and repeated no sample: checks each line of its ledger against options and
position, and each checkpoint against the lines before it.

Pure: takes the published steps in order, and returns a certificate. No files, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from trainyard.artifacts.digest import digest_bytes, hasher
from trainyard.optim.scaler import LossScaler, build_scaler
from trainyard.optim.schedule_resume import optimizer_schedule_document
from trainyard.training.certify.certificate import CHECKS, Certificate, Check, CourseChange
from trainyard.training.loop.batch_size import BatchSizeSchedule
from trainyard.training.loop.length import RunLength, length_of
from trainyard.training.loop.seeds import digest_of_every_seed, step_digest
from trainyard.training.run.run_record import (
    CourseRecord,
    PublishedStep,
    RunRecord,
    RunStart,
    has_update,
    parse_line,
)
from trainyard.training.run.segments import changes

RATE_TOLERANCE = 1e-12
"""Relative: powers and cosines of another machine's library may differ in the last digit."""

SampleDigest = Callable[[int, int, int], str | None]
"""(step, samples consumed before it, samples of it) -> digest of its sample ids; None if
unknown."""


class Prover:
    """Checks the published steps of a run, in order."""

    def __init__(
        self,
        run: RunRecord,
        start: RunStart,
        samples: SampleDigest | None = None,
        why_no_samples: str = "data not available",
        every: int = 1,
    ) -> None:
        """every: check seeds and samples of every N-th step only."""
        self._run, self._start = run, start
        self._length: RunLength
        self._enter_course(run.course(start.position.step + 1))
        self._at = replace(start.position)
        self._digest = start.ledger_digest
        self._scaler: LossScaler | None = None
        if start.loss_scaler is not None:
            self._scaler = build_scaler(self._course.precision)
            self._scaler.load_state_dict(start.loss_scaler)
        self._samples, self._every = samples, every
        self._batch_size_schedules: dict[tuple[int, int, int], BatchSizeSchedule] = {}
        self._recent: dict[int, str] = {}
        self._text = hasher()
        self._is_lost = False
        self._unread: PublishedStep | None = None
        """The last checkpoint with missing lines that no later one has."""
        self._published: list[int] = []
        self.checks = {name: Check(name) for name in CHECKS}
        self._explain(why_no_samples)

    def _explain(self, why_no_samples: str) -> None:
        if self._every > 1:
            for name in ("rng", "samples"):
                self.checks[name].reason = f"every {self._every}th step"
        if self._samples is None:
            self.checks["samples"].reason = why_no_samples
        if self._start.gap:
            for name in ("ledger", "state"):
                self.checks[name].reason = self._start.gap

    def _enter_course(self, course: CourseRecord) -> None:
        """From now on steps are checked against this course."""
        self._course, self._length = course, self._run.length(course)
        self._evaluations = set(self._length.evaluation_steps)

    def _follow_course(self, step: int, record: Mapping[str, Any], where: str) -> None:
        """Change to the course of a step, if it has another one than the step before. Its line says
        what changes."""
        course, before = self._run.course(step), self._course
        stated = record.get("course") or {}
        if course is before:
            # The first step after --load states what changed since a checkpoint of another run.
            if stated and step > self._start.position.step + 1:
                self.checks["steps"].compare(step, {}, stated, where)
            return
        self._enter_course(course)
        if self._scaler is not None and course.precision != before.precision:
            state = self._scaler.state_dict()
            self._scaler = build_scaler(course.precision)
            self._scaler.load_state_dict(state)
        expected, found = changes(before.options, course.options), stated.get("options", {})
        if found != expected:
            self.checks["steps"].compare(step, expected, found, where)

    # --- checkpoints --------------------------------------------------------------------------

    def add(self, published: PublishedStep) -> None:
        """Check the next checkpoint. Its first lines may repeat those of an earlier one."""
        known = self._at.step
        last: int | None = None
        for text in published.lines:
            record = parse_line(text, published.where)
            step = record["step"]
            follows = last is None or step == last + 1
            if step not in self._recent or step > known or not follows:
                self._enter(step, record, text, published.where)
            elif text != self._recent[step]:
                self.checks["steps"].compare(step, self._recent[step], text, published.where)
            last = step
        if published.lines_fault:
            self._unread = published
        if published.state_fault:
            wanted = "the state of this step"
            self.checks["state"].compare(
                published.step, wanted, published.state_fault, published.where
            )
        elif published.state and not self._is_lost and not published.lines_fault:
            self._check_state(published)
        self._published.append(published.step)
        if published.stays:
            self._recent.clear()

    def _enter(self, step: int, record: Mapping[str, Any], text: str, where: str) -> None:
        """Check a new line."""
        is_start = step == self._at.step == 0 and not self._published
        if not is_start:
            wanted = self._at.step + 1
            follows = step == wanted
            found = f"step {step}"
            if not follows and self._unread is not None:
                found = f"{found}, since {self._unread.lines_fault}"
            self.checks["steps"].compare(min(step, wanted), f"step {wanted}", found, where)
            self._unread = None
            if not follows and not self._is_lost:
                self._lose()
            if not follows and step < wanted:
                return  # a second line of a step
        self._recent[step] = text
        self._text.update(f"{text}\n".encode())
        if self._digest is not None:
            self._digest = digest_bytes(f"{self._digest}\n{text}".encode())
        if self._is_lost:
            self._at.step = step
            return
        if not is_start:
            self._follow_course(step, record, where)
        measured = "validation_loss" in record
        due = step in self._evaluations
        if step == self._course.last_step:  # a stop before a change of options may have cut it off
            due = due and measured
        self._compare("validation", step, due, measured, where, "measured")
        if not is_start:
            self._check_line(step, record, where)

    def _lose(self) -> None:
        """Record that the position is unknown from here on."""
        self._is_lost = True
        for name in ("ledger", "position", "samples", "rng", "rates", "loss_scale", "state"):
            self.checks[name].reason = f"not checked after step {self._at.step}"

    # --- a line -------------------------------------------------------------------------------

    def _check_line(self, step: int, record: Mapping[str, Any], where: str) -> None:
        before = self._at.consumed_train_samples
        size = self._size(step, before)
        is_passed = bool(record.get("passed_over"))
        if is_passed != (step in self._course.training.iterations_to_skip):
            self._compare("steps", step, not is_passed, is_passed, where, "passed over")
        self._check_draws(step, record, before, size, where)
        if not is_passed:
            self._check_rates(step, record, where)
            self._check_scale(step, record, where)
        self._at.advance(size, has_update(record))
        consumed = self._at.consumed_train_samples
        expected = {
            "global_batch_size": size,
            "consumed_train_samples": consumed,
            "tokens": consumed * self._run.seq_length,
        }
        found = {name: record.get(name) for name in expected}
        self.checks["position"].compare(step, expected, found, where)

    def _size(self, step: int, consumed: int) -> int:
        """The batch size of a step after this many samples."""
        span, course = self._run.span(step), self._run.course(step)
        dp = span.data_parallel_size if span else 1
        micro = span.micro_batch_size if span else course.training.micro_batch_size
        key = (course.first_step, dp, micro)
        if key not in self._batch_size_schedules:
            training = replace(course.training, micro_batch_size=micro)
            length = length_of(training, dp, self._run.seq_length)
            self._batch_size_schedules[key] = length.batch_size_schedule
        return self._batch_size_schedules[key].at(consumed).global_batch_size

    def _check_draws(
        self, step: int, record: Mapping[str, Any], before: int, size: int, where: str
    ) -> None:
        if step % self._every:
            return
        span, training = self._run.span(step), self._course.training
        micro = span.micro_batch_size if span else training.micro_batch_size
        if not record.get("passed_over"):
            drawn, found = (training.seed, step, size // micro), record.get("rng")
            expected = step_digest(*drawn)
            holds = found == expected or found == digest_of_every_seed(*drawn)
            self.checks["rng"].compare(step, expected, found, where, holds)
        if self._samples is None:
            return
        digest = self._samples(step, before, size)
        if digest is None:
            self.checks["samples"].reason = "the number of ranks of some steps is not recorded"
        else:
            self.checks["samples"].compare(step, digest, record.get("samples"), where)

    def _check_rates(self, step: int, record: Mapping[str, Any], where: str) -> None:
        rates = self._course.optimizer_schedule.at(self._at.scheduled_samples)
        expected = (rates.learning_rate, rates.weight_decay)
        found = (record.get("learning_rate"), record.get("weight_decay"))
        holds = all(
            isinstance(f, int | float) and math.isclose(e, f, rel_tol=RATE_TOLERANCE)
            for e, f in zip(expected, found, strict=True)
        )
        self.checks["rates"].compare(step, expected, found, where, holds)

    def _check_scale(self, step: int, record: Mapping[str, Any], where: str) -> None:
        if self._scaler is None:
            return
        found = record.get("loss_scale", 1.0)
        self.checks["loss_scale"].compare(step, self._scaler.scale, found, where)
        self._scaler.update(bool(record.get("skipped")))

    def _compare(
        self, check: str, step: int, expected: bool, found: bool, where: str, what: str
    ) -> None:
        wanted, made = (what if flag else f"not {what}" for flag in (expected, found))
        self.checks[check].compare(step, wanted, made, where)

    # --- a checkpoint -------------------------------------------------------------------------

    def _check_state(self, published: PublishedStep) -> None:
        state, where, check = published.state, published.where, self.checks["state"]
        at = replace(self._at)
        pending = state.get("unmeasured") or {}
        if pending:  # the step is done; the ledger gets its line after the validation
            at.advance(self._size(at.step + 1, at.consumed_train_samples), has_update(pending))
        expected = {
            **asdict(at),
            "seed": self._run.seed,
            "seq_length": self._run.seq_length,
            "schedule": self._schedule_of(at.step, state.get("schedule")),
        }
        found = {name: state.get(name) for name in expected}
        scale = state.get("loss_scaler") or {}
        if self._scaler is None:
            self._scaler = build_scaler(self._course.precision)
            self._scaler.load_state_dict(scale)
        elif not pending:
            expected["loss_scaler"], found["loss_scaler"] = self._scaler.state_dict(), scale
        check.compare(published.step, expected, found, where)
        stated = state.get("ledger_digest")
        if self._digest is None:
            self._digest = str(stated)
        else:
            self.checks["ledger"].compare(published.step, self._digest, stated, where)

    def _schedule_of(self, step: int, found: Any) -> dict[str, Any]:
        """The schedule that the state of a step records. The last step before a change of options
        may be saved again after it, with its validation."""
        courses = [self._run.course(step)]
        if step == courses[0].last_step:
            courses.append(self._run.course(step + 1))
        schedules = [optimizer_schedule_document(one.optimizer_schedule) for one in courses]
        return found if found in schedules else schedules[0]

    # --- the end ------------------------------------------------------------------------------

    def whole_ledger(self, text: bytes, where: str) -> None:
        """Check the ledger of a finished run: exactly the lines of its checkpoints."""
        if self._missing is not None:
            return  # reported under "steps"
        expected = str(self._text.hexdigest())
        self.checks["ledger"].compare(self._at.step, expected, digest_bytes(text), where)

    @property
    def _missing(self) -> PublishedStep | None:
        """The last checkpoint, if it lacks lines that no later one has."""
        unread = self._unread
        return unread if unread is not None and self._at.step < unread.step else None

    def certificate(self, files: Check, remarks: Sequence[str] = ()) -> Certificate:
        """The certificate."""
        last, run = self._at.step, self._run
        if (lost := self._missing) is not None:
            wanted = f"step {last + 1}"
            self.checks["steps"].compare(last + 1, wanted, lost.lines_fault, lost.where)
        of_steps = run.length(run.courses[-1]).steps
        if run.finished and last != of_steps:
            wanted = f"{of_steps} steps"
            self.checks["steps"].compare(last + 1, wanted, f"{last} steps", "the finished run")
        self.checks["files"] = files
        return Certificate(
            lineage=run.lineage,
            finished=run.finished,
            first_step=self._start.position.step + 1,
            last_step=last,
            of_steps=of_steps,
            train_samples=self._at.consumed_train_samples,
            tokens=self._at.consumed_train_samples * run.seq_length,
            begins_at=self._start.description,
            ledger_digest=self._digest or "",
            published_steps=tuple(self._published),
            spans=run.spans,
            course_changes=tuple(
                CourseChange(now.first_step, changes(before.options, now.options))
                for before, now in pairwise(run.courses)
            ),
            checks=tuple(self.checks.values()),
            remarks=tuple(remarks),
        )
