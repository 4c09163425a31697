from stages.plan.config import PlanConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("plan", PlanConfig, "stages.plan.run", megatron=True))
