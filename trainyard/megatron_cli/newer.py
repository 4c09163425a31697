"""Flags that Megatron-LM's main branch has and its releases up to 0.15 lack. Data only.

Rows as in `accepted` and `absent`."""

from __future__ import annotations

NEWER_ACCEPTED: tuple[tuple[str, str], ...] = (
    (
        "fusing kernels changes no result; --compile-layers, --attention-backend, --norm-backend "
        "and --optimizer-backend choose them",
        """
        dense-grouped-gemm use-grouped-gemm-for-dense-mlp fused-single-qkv-rope
        fused-residual-rmsnorm disable-jit-fuser optimizer-cuda-graph full-cuda-graph
        activation-func-fp8-input-store mla-down-proj-fusion
        """,
    ),
    (
        "--moe-token-dispatcher-type and --moe-grouped-gemm choose how experts are reached and "
        "computed; fusing and overlapping the parts changes no result",
        """
        use-mok-megakernel mok-* high-priority-a2a-comm-stream log-moe-overload-factor
        use-grouped-gemm-for-shared-expert overlap-dispatch-backward-with-experts-wgrad
        ep-overlap-early-attn-memory-release actual-vocab-size save-tokens-per-expert-interval
        """,
    ),
    (
        "it only applies to FP8 and FP4 training (--fp8-format, --fp4-format)",
        "te-precision-config-file disable-parameter-transpose-cache",
    ),
    (
        "it only applies with --experimental-attention-variant",
        """
        linear-attention-freq linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim
        linear-num-key-heads linear-num-value-heads linear-cp-mode gdn-* dsa-* csa-*
        apply-dsa-kernel-fusion
        """,
    ),
    (
        "it only applies with --enable-hyper-connections",
        "num-residual-streams mhc-* use-fused-mhc recompute-hyper-connection-num-layers",
    ),
    ("it only applies with --use-mup", "mup-*"),
    ("it only applies with --qk-clip", "qk-clip-alpha qk-clip-threshold"),
    (
        "it only applies to optimizers that this version does not have (--optimizer)",
        "soap-* adaptive-muon-* use-layer-wise-distributed-optimizer",
    ),
    (
        "the fp32 parameters are kept whole beside 16-bit weights, not as what those lack",
        "store-param-remainders no-store-param-remainders",
    ),
    ("weight decay is always decoupled from the gradient", "decoupled-weight-decay"),
    (
        "SIGTERM, SIGINT and SIGUSR1 always save and stop",
        "exit-signal-handler-for-dataloader exit-signal-handler-for-training",
    ),
    ("each set is named by its prefix", "validation-set-names"),
    (
        "--log-throughput logs it, and --log-interval says over how many steps",
        "log-throughput-to-tensorboard throughput-window-size",
    ),
    (
        "the norm of the gradient and the time of each step are always logged",
        "log-l2-norm-grad-to-tensorboard log-runtime-to-tensorboard runtime-time-unit",
    ),
    (
        "--log-memory-to-tensorboard and --monitor-memory-continuously log memory",
        "memory-keys",
    ),
    (
        "--log-level chooses what is logged",
        "filter-warnings no-filter-warnings modules-to-filter set-level-for-all-loggers",
    ),
    ("the run folder has the options of the run", "save-config-filepath"),
    (
        "checkpoints have one format, whole tensors by name, which loads at any degree of "
        "parallelism (docs/formats.md); each step is checked when it is read",
        """
        ckpt-fully-parallel-* ckpt-load-validate-sharding-integrity
        no-ckpt-load-validate-sharding-integrity hetereogenous-dist-checkpoint
        """,
    ),
    ("with --async-save, a thread of the rank writes the step", "async-ckpt-*"),
    ("each checkpoint has its tokenizer", "save-tokenizer-assets no-save-tokenizer-assets"),
    (
        "it only applies with --profile",
        "pytorch-profiler-* record-shapes nvtx-ranges",
    ),
    (
        "torch and NCCL have their own environment variables (TORCH_NCCL_*, TORCH_FR_*)",
        "flight-recorder-* no-flight-recorder-*",
    ),
    (
        "it only applies to reinforcement learning (--perform-rl-step)",
        "refit-* no-refit-*",
    ),
    (
        "it only applies to inference; stages.generate generates text",
        """
        num-speculative-tokens use-same-sampling-seed-across-dp-ranks return-log-probs
        offset-sampling-seed-by-dp-rank skip-prompt-log-probs use-flashinfer-fused-rope
        """,
    ),
    (
        "it only applies with --fine-grained-activation-offloading",
        """
        offload-modules min-offloaded-tensor-size delay-offload-until-cuda-graph
        fine-grained-offloading-*
        """,
    ),
    ("main weights are always kept in fp32", "preserve-fp32-weights"),
    (
        "it only applies to packed conversations (--sft)",
        """
        sequence-packing-scheduler max-seqlen-per-dp-cp-rank min-hybrid-context-parallel-size
        thd-max-packed-sequences sft-mock-dataset-config-json varlen-*
        """,
    ),
    (
        "a loss or gradient that is no number always ends the run or skips the step; "
        "--no-check-for-nan-in-loss-and-grad turns the check off",
        "check-optimizer-step-success skip-sync-grad-norm-across-mp",
    ),
    (
        "the summary goes into the run folder",
        "performance-summary-file",
    ),
)

