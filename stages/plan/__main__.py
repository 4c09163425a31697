from stages.cli import stage_main
from stages.plan.config import PlanConfig

raise SystemExit(stage_main("plan", PlanConfig, "stages.plan.run"))
