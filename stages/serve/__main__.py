from stages.runtime.cli import stage_main
from stages.serve.config import ServeConfig

raise SystemExit(
    stage_main("serve", ServeConfig, "stages.serve.run", "stages.serve.inputs", megatron=True)
)
