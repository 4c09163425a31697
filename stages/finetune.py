"""Instruction tuning: a second command line of stage `pretrain`.

    python -m stages.finetune --load CHECKPOINT --data-path DATA.jsonl --save RUN ...

The training, its run folder and its image are those of `pretrain`. The options of the model and the
tokenizer that are not given are those of the checkpoint (`pretrain.checkpoint_options`), and --sft
and --finetune are on."""

from __future__ import annotations

from stages.pretrain.config import PretrainConfig
from stages.runtime.cli import stage_main


class FinetuneConfig(PretrainConfig):
    """Tune a trained model on instruction data (--sft). Options of the model and the tokenizer that
    are not given are those of the checkpoint of --load.

    With the same options and data, a rerun resumes from the last checkpoint in --save."""

    __slots__ = ()
    RESOLVED_BY = "stages.pretrain.resolve_finetune"


if __name__ == "__main__":
    raise SystemExit(
        stage_main(
            "pretrain",
            FinetuneConfig,
            "stages.pretrain.run",
            "stages.pretrain.inputs",
            megatron=True,
            program="finetune",
        )
    )
