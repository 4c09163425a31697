from stages.certify.config import CertifyConfig
from stages.cli import stage_main

raise SystemExit(stage_main("certify", CertifyConfig, "stages.certify.run", positional="run"))
