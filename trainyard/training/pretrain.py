"""A pretraining as one call, from a notebook or from a script under `torchrun`.

    result = pretrain(model_provider, dataset_provider, config)

It does what `stages.pretrain` does, with the same options, in the same run folder, and brings what
a program wants otherwise: the model, the data, the loss. Called again it goes on from its last
checkpoint; when the run is finished, it returns at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import Input, resolve
from trainyard.config import digest_relevant
from trainyard.datasets.user_datasets import ProvidedData
from trainyard.errors import ConfigError, TrainyardError
from trainyard.parallel.groups import ProcessGroups, broadcast_object
from trainyard.training.local_run import STAGE, LocalRunHost
from trainyard.training.loop.build import ModelProvider
from trainyard.training.loop.events import Callback
from trainyard.training.loop.prepare import prepared
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.overrides import DatasetProvider, ForwardStep, Initialize, Overrides
from trainyard.training.trainer import Result, Trainer

T = TypeVar("T")


def pretrain(
    model_provider: ModelProvider | None,
    dataset_provider: DatasetProvider | None,
    config: PretrainConfig,
    *,
    forward_step: ForwardStep | None = None,
    initialize: Initialize | None = None,
    flops_per_token: float | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train from where the run in `config.save` is to its end; every rank calls it.

    model_provider: (ModelParallel, ModelStage) -> the part of the model that one pipeline stage
    holds, an nn.Module with `forward_stage(hidden, batch)`. None: a GPT of `config.model`.
    dataset_provider: (training samples, validation samples) -> (training data, validation data).
    None: token files, as `config.data` says.
    forward_step: (module, hidden, batch) -> what `forward_stage` returns, in its place.
    initialize: fills a module's parameters, given the seed. Unset: by name, as GPT's.
    flops_per_token: for figures of speed; unset: 6 for each parameter of another model.
    callbacks: told of every step, on every rank, after the loggers that `config.logging` names.

    Errors are those of trainyard.errors, on every rank."""
    parts = Overrides(
        model_provider=model_provider,
        dataset_provider=dataset_provider,
        forward_step=forward_step,
        initialize=initialize,
        flops_per_token=flops_per_token,
        callbacks=callbacks,
    )
    _check_call(config, parts)
    with prepared(config) as (groups, device):
        inputs, lineage = _agreed(groups, lambda: _identity(config, parts))
        host = LocalRunHost(config, inputs, lineage)
        try:
            with host.listening():
                return _publish(Trainer(config, host, groups, device, parts).run(), host)
        finally:
            host.close()


def _check_call(config: object, parts: Overrides) -> None:
    if not isinstance(config, PretrainConfig):
        raise ConfigError(
            "pretrain(model_provider, dataset_provider, config) takes a PretrainConfig last, not "
            f"{type(config).__name__}; the first two may be None"
        )
    if isinstance(config.data, ProvidedData) and parts.dataset_provider is None:
        raise ConfigError("data=ProvidedData(...) is that of a dataset_provider, and none is given")
    if config.data.dataloader_type == "external" and parts.dataset_provider is None:
        raise ConfigError(
            "--dataloader-type external takes a dataset_provider that loads by itself"
        )
    count = config.parallel.nproc_per_node
    if count > 1 and "RANK" not in os.environ:
        raise ConfigError(
            f"--nproc-per-node {count}: pretrain() runs in this process and starts no others; "
            f"start the program with torchrun --nproc-per-node {count}, and leave it out here"
        )


def _identity(config: PretrainConfig, parts: Overrides) -> tuple[dict[str, Input], str]:
    """The inputs, and the digest by which a run knows its own steps: for a run that brings nothing
    along, that of the stage."""
    inputs = {name: resolve(name, urls) for name, urls in config.inputs().items() if urls}
    facts: list[object] = [STAGE, digest_relevant(config)]
    facts.append({name: found.digest for name, found in inputs.items()})
    return inputs, digest_document([*facts, *([parts.identity] if parts.identity else [])])


def _agreed(groups: ProcessGroups, make: Callable[[], T]) -> T:
    """What the first rank makes, on all of them, or its error."""
    made: T | None = None
    error: TrainyardError | None = None
    if groups.rank == 0:
        try:
            made = make()
        except TrainyardError as found:
            error = found
    made, error = broadcast_object((made, error), groups.world)
    if error is not None:
        raise error
    assert made is not None
    return made


def _publish(result: Result, host: LocalRunHost) -> Result:
    if result.outcome == "finished" and host.kept is not None:
        ran: Mapping[str, object] = {"reason": "called as a library"}
        host.kept.publish(result.metrics, ran)
    return result
