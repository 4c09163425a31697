from stages.faiss_query.config import FaissQueryConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("faiss_query", FaissQueryConfig, "stages.faiss_query.run"))
