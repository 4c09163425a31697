from stages.evaluate.config import EvaluateConfig
from stages.runtime.cli import stage_main

raise SystemExit(
    stage_main(
        "evaluate", EvaluateConfig, "stages.evaluate.run", "stages.evaluate.inputs", megatron=True
    )
)
