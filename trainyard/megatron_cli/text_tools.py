"""Commands that generate text, and what options of Megatron-LM's programs mean to them. Data only.

Names are flags without leading dashes; `x-*` is every flag that begins with `x-`."""

from __future__ import annotations

from trainyard.megatron_cli.absent import OF_THE_MODEL
from trainyard.megatron_cli.newer import NEWER_MODEL
from trainyard.megatron_cli.tool import (
    CHECKPOINT_ARGS,
    NO_FILE,
    OF_A_CHECKPOINT,
    OF_LOADED,
    Rows,
    Tool,
)

OF_INFERENCE: Rows = (
    CHECKPOINT_ARGS,
    *OF_LOADED,
    ("a checkpoint that is missing is always refused", "exit-on-missing-checkpoint"),
    (
        "a batch that does not fit into memory is refused before it begins",
        "max-tokens-to-oom inference-batch-times-seqlen-threshold",
    ),
    (
        "it only applies to --engine-type dynamic",
        """
        inference-dynamic-batching-* disable-chunked-prefill enable-chunked-prefill
        decode-only-cuda-graphs
        inference-coordinator-port num-tokens-to-prompt incoming-requests-* inference-logging-*
        inference-wandb-logging inference-wandb-logging-step-interval inference-cuda-graph-*
        inference-text-gen-server-logging inference-use-synchronous-zmq-collectives
        inference-disable-ep-consensus
        """,
    ),
    (
        "the static engine has one implementation",
        "flash-decode use-legacy-static-engine use-flashinfer-fused-rope symmetric-ar-type",
    ),
)

IN_BATCHES = (
    "texts come in batches of --inference-max-requests; stages.serve and stages.benchmark "
    "--engine-type dynamic run requests as they come",
    "engine-type inference-dynamic-batching num-speculative-tokens",
)

NOT_STATIC: Rows = (
    IN_BATCHES,
    ("name a folder for the results with --output-dir", "output-path"),
    NO_FILE,
)

OF_LOGGING = """
    inference-logging-* inference-wandb-logging inference-wandb-logging-step-interval
    inference-text-gen-server-logging
    """
OF_OUTPUT = """
    output-every-n-results output-request-events record-throughput no-record-throughput
    throughput-check-only
    """
OF_REQUESTS = (
    "cuda-graph-impl",
    "inference-dynamic-batching-num-cuda-graphs",
    "incoming-requests-per-sec",
)
OF_GRAPHS = "cuda-graph-impl inference-cuda-graph-* decode-only-cuda-graphs"

KEPT_BEGINNINGS = (
    "the dynamic engine uses keys of known beginnings again where it can, unless "
    "--disable-prefix-caching",
    "inference-dynamic-batching-prefix-caching inference-dynamic-batching-prefix-caching-*",
)

OF_BATCHES = {
    "inference-max-batch-size": "inference-max-requests",
    "max-batch-size": "inference-max-requests",
}

BENCHMARK = Tool(
    training="it only applies to training",
    minds=f"{OF_THE_MODEL} {NEWER_MODEL}",
    rules=(*OF_A_CHECKPOINT, *OF_REQUESTS),
    accepted=(
        CHECKPOINT_ARGS,
        *OF_LOADED,
        ("a checkpoint that is missing is always refused", "exit-on-missing-checkpoint"),
        (
            "a batch that does not fit into memory is refused, and requests wait for it",
            """
            max-tokens-to-oom inference-batch-times-seqlen-threshold
            inference-dynamic-batching-buffer-overflow-factor
            inference-dynamic-batching-paused-buffer-size-gb
            inference-dynamic-batching-unified-memory-level
            """,
        ),
        (
            "--engine-type says which engine runs, and each has one implementation",
            """
            inference-dynamic-batching use-legacy-static-engine flash-decode
            use-flashinfer-fused-rope symmetric-ar-type
            """,
        ),
        ("prompts are cut into chunks unless --disable-chunked-prefill", "enable-chunked-prefill"),
        KEPT_BEGINNINGS,
        (
            "graphs are recorded by --inference-dynamic-batching-num-cuda-graphs",
            "inference-cuda-graph-* decode-only-cuda-graphs",
        ),
        ("the folder of --output-dir has all figures", f"{OF_LOGGING} {OF_OUTPUT}"),
        (
            "tensors are always compared with those that the model needs",
            "inference-ckpt-non-strict",
        ),
        (
            "the first rank hands out all requests",
            """
            inference-coordinator-port inference-use-synchronous-zmq-collectives
            inference-disable-ep-consensus use-coordinator async-mode
            """,
        ),
    ),
    absent=(
        (
            "give --input-lengths uniform:LOW:HIGH in place of the two lengths",
            "num-tokens-to-prompt",
        ),
        (
            "requests come by time: give --request-rate, or neither for all at once",
            "incoming-requests-per-step",
        ),
        (
            "give --trace-file, whose lines have the length of each output",
            "num-tokens-from-file",
        ),
        (
            "it tests Megatron-LM's engine; leave it out",
            "suspend-resume-interval suspend-timeout drain-between-batches batch-boundaries",
        ),
        ("name a folder for the results with --output-dir", "output-path"),
        NO_FILE,
    ),
    renamed={
        **OF_BATCHES,
        "inference-dynamic-batching-max-requests-override": (
            "inference-dynamic-batching-max-requests"
        ),
        "inference-dynamic-batching-max-tokens-override": "inference-dynamic-batching-max-tokens",
        "incoming-requests-per-sec": "request-rate",
        "incoming-requests-duration": "duration-seconds",
        "prompt-file-num-truncate": "num-requests",
    },
    checks_model=True,
)

