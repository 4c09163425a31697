import os

from stages.reshard.config import ReshardConfig
from stages.runtime.cli import stage_main

# numpy only copies bytes here; OpenBLAS's threads would start and spin without work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

raise SystemExit(stage_main("reshard", ReshardConfig, "stages.reshard.run", megatron=True))
