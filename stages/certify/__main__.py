from stages.certify.config import CertifyConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("certify", CertifyConfig, "stages.certify.run", positional="run"))
