"""The public names of the library, each imported when it is first used (PEP 562).

    from trainyard.api import GPTConfig, PretrainConfig, pretrain

docs/library.md has examples. All other names are imported from their own modules."""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    "ALONE": "parallel.groups",
    "BatchSize": "training.loop.batch_size",
    "BertConfig": "models.bert.config",
    "ColumnParallelLinear": "parallel.tensor.linear",
    "DataConfig": "datasets.config",
    "DataParallelConfig": "parallel.data_config",
    "GPTConfig": "models.gpt.config",
    "IndexedWriter": "corpus.indexed",
    "LoggingConfig": "training.options.logging",
    "MambaConfig": "models.mamba.config",
    "OptimizerConfig": "optim.config",
    "ParallelConfig": "parallel.config",
    "PrecisionConfig": "optim.precision",
    "PretrainConfig": "training.options.pretrain",
    "ProvidedData": "datasets.user_datasets",
    "Ranks": "checkpoint.save",
    "RowParallelLinear": "parallel.tensor.linear",
    "SampleFormat": "datasets.sample_format",
    "SamplerShape": "datasets.sampler",
    "SamplingConfig": "inference.config",
    "StepContents": "checkpoint.save",
    "StepOptions": "training.loop.step",
    "T5Config": "models.t5.config",
    "TokenizerConfig": "tokenizers.config",
    "TrainState": "training.loop.state",
    "TrainingConfig": "training.options.training",
    "VocabParallelEmbedding": "parallel.tensor.vocab",
    "build_gpt_datasets": "datasets.build",
    "build_loader": "datasets.loader",
    "build_optimizer_schedule": "optim.schedule",
    "build_tokenizer": "tokenizers.registry",
    "build_train_module": "training.loop.build",
    "built_in_provider": "training.loop.build",
    "generate": "inference.static",
    "init_parameters": "models.init",
    "model_sizes": "training.loop.build",
    "load_model": "checkpoint.model",
    "model_tensors": "checkpoint.model_tensors",
    "open_checkpoint": "checkpoint.load",
    "open_output": "artifacts.store",
    "optimal_dtype": "corpus.indexed",
    "optimizer_tensors": "training.run.tensors",
    "pretrain": "training.pretrain",
    "process_groups": "parallel.groups",
    "resolve_device": "parallel.device",
    "restore_training": "training.run.restore",
    "restore_weights": "training.run.restore",
    "save_step": "checkpoint.save",
    "to_dict": "config",
    "vocab_parallel_cross_entropy": "parallel.tensor.vocab",
}
"""Module of each name, below `trainyard`."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"trainyard.api has no {name!r}; it has {', '.join(MODULES)}")
    return getattr(importlib.import_module(f"trainyard.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(MODULES)
