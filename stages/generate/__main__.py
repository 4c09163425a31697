import sys

from stages.generate.client import main
from stages.generate.config import GenerateConfig
from stages.runtime.cli import stage_main

if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):  # HOST:PORT
    raise SystemExit(main(sys.argv[1:]))
raise SystemExit(
    stage_main(
        "generate", GenerateConfig, "stages.generate.run", "stages.generate.inputs", megatron=True
    )
)
