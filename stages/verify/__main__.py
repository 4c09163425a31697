from stages.runtime.cli import stage_main
from stages.verify.config import VerifyConfig

raise SystemExit(stage_main("verify", VerifyConfig, "stages.verify.run", positional="url"))
