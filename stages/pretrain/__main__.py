from stages.pretrain.config import PretrainConfig
from stages.runtime.cli import stage_main

raise SystemExit(
    stage_main(
        "pretrain", PretrainConfig, "stages.pretrain.run", "stages.pretrain.inputs", megatron=True
    )
)
