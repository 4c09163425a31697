"""A pretraining as one call, from a notebook or from a script under `torchrun`.

    result = pretrain(model_provider, dataset_provider, config)

It takes the options of `stages.pretrain` and writes the same run folder. A program may replace the
model, the data and the loss. A second call resumes from the last checkpoint; after the last step it
returns at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import Input, Manifests, resolve
from trainyard.datasets.user_datasets import ProvidedData
from trainyard.errors import ConfigError, TrainyardError
from trainyard.parallel.groups import ProcessGroups, broadcast_object
from trainyard.training.local_run import STAGE, LocalRunHost
from trainyard.training.loop.build import ModelProvider
from trainyard.training.loop.events import Callback
from trainyard.training.loop.prepare import prepared
from trainyard.training.options.course import lineage_options
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.overrides import DatasetProvider, ForwardStep, Initialize, Overrides
from trainyard.training.resolve import resolved
from trainyard.training.result import Result
from trainyard.training.run.other_runs import refuse_other_runs
from trainyard.training.run.segments import segments_document, segments_of_step
from trainyard.training.trainer import Trainer

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
    """Train the run in `config.save` from its last checkpoint to the end; every rank calls it.

    model_provider: (ModelParallel, PipelineStage) -> the part of the model on that stage, an
    nn.Module with `forward_step(hidden, batch)`. None: a GPT of `config.model`.
    dataset_provider: (training samples, validation samples) -> (training data, validation data).
    None: the token files of `config.data`.
    forward_step: (module, hidden, batch) -> output; replaces the module's own `forward_step`.
    initialize: fills the parameters of a module from a seed. Unset: by name, as for a GPT.
    flops_per_token: for TFLOP/s and MFU; unset: 6 per parameter if the model is not a GPT.
    callbacks: called on every rank after the loggers of `config.logging`.

    Errors are those of trainyard.errors, on every rank."""
    overrides = Overrides(
        model_provider=model_provider,
        dataset_provider=dataset_provider,
        forward_step=forward_step,
        initialize=initialize,
        flops_per_token=flops_per_token,
        callbacks=callbacks,
    )
    _check_call(config, overrides)
    with prepared(config) as (groups, device):
        config = resolved(config, groups.dims.dp)
        inputs, lineage = _agreed(groups, lambda: _identity(config, overrides))
        host = LocalRunHost(config, inputs, lineage)
        try:
            with host.handle_signals():
                result = Trainer(config, host, groups, device, overrides).run()
                if result.outcome == "finished" and host.folder is not None:
                    segments = segments_of_step(config.run_folder, result.state.step)
                    facts = {"reason": "called as a library", **segments_document(segments)}
                    host.folder.publish(result.metrics, facts)
                return result
        finally:
            host.close()


def _check_call(config: object, overrides: Overrides) -> None:
    if not isinstance(config, PretrainConfig):
        raise ConfigError(
            "pretrain(model_provider, dataset_provider, config) takes a PretrainConfig last, not "
            f"{type(config).__name__}; the first two may be None"
        )
    if isinstance(config.data, ProvidedData) and overrides.dataset_provider is None:
        raise ConfigError("data=ProvidedData(...) needs a dataset_provider, and none is given")
    if config.data.dataloader_type == "external" and overrides.dataset_provider is None:
        raise ConfigError(
            "--dataloader-type external needs a dataset_provider that returns its own loader"
        )
    count = config.parallel.nproc_per_node
    if count > 1 and "RANK" not in os.environ:
        raise ConfigError(
            f"--nproc-per-node {count}: pretrain() runs in this process and starts no others; "
            f"start the program with torchrun --nproc-per-node {count}, and leave it out here"
        )


def _identity(config: PretrainConfig, overrides: Overrides) -> tuple[dict[str, Input], str]:
    """(inputs, lineage). The lineage is the digest that marks the steps of a run; without overrides
    it equals that of the stage. ConfigError if the folder holds another run."""
    manifests, given = Manifests(), config.inputs().items()
    inputs = {name: resolve(name, urls, manifests) for name, urls in given if urls}
    digests = {name: found.digest for name, found in inputs.items()}
    facts: list[object] = [STAGE, lineage_options(config), digests]
    lineage = digest_document([*facts, *([overrides.identity] if overrides.identity else [])])
    refuse_other_runs(config, lineage, digests)
    return inputs, lineage


def _agreed(groups: ProcessGroups, make: Callable[[], T]) -> T:
    """The result of rank 0 on all ranks, or its error."""
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
