"""Flags of Megatron-LM, and of programs around it, that are not there, by what to do instead. Data.

Names are flags without dashes; `x-*` is every flag that begins so."""

from __future__ import annotations

LATER = "comes later"

ABSENT: tuple[tuple[str, str], ...] = (
    (
        f"mixture of experts {LATER}; leave it out for a dense model (stages.plan counts both)",
        "num-experts expert-model-parallel-size expert-tensor-parallel-size",
    ),
    (f"FP8 and FP4 {LATER}; use --bf16", "fp8-format fp8-e4m3 fp8-hybrid fp8 fp4-format fp4"),
    (
        f"multi-latent attention {LATER}; --group-query-attention shrinks keys and values too",
        "multi-latent-attention",
    ),
    (f"multi-token prediction {LATER}; leave it out", "mtp-num-layers"),
    (
        f"state space layers {LATER}; leave it out",
        """
        hybrid-layer-pattern hybrid-override-pattern hybrid-attention-ratio hybrid-mlp-ratio
        is-hybrid-model
        """,
    ),
    (
        f"fully sharded data parallelism {LATER}; --use-distributed-optimizer spreads the "
        "optimizer's state, and tensor and pipeline parallelism spread the weights",
        """
        use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 data-parallel-sharding-strategy
        num-distributed-optimizer-instances tensor-parallel-num-weight-shards
        """,
    ),
    (
        "a model of your own is given to the library, not by name: docs/library.md",
        """
        spec heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
        model-provider
        """,
    ),
    (
        "this command trains GPT on token files; models of other kinds come later",
        "retro-add-retriever vision-pretraining perform-rl-step logits-*",
    ),
    (
        "this command trains on token files only for now; the datasets are in "
        "trainyard.datasets (docs/library.md)",
        "sft fim-data",
    ),
    (
        "not offered: it changes the model in a way that this one does not know; leave it out",
        """
        apply-residual-connection-post-layernorm no-rope-freq qk-l2-norm use-mup
        activation-func-clamp-value glu-linear-offset attention-output-gate
        no-weight-decay-cond-type
        """,
    ),
    (
        "matrix products add up as torch does by default; leave it out",
        "disable-bf16-reduced-precision-matmul",
    ),
    (
        "hierarchical and hybrid context parallelism are not offered; --cp-comm-type p2p, a2a or "
        "allgather are",
        "hierarchical-context-parallel-sizes hybrid-context-parallel",
    ),
    (
        "spell the stages out with --pipeline-model-parallel-layout, as in 'E|t*6|t*6L'",
        "standalone-embedding-stage pipeline-model-parallel-split-rank",
    ),
    (
        "use --recompute-activations, or for more control --recompute-granularity, "
        "--recompute-method and --recompute-num-layers",
        "checkpoint-activations checkpoint-num-layers checkpoint-in-cpu",
    ),
    (
        "use --sequence-parallel, which cuts what is saved over the tensor-parallel ranks",
        "distribute-checkpointed-activations",
    ),
    (
        "--cpu-offloading-num-layers keeps activations of the first layers on the host",
        "fine-grained-activation-offloading",
    ),
    (
        "an optimizer on the CPU is not offered; --use-distributed-optimizer spreads its state "
        "over the data-parallel ranks",
        "optimizer-cpu-offload cpu-optimizer",
    ),
    (
        "the optimizer's state is fp32; --use-distributed-optimizer spreads it over the "
        "data-parallel ranks",
        "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype",
    ),
    (
        "ranks begin with the same weights, so that how a batch is cut changes nothing; leave it "
        "out",
        "data-parallel-random-init dump-param-to-param-group-map",
    ),
    (
        "--finetune takes the weights alone from --load and begins at step 0; without it all of "
        "the run goes on",
        "no-load-optim",
    ),
    (
        "options of a run are a document: its command with --dry-run writes one, --config reads it",
        "use-checkpoint-args",
    ),
    (
        "stages.evaluate measures a checkpoint without training",
        "skip-train eval-only",
    ),
    (
        "a measurement takes the training's batches: --micro-batch-size and --global-batch-size, "
        "--eval-iters of them",
        "eval-global-batch-size eval-micro-batch-size",
    ),
    (
        "the vocabulary is padded to a multiple of --make-vocab-size-divisible-by x "
        "--tensor-model-parallel-size",
        "padded-vocab-size",
    ),
    (
        "a tokenizer is told by --tokenizer-type and its files",
        "tokenizer-metadata",
    ),
    (
        "start the command under a profiler: nsys profile python -m stages.pretrain ..., or "
        "torch.profiler around the library",
        "profile use-pytorch-profiler record-memory-history",
    ),
    (
        "a run that was ended goes on from its last step when the same command is given again; "
        "launchers and flows do so by themselves",
        "inprocess-restart",
    ),
    (
        "faults are not made up here; tests do so",
        "error-injection-rate error-injection-type",
    ),
    (
        "slow devices are found in the steps themselves: --log-straggler",
        "gpu-sniff-test-interval",
    ),
    (
        "--exit-interval saves and ends after so many steps; train on with other data by --load of "
        "that step and --finetune",
        "phase-transition-iterations",
    ),
    (
        ".bin and .idx files are always mapped, and never read through first; leave it out",
        "data-impl mmap-warmup",
    ),
    (
        "the floor of the learning rate is --min-lr, the length of its decay --lr-decay-iters or "
        "--lr-decay-samples",
        "lr-decay-ratio",
    ),
    (
        "name the key when the text is tokenized: stages.tokenize --json-keys",
        "json-key json-keys",
    ),
    (
        "an option of torchrun: give it there, before -m stages.pretrain",
        """
        nnodes node-rank nodes master-addr master-port rdzv-endpoint rdzv-backend rdzv-id
        max-restarts standalone
        """,
    ),
    (
        "torchrun or the scheduler gives each process its rank (RANK, LOCAL_RANK)",
        "rank",
    ),
    (
        "DeepSpeed is not used; --use-distributed-optimizer is its ZeRO stage 1",
        "deepspeed deepspeed-config zero-stage deepspeed-activation-checkpointing",
    ),
)

HARMLESS: dict[str, tuple[str, ...]] = {
    "expert-model-parallel-size": ("1",),
    "expert-tensor-parallel-size": ("1",),
    "data-parallel-sharding-strategy": ("no_shard",),
    "num-distributed-optimizer-instances": ("1",),
    "tensor-parallel-num-weight-shards": ("1",),
    "glu-linear-offset": ("0", "0.0"),
    "hybrid-attention-ratio": ("0", "0.0"),
    "hybrid-mlp-ratio": ("0", "0.0"),
    "main-grads-dtype": ("fp32",),
    "main-params-dtype": ("fp32",),
    "exp-avg-dtype": ("fp32",),
    "exp-avg-sq-dtype": ("fp32",),
    "error-injection-rate": ("0",),
    "error-injection-type": ("transient_error",),
    "spec": ("local",),
}
"""Values with which an absent option asks for nothing."""
