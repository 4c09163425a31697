from stages.generate.config import GenerateConfig
from stages.runtime.cli import stage_main

raise SystemExit(
    stage_main(
        "generate", GenerateConfig, "stages.generate.run", "stages.generate.inputs", megatron=True
    )
)