OF_TEXT_FILES = ("genfile", "sample-output-file", "output-file")
"""Files for texts, which are a folder here."""

GENERATE = Tool(
    training="it only applies to training",
    minds=f"{OF_THE_MODEL} {NEWER_MODEL}",
    rules=(*OF_A_CHECKPOINT, "num-samples", *OF_TEXT_FILES),
    accepted=(
        *OF_INFERENCE,
        ("texts are written, and times by stages.benchmark", "benchmark-profile stream"),
        ("stages.generate compiles a step only by its own name", "cuda-graph-impl"),
        ("keys and values are always kept", "recompute"),
    ),
    absent=(
        ("give --top-k 1, which takes the likeliest token", "greedy"),
        ("random prompts are for stages.benchmark; give --prompts", "num-input-tokens"),
        *NOT_STATIC,
    ),
    harmless={"engine-type": ("static",), "num-speculative-tokens": ("0",)},
    renamed={
        **OF_BATCHES,
        "prompt": "prompts",
        "out-seq-length": "num-tokens-to-generate",
        "sample-input-file": "prompt-file",
        "prompts-input-file": "prompt-file",
        **dict.fromkeys(OF_TEXT_FILES, "output-dir"),
    },
    checks_model=True,
)

SERVE = Tool(
    training="it only applies to training",
    minds=f"{OF_THE_MODEL} {NEWER_MODEL}",
    rules=(*OF_A_CHECKPOINT, "inference-dynamic-batching-num-cuda-graphs"),
    accepted=(
        ("a checkpoint that is missing is always refused", "exit-on-missing-checkpoint"),
        CHECKPOINT_ARGS,
        *OF_LOADED,
        (
            "requests wait until there is memory for them",
            """
            max-tokens-to-oom inference-batch-times-seqlen-threshold
            inference-dynamic-batching-buffer-overflow-factor
            inference-dynamic-batching-paused-buffer-size-gb
            inference-dynamic-batching-unified-memory-level
            """,
        ),
        (
            "the model decides which engine runs it",
            """
            engine-type inference-dynamic-batching use-legacy-static-engine flash-decode
            use-flashinfer-fused-rope symmetric-ar-type
            """,
        ),
        ("prompts are cut into chunks unless --disable-chunked-prefill", "enable-chunked-prefill"),
        KEPT_BEGINNINGS,
        (
            "each request says it",
            """
            return-log-probs top-n-logprobs skip-prompt-log-probs num-tokens-to-generate
            out-seq-length stream termination-id stop-words
            """,
        ),
        ("figures are at /metrics, and the log has a line for each request", OF_LOGGING),
        (
            "one process answers all requests",
            """
            inference-coordinator-port inference-use-synchronous-zmq-collectives
            inference-disable-ep-consensus
            """,
        ),
        ("graphs are recorded by --inference-dynamic-batching-num-cuda-graphs", OF_GRAPHS),
    ),
    absent=(
        ("tool calls and reasoning come as plain text; leave it out", "parsers"),
        ("clients send prompts; leave it out", "prompts prompt-file num-input-tokens"),
        NO_FILE,
    ),
    renamed={
        "inference-max-requests": "inference-dynamic-batching-max-requests",
        "inference-max-batch-size": "inference-dynamic-batching-max-requests",
        "max-batch-size": "inference-dynamic-batching-max-requests",
        "inference-dynamic-batching-max-requests-override": (
            "inference-dynamic-batching-max-requests"
        ),
        "inference-dynamic-batching-max-tokens-override": "inference-dynamic-batching-max-tokens",
    },
    checks_model=True,
)
