from stages.faiss_train.config import FaissTrainConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("faiss_train", FaissTrainConfig, "stages.faiss_train.run"))
