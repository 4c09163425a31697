from stages.cli import stage_main
from stages.inspect.config import InspectConfig

raise SystemExit(
    stage_main("inspect", InspectConfig, "stages.inspect.run", positional="checkpoint")
)
