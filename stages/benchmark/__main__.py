from stages.benchmark.config import BenchmarkConfig
from stages.runtime.cli import stage_main

raise SystemExit(
    stage_main(
        "benchmark",
        BenchmarkConfig,
        "stages.benchmark.run",
        "stages.benchmark.inputs",
        megatron=True,
    )
)
