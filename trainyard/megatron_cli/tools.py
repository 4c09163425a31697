"""Commands that train nothing, and what options of Megatron-LM's programs mean to them. Data only;
`text_tools` has the commands that generate text.

Names are flags without leading dashes; `x-*` is every flag that begins with `x-`."""

from __future__ import annotations

from trainyard.megatron_cli.absent import LATER, OF_MEMORY, OF_THE_MODEL
from trainyard.megatron_cli.newer import NEWER_MODEL
from trainyard.megatron_cli.text_tools import BENCHMARK, GENERATE, SERVE
from trainyard.megatron_cli.tool import (
    CHECKPOINT_ARGS,
    NO_FILE,
    NOT_SPREAD,
    OF_A_CHECKPOINT,
    OF_FP8,
    Tool,
)

POSITIONS = ("use-rotary-position-embeddings", "no-position-embedding", "rope-type")
EXPERTS = ("moe-router-pre-softmax", "moe-token-dispatcher-type")

TASKS = ("RACE", "MNLI", "QQP")
RETRIEVER_TASKS = ("RETRIEVER-EVAL", "RET-FINETUNE-NQ", "ICT-ZEROSHOT-NQ")

TOKEN_FILES = Tool(
    training="it is an option of a training, on which token files do not depend",
    accepted=(
        (
            "input is divided by its size and workers take the next part when they are free",
            "chunk-size find-optimal-num-workers workers-to-check max-documents",
        ),
    ),
    absent=(("token files have one format, that of mmap; leave it out", "dataset-impl"), NO_FILE),
    harmless={"dataset-impl": ("mmap", "infer")},
)

RESHARD = Tool(
    training="it is an option of a training; the checkpoint brings those of its model",
    accepted=(
        ("one process reads and writes, so nothing is queued", "max-queue-size"),
        ("no code of Megatron-LM runs", "megatron-path"),
        ("tensors are always compared with those that the model needs", "no-checking"),
        ("the files say it", "loader-transformer-impl"),
    ),
    absent=(("image models are not supported yet", "vision-model-type"), NO_FILE),
)

PLAN = Tool(
    training="a plan does not depend on it",
    minds=f"{OF_THE_MODEL} {NEWER_MODEL} {OF_MEMORY} offload-optimizer-states",
    rules=(
        *("logging-level", *POSITIONS, *EXPERTS, "sequence-parallel", "optimizer"),
        *("retro-add-retriever", "spec", "hybrid-layer-pattern", "hybrid-override-pattern"),
        *("recompute-modules", "moe-layer-recompute", "nproc-per-node", "checkpoint-activations"),
    ),
)

OF_STAGE_PRETRAIN = ("use-checkpoint-args", "ckpt-convert-format", "ckpt-convert-save")
"""Flags of Megatron-LM that stages.pretrain takes, and the training of the library does not."""

OF_GENERATION = (
    (
        "a question is answered by the decoder alone, from its prompt, as Megatron-LM does with "
        "--retro-attention-gate 0: no encoder runs, and no neighbours but those in the prompt",
        """
        k r m retro-num-neighbors retro-num-retrieved-chunks reuse-top retro-add-retriever
        add-retriever retro-project-dir retro-workdir retro-encoder-layers
        retro-encoder-hidden-dropout retro-encoder-attention-dropout encoder-layers
        encoder-hidden-dropout encoder-attention-dropout retro-mask-encoder disable-encoder
        question-in-encoder retro-no-verify-neighbor-count retro-verify-neighbor-count
        """,
    ),
    (
        "Megatron-LM's retro_text_generation.py does not use it either",
        """
        num-samples genfile recompute epsilon debug-gen dpr-mode faiss-ckpt weight adaptor
        project-size shuffle-topn chunk0 without-title prefix reset-eval cyclic-train-iters
        original-db-file qa-space-pad
        """,
    ),
    ("only the answers are generated", "answer-loss-only eod-mask-loss"),
)
"""Flags of `retro_text_generation.py`, which answers questions."""

EVALUATE = Tool(
    training="it only applies to training",
    minds=f"{OF_THE_MODEL} {NEWER_MODEL}",
    rules=(
        *OF_A_CHECKPOINT,
        *("greedy", "top-p", "data-folder", "split", "sample-output-file"),
    ),
    accepted=(
        *OF_GENERATION,
        CHECKPOINT_ARGS,
        NOT_SPREAD,
        ("scores are computed in fp32, which 8 and 16 bits approximate", f"fp16 bf16 {OF_FP8}"),
        (
            "it belongs to other tasks",
            """
            keep-last train-data qa-data-dev qa-data-test qa-file faiss-*
            train-with-neg train-hard-neg val-av-rank-hard-neg val-av-rank-other-neg
            """,
        ),
    ),
    absent=(
        NO_FILE,
        (
            "the encoder takes no part in an answer, which is Megatron-LM's 0; leave it out",
            "retro-attention-gate",
        ),
        ("answers are greedy or sampled; leave it out", "beam-search beam-size length-penalty"),
    ),
    harmless={"retro-attention-gate": ("0", "0.0"), "length-penalty": ("1", "1.0")},
    renamed={
        "greedy": "top-k",
        "sample-input-file": "valid-data",
        "sample-output-file": "output-dir",
    },
    later={
        **{
            ("task", name): f"the task {name} trains a BERT, which stages.classify does"
            for name in TASKS
        },
        **{
            ("task", name): f"the task {name} needs the retriever of pretrain_ict.py, which {LATER}"
            for name in RETRIEVER_TASKS
        },
    },
    checks_model=True,
)

SCORE = Tool(
    training="scores do not depend on it",
    accepted=(("the lines are counted anyway", "total"),),
    absent=(NO_FILE,),
    renamed={"data-path": "input", "out-path": "output-dir"},
)

RETRO_PREPROCESS = Tool(
    training="the options --retro-... and the BERT of --load decide what the project has",
    absent=(NO_FILE,),
    renamed={
        "retro-num-neighbors-query": "retro-query-num-neighbors-query",
        "retro-index-nprobe": "retro-query-nprobe",
        "retro-bert-chunk-length": "retro-bert-max-chunk-length",
    },
)

TOOLS = {
    "tokenize": TOKEN_FILES,
    "merge": TOKEN_FILES,
    "reshard": RESHARD,
    "plan": PLAN,
    "evaluate": EVALUATE,
    "benchmark": BENCHMARK,
    "generate": GENERATE,
    "score": SCORE,
    "serve": SERVE,
    "retro_preprocess": RETRO_PREPROCESS,
}
"""By stage; a stage that is not here trains."""
