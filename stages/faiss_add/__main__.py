from stages.faiss_add.config import FaissAddConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("faiss_add", FaissAddConfig, "stages.faiss_add.run"))
