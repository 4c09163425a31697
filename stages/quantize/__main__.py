from stages.quantize.config import QuantizeConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("quantize", QuantizeConfig, "stages.quantize.run"))
