from stages.cli import stage_main
from stages.pretrain.config import PretrainConfig

raise SystemExit(
    stage_main(
        "pretrain", PretrainConfig, "stages.pretrain.run", "stages.pretrain.inputs", megatron=True
    )
)
