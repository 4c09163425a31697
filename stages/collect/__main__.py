from stages.cli import stage_main
from stages.collect.config import CollectConfig

raise SystemExit(stage_main("collect", CollectConfig, "stages.collect.run"))
