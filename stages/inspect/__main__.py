from stages.inspect.config import InspectConfig
from stages.runtime.cli import stage_main

raise SystemExit(
    stage_main("inspect", InspectConfig, "stages.inspect.run", positional="checkpoint")
)
