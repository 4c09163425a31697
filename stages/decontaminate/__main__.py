from stages.decontaminate.config import DecontaminateConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("decontaminate", DecontaminateConfig, "stages.decontaminate.run"))
