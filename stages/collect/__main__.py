from stages.collect.config import CollectConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("collect", CollectConfig, "stages.collect.run"))
