"""Proves that a run lost and repeated no sample: checks each line of its ledger against options and
position, and each checkpoint against the lines before it.

Pure: takes the published steps in order, and returns a certificate. No files, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from trainyard.artifacts.digest import digest_bytes, hasher
from trainyard.optim.scaler import LossScaler, build_scaler
from trainyard.training.certify.certificate import CHECKS, Certificate, Check
from trainyard.training.loop.batch_size import BatchSizeSchedule
from trainyard.training.loop.length import length_of
from trainyard.training.loop.seeds import step_digest
from trainyard.training.run.run_record import (
    PublishedStep,
    RunRecord,
    RunStart,
    has_update,
    parse_line,
)

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
        self._run, self._length = run, run.length
        self._start = start
        self._at = replace(start.position)
        self._digest = start.ledger_digest
        self._scaler: LossScaler | None = None
        if start.loss_scaler is not None:
            self._scaler = build_scaler(run.precision)
            self._scaler.load_state_dict(start.loss_scaler)
        self._samples, self._every = samples, every
        self._evaluations = set(self._length.evaluation_steps)
        self._batch_size_schedules: dict[tuple[int, int], BatchSizeSchedule] = {}
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
        measured = "validation_loss" in record
        self._compare("validation", step, step in self._evaluations, measured, where, "measured")
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
        if is_passed != (step in self._run.training.iterations_to_skip):
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
        """The batch size of a step after so many samples."""
        span, training = self._run.span(step), self._run.training
        dp = span.data_parallel_size if span else 1
        micro = span.micro_batch_size if span else training.micro_batch_size
        if (dp, micro) not in self._batch_size_schedules:
            length = length_of(replace(training, micro_batch_size=micro), dp, self._run.seq_length)
            self._batch_size_schedules[dp, micro] = length.batch_size_schedule
        return self._batch_size_schedules[dp, micro].at(consumed).global_batch_size

    def _check_draws(
        self, step: int, record: Mapping[str, Any], before: int, size: int, where: str
    ) -> None:
        if step % self._every:
            return
        span, training = self._run.span(step), self._run.training
        micro = span.micro_batch_size if span else training.micro_batch_size
        if not record.get("passed_over"):
            expected = step_digest(training.seed, step, size // micro)
            self.checks["rng"].compare(step, expected, record.get("rng"), where)
        if self._samples is None:
            return
        digest = self._samples(step, before, size)
        if digest is None:
            self.checks["samples"].reason = "the number of ranks of some steps is not recorded"
        else:
            self.checks["samples"].compare(step, digest, record.get("samples"), where)

    def _check_rates(self, step: int, record: Mapping[str, Any], where: str) -> None:
        rates = self._run.optimizer_schedule.at(self._at.scheduled_samples)
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
            "seed": self._run.training.seed,
            "seq_length": self._run.seq_length,
            "schedule": {
                name: part for name, part in asdict(self._run.optimizer_schedule).items() if part
            },
        }
        found = {name: state.get(name) for name in expected}
        scale = state.get("loss_scaler") or {}
        if self._scaler is None:
            self._scaler = build_scaler(self._run.precision)
            self._scaler.load_state_dict(scale)
        elif not pending:
            expected["loss_scaler"], found["loss_scaler"] = self._scaler.state_dict(), scale
        check.compare(published.step, expected, found, where)
        stated = state.get("ledger_digest")
        if self._digest is None:
            self._digest = str(stated)
        else:
            self.checks["ledger"].compare(published.step, self._digest, stated, where)

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
        if run.finished and last != self._length.steps:
            wanted = f"{self._length.steps} steps"
            self.checks["steps"].compare(last + 1, wanted, f"{last} steps", "the finished run")
        self.checks["files"] = files
        return Certificate(
            lineage=run.lineage,
            finished=run.finished,
            first_step=self._start.position.step + 1,
            last_step=last,
            of_steps=self._length.steps,
            train_samples=self._at.consumed_train_samples,
            tokens=self._at.consumed_train_samples * run.seq_length,
            begins_at=self._start.description,
            ledger_digest=self._digest or "",
            published_steps=tuple(self._published),
            spans=run.spans,
            checks=tuple(self.checks.values()),
            remarks=tuple(remarks),
        )
