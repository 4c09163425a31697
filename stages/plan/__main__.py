import sys

from stages.plan.config import PlanConfig
from stages.plan.corpus_config import CorpusPlanConfig
from stages.plan.retro_config import RetroPlanConfig
from stages.runtime.cli import stage_main

if "--retro" in sys.argv[1:]:
    raise SystemExit(stage_main("plan", RetroPlanConfig, "stages.plan.retro_run"))
if "--corpus" in sys.argv[1:]:
    raise SystemExit(stage_main("plan", CorpusPlanConfig, "stages.plan.corpus_run"))
raise SystemExit(stage_main("plan", PlanConfig, "stages.plan.run", megatron=True))
