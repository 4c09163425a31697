"""Fine-tuning of a BERT on RACE, MNLI or QQP: a second command line of stage `pretrain`.

    python -m stages.classify --task MNLI --pretrained-checkpoint BERT --train-data train.tsv \\
        --valid-data dev_matched.tsv dev_mismatched.tsv --epochs 5 --save RUN ...

The training, its run folder and its image are those of `pretrain`. After every epoch it prints the
accuracy on each data set and keeps a checkpoint; the run folder gets results.json with passports,
and the metrics name the best step."""

from __future__ import annotations

from stages.pretrain.classify_config import ClassifyConfig
from stages.runtime.cli import stage_main

if __name__ == "__main__":
    raise SystemExit(
        stage_main(
            "pretrain",
            ClassifyConfig,
            "stages.pretrain.run",
            "stages.pretrain.inputs",
            megatron=True,
            program="classify",
        )
    )
