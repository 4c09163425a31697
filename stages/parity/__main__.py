from stages.parity.config import ParityConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("parity", ParityConfig, "stages.parity.run", "stages.parity.inputs"))
