"""Megatron core 0.15.3, the last release with Retro, opens a project.

    python megatron_retro_program.py PROJECT EOD OUT

Reads config.json, the merged databases, the samples and their neighbours by Megatron core's own
classes, as its pretrain_retro.py does, and writes what they give to OUT (.npz). A program of its
own: megatron-core patches much of torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray


class Tokenizer:
    """What GPTDataset asks of one."""

    pad = -1
    unique_identifiers: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, eod: int) -> None:
        self.eod = self.vocab_size = eod
        self.vocab_size += 257


def databases(project: str, chunk_length: int, eod: int) -> dict[str, NDArray[np.int64]]:
    """The tokens of every chunk."""
    from megatron.core.datasets.retro.db.utils import get_merged_datasets

    found = get_merged_datasets(project, chunk_length, eod)
    return {
        f"chunks_{kind}": np.array([dataset[i]["text"] for i in range(len(dataset))])
        for kind, dataset in found.items()
    }


def samples(project: str, options: dict[str, Any], eod: int) -> dict[str, NDArray[np.int64]]:
    """The samples of training and validation with their neighbours."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.retro.query.multi_split_gpt_dataset import (
        MultiSplitGPTDataset,
        MultiSplitGPTDatasetConfig,
    )
    from megatron.core.datasets.retro.query.retro_dataset import get_retro_datasets
    from megatron.core.datasets.utils import get_blend_from_list
    from megatron.core.models.retro import config as retro_config
    from megatron.core.models.retro.utils import get_gpt_data_dir

    words = options["retro_gpt_data_path"]
    blend = [str(Path(get_gpt_data_dir(project), w)) if i % 2 else w for i, w in enumerate(words)]
    data = MultiSplitGPTDatasetConfig(
        random_seed=options["retro_gpt_seed"],
        sequence_length=options["retro_gpt_seq_length"],
        blend=get_blend_from_list(blend),
        split=options["retro_gpt_split"],
        split_preprocessing=options["retro_gpt_split"],
        path_to_cache=None,
        return_document_ids=False,
        tokenizer=Tokenizer(eod),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    count, batch = options["retro_gpt_train_samples"], options["retro_gpt_global_batch_size"]
    evaluations = count // batch // options["retro_gpt_eval_interval"] + 1
    sizes = [count, evaluations * options["retro_gpt_eval_iters"] * batch, 0]
    built = BlendedMegatronDatasetBuilder(MultiSplitGPTDataset, sizes, lambda: True, data).build()
    # Asked for the version of Transformer Engine, which is not installed, it fails.
    retro_config.is_te_min_version = lambda version: False
    config = retro_config.RetroConfig(
        num_layers=12,
        hidden_size=8,
        num_attention_heads=1,
        retro_project_dir=project,
        retro_block_size=options["retro_block_size"],
        retro_chunk_length=options["retro_gpt_chunk_length"],
        retro_neighbor_dirs=options["retro_neighbor_dirs"],
        retro_split_preprocessing=options["retro_gpt_split"],
    )
    pairs = {
        split: (dataset, size)
        for split, dataset, size in zip(("train", "valid", "test"), built, sizes, strict=True)
    }
    found = get_retro_datasets(config, pairs, options["retro_gpt_seq_length"], eod)
    return {
        f"{split}_{key}": np.array([dataset[i][key] for i in range(size)])
        for split, dataset, size in zip(("train", "valid"), found, sizes, strict=False)
        for key in ("text", "neighbor_chunks", "neighbor_tokens")
    }


def main(project: str, eod: str, out: str) -> None:
    """The command line."""
    store = dist.FileStore(f"{out}.rendezvous", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    options = json.loads(Path(project, "config.json").read_text())
    found = databases(project, options["retro_gpt_chunk_length"], int(eod))
    np.savez(out, **found, **samples(project, options, int(eod)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
