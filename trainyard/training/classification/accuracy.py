"""Measures the accuracy of a classifier on each data set after every epoch, over all ranks, and
keeps the probabilities of every example."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainyard.datasets.classification.samples import ClassifierSamples
from trainyard.evaluation.metrics import Metric, Row, Summary
from trainyard.evaluation.tasks import Units
from trainyard.models.bert.classifier import BertClassifier
from trainyard.parallel.groups import ProcessGroups, broadcast_object, gather_objects
from trainyard.parallel.pipeline.forward_links import ForwardLinks
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState

log = logging.getLogger(__name__)

METRICS = {"accuracy": Metric("is_right")}
Measured = dict[str, list[Row]]
"""The rows of every data set, by name."""


class EpochAccuracy(Callback):
    """A callback that all ranks have. A killed run measures the epoch that it had saved and not
    measured."""

    def __init__(
        self,
        *,
        built: Sequence[nn.Module],
        sets: Mapping[str, ClassifierSamples],
        groups: ProcessGroups,
        device: torch.device,
        micro_batch_size: int,
        steps_per_epoch: int,
        units: Units,
        is_alone: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        """built: the module of this rank, once there is one. is_alone: measure once, as nothing is
        trained."""
        self._built, self._sets, self._groups, self._device = built, sets, groups, device
        self._micro_batch_size, self._steps = micro_batch_size, steps_per_epoch
        self._units, self._is_alone = units, is_alone
        self._shares = groups.dims.tp if sequence_parallel else 1
        self._links = ForwardLinks(groups)
        self.epochs: dict[int, Measured] = {}
        """Measurements by step, on all ranks: of this attempt, and those that earlier ones kept."""

    def begin(self, state: TrainState) -> None:
        """Take up what earlier attempts have measured; measure the model that is there if they have
        not."""
        if self._is_alone:
            self._measure(state.step)
            return
        kept = {}
        if self._groups.rank == 0:
            for step in range(self._steps, state.step + 1, self._steps):
                if (found := self._units.published(_key(step))) is not None:
                    kept[step] = found["sets"]
        self.epochs = broadcast_object(kept, self._groups.world)
        if state.step and state.step % self._steps == 0 and state.step not in self.epochs:
            self._measure(state.step)

    def after_step(self, event: StepEvent) -> None:
        """Measure at the end of an epoch."""
        step = event.record.step
        if step and step % self._steps == 0 and step not in self.epochs and not self._is_alone:
            self._measure(step)

    def _measure(self, step: int) -> None:
        epoch = -1 if self._is_alone else step // self._steps - 1
        found = {name: self._rows(samples) for name, samples in self._sets.items()}
        self.epochs[step] = found
        if self._groups.rank > 0:
            return
        if not self._is_alone:
            self._units.publish(_key(step), {"sets": found})
        for name, rows in found.items():
            print(f" > |epoch: {epoch}| metrics for {name}: {_figures(rows)}")
        overall = [row for rows in found.values() for row in rows]
        print(f" >> |epoch: {epoch}| overall: {_figures(overall)}", flush=True)

    # --- one data set ---------------------------------------------------------------------------

    @torch.no_grad()
    def _rows(self, samples: ClassifierSamples) -> list[Row]:
        """The rows of a data set, in order, on all ranks."""
        (module,) = self._built
        assert isinstance(module, BertClassifier)
        was_training = module.training
        module.eval()
        own = range(self._groups.dp_rank, len(samples), self._groups.dims.dp)
        rows = self._links.from_last_stage(list(self._own_rows(module, samples, own)))
        self._links.settle()
        module.train(was_training)
        parts = gather_objects(rows, self._groups.dp)
        return sorted((row for part in parts for row in part), key=lambda row: row["example"])

    def _own_rows(
        self, module: BertClassifier, samples: ClassifierSamples, own: range
    ) -> Iterator[Row]:
        """The rows of this copy of the model, on its last stage."""
        for first in range(0, len(own), self._micro_batch_size):
            numbers = own[first : first + self._micro_batch_size]
            found = [samples[number] for number in numbers]
            batch = {
                key: torch.from_numpy(np.stack([one[key] for one in found])).to(self._device)
                for key in ("text", "types", "padding_mask")
            }
            out = module.classify_step(self._hidden(module, batch["text"]), batch)
            if not module.pipeline_stage.has_output:
                self._links.send(out)
                continue
            for number, one, chances in zip(
                numbers, found, out.double().softmax(-1).tolist(), strict=True
            ):
                gold = int(one["label"])
                is_right = int(chances.index(max(chances)) == gold)
                yield {
                    "example": number,
                    "gold": gold,
                    "is_right": is_right,
                    "probabilities": chances,
                }

    def _hidden(self, module: BertClassifier, text: Tensor) -> Tensor | None:
        if module.pipeline_stage.has_embedding:
            return None
        b, c, s = text.shape
        dtype = torch.float32 if module.config.fp32_residual_connection else module.dtype
        shape = (s // self._shares, b * c, module.config.hidden_size)
        return self._links.receive(shape, dtype, self._device)


def _key(step: int) -> str:
    return f"accuracy-{step:09d}"


def _figures(rows: Sequence[Row]) -> str:
    """As Megatron-LM's tasks print them."""
    correct = sum(row["is_right"] for row in rows)
    share = 100.0 * correct / max(len(rows), 1)
    return f"correct / total = {correct} / {len(rows)} = {share:.4f} %"


def accuracy_of(measured: Measured) -> float:
    """The accuracy over all data sets together."""
    rows = [row for found in measured.values() for row in found]
    num_correct: int = sum(row["is_right"] for row in rows)
    return num_correct / max(len(rows), 1)


def best_step(epochs: Mapping[int, Measured]) -> int:
    """The step with the best accuracy over all data sets; of equal ones, the first."""
    return max(sorted(epochs), key=lambda step: accuracy_of(epochs[step]))


def summarize(rows: Sequence[Row]) -> Summary:
    """The results of a data set."""
    counts: dict[str, Any] = {
        "num_correct": sum(row["is_right"] for row in rows),
        "num_examples": len(rows),
    }
    return Summary({"accuracy": METRICS["accuracy"].document(rows)["value"], **counts}, METRICS)
