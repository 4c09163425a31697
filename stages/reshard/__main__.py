import os

from stages.reshard.config import ReshardConfig
from stages.runtime.cli import stage_main

# numpy moves bytes here; threads for products of matrices would only be started and spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

raise SystemExit(stage_main("reshard", ReshardConfig, "stages.reshard.run"))