NEWER_ABSENT: tuple[tuple[str, str], ...] = (
    (
        "main weights and gradients are fp32; --grad-reduce-in-bf16 sums gradients over ranks in "
        "bfloat16",
        "megatron-fsdp-* no-preserve-fp32-weights",
    ),
    (
        "it changes the model in a way that this version does not have; leave it out",
        """
        rotary-base-per-layer head-wise-attn-gate enable-hyper-connections qk-clip engram-*
        apply-wd-to-qk-layernorm
        """,
    ),
    (
        "linear and sparse attention are not supported yet; leave it out",
        "experimental-attention-variant linear-attention-type",
    ),
    (
        "hierarchical and hybrid context parallelism do not exist here; choose --cp-comm-type p2p, "
        "a2a or allgather",
        "cp-partition-mode dynamic-context-parallel",
    ),
    (
        "give --optimizer-cpu-offload, which also updates on the CPU",
        "offload-optimizer-states",
    ),
    (
        "Adam here is AdamW; leave it out",
        "no-decoupled-weight-decay",
    ),
    (
        "the first measurement is after --eval-interval steps",
        "start-eval-at-iter",
    ),
    (
        "steps hold weights and the optimizer; read tensors with stages.inspect, or gradients in a "
        "program of your own (docs/library.md)",
        "save-params-interval save-activations-interval save-wgrads-interval save-dgrads-interval",
    ),
    (
        "give --save-retain-interval, and --save-keep-last for the number of newest steps",
        "most-recent-k",
    ),
    (
        "the vocabulary is padded to a multiple of --make-vocab-size-divisible-by x "
        "--tensor-model-parallel-size; give 1 for the least",
        "no-pad-vocab-size",
    ),
    (
        "the last id of a NullTokenizer ends a document",
        "null-tokenizer-eod-id null-tokenizer-pad-id",
    ),
    (
        "distillation is not supported yet, and stages.quantize writes 8-bit weights; leave it out",
        "export-* distillation-* teacher-* finetune-hf-dataset finetune-data-split modelopt-*",
    ),
    ("adapters are not supported yet; leave it out", "lora-* peft-*"),
    ("packed samples of varied length are not supported yet; leave it out", "use-varlen-dataset"),
    (
        "--deterministic-mode gives the same bits every time",
        "batch-invariant-mode",
    ),
    (
        "gradients are summed in fp32, or all of them in bfloat16 with --grad-reduce-in-bf16",
        """
        ddp-param-name-patterns-for-fp32-local-accumulation
        param-name-patterns-for-fp32-local-accumulation
        """,
    ),
    (
        "encoder and decoder have the same layout; choose it with --tensor-model-parallel-size and "
        "--pipeline-model-parallel-size",
        "encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size",
    ),
)

NEWER_HARMLESS: dict[str, tuple[str, ...]] = {
    "megatron-fsdp-main-params-dtype": ("fp32", "auto"),
    "megatron-fsdp-main-grads-dtype": ("fp32", "auto"),
    "megatron-fsdp-grad-comm-dtype": ("fp32", "auto"),
    "cp-partition-mode": ("zigzag",),
    "most-recent-k": ("-1",),
    "encoder-tensor-model-parallel-size": ("0",),
    "encoder-pipeline-model-parallel-size": ("0",),
}
"""Values with which an unsupported option changes nothing."""

NEWER_MODEL = """
rotary-base-per-layer head-wise-attn-gate enable-hyper-connections experimental-attention-variant
linear-attention-type
"""
"""Unsupported options that make another model."""
