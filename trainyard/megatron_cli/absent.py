"""Unsupported flags of Megatron-LM and related programs, grouped by what to do instead. Data only.

Names are flags without leading dashes; `x-*` is every flag that begins with `x-`."""

from __future__ import annotations

LATER = "is not supported yet"

ABSENT: tuple[tuple[str, str], ...] = (
    (
        "it is an experiment with routers that this version does not have; leave it out",
        """
        moe-input-jitter-eps moe-router-topk-limited-devices moe-router-force-load-balancing
        moe-router-force-biased moe-latent-size
        """,
    ),
    (
        "make the checkpoint with stages.reshard --upcycle-num-experts, and train from it with "
        "--load and --finetune",
        "moe-use-upcycling moe-upcycling-granularity",
    ),
    ("4-bit training is not implemented; --fp8-format has 8 bits", "fp4-format fp4"),
    (
        "with --fp8-format, gradients of weights are in 8 bits too; leave it out",
        "no-fp8-wgrad",
    ),
    ("give --fp8-format e4m3", "fp8-e4m3"),
    ("give --fp8-format hybrid", "fp8-hybrid"),
    (
        "each depth of --mtp-num-layers has a transformer layer of its own; leave it out",
        "mtp-use-repeated-layer mtp-*",
    ),
    (
        "the instances of --num-distributed-optimizer-instances hold copies of each other's "
        "shards; leave it out, or give one instance, which shards over all replicas",
        """
        outer-dp-sharding-strategy expert-outer-dp-sharding-strategy enable-full-sharding-in-hsdp
        """,
    ),
    (
        "--data-parallel-sharding-strategy optim_grads_params shards the weights over the "
        "data-parallel ranks; leave it out",
        "tensor-parallel-num-weight-shards",
    ),
    (
        "pass a model of your own to the library (docs/library.md)",
        """
        heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json model-provider
        """,
    ),
    (
        "image models are not supported yet; leave it out for a training on token files",
        "vision-pretraining",
    ),
    (
        "reinforcement learning is not supported yet; leave it out for a training on token files",
        "perform-rl-step",
    ),
    ("distillation is not supported yet; leave it out for a training on token files", "logits-*"),
    (
        "it changes the model in a way that this version does not have; leave it out",
        """
        apply-residual-connection-post-layernorm no-rope-freq use-mup attention-output-gate
        no-weight-decay-cond-type
        """,
    ),
    (
        "matrix products accumulate as torch does by default; leave it out",
        "disable-bf16-reduced-precision-matmul",
    ),
    (
        "hierarchical and hybrid context parallelism do not exist here; choose --cp-comm-type p2p, "
        "a2a or allgather",
        "hierarchical-context-parallel-sizes hybrid-context-parallel",
    ),
    (
        "list the stages with --pipeline-model-parallel-layout, such as 'E|t*6|t*6L'",
        "standalone-embedding-stage pipeline-model-parallel-split-rank",
    ),
    (
        "use --recompute-activations, or for more control --recompute-granularity, "
        "--recompute-method and --recompute-num-layers",
        "checkpoint-num-layers checkpoint-in-cpu",
    ),
    (
        "use --sequence-parallel, which shards saved activations over the tensor-parallel ranks",
        "distribute-checkpointed-activations",
    ),
    (
        "--cpu-offloading-num-layers keeps activations of the first layers on the host",
        "fine-grained-activation-offloading",
    ),
    ("give --optimizer-cpu-offload", "cpu-optimizer"),
    (
        "all ranks start with the same weights, so the layout changes no result; leave it out",
        "data-parallel-random-init dump-param-to-param-group-map",
    ),
    (
        "a measurement takes --eval-iters batches of the training's --micro-batch-size and "
        "--global-batch-size",
        "eval-global-batch-size eval-micro-batch-size",
    ),
    (
        "the vocabulary is padded to a multiple of --make-vocab-size-divisible-by x "
        "--tensor-model-parallel-size; leave it out",
        "padded-vocab-size",
    ),
    (
        "name the tokenizer by --tokenizer-type and its files",
        "tokenizer-metadata",
    ),
    (
        "repeat the command: a run resumes from its last saved step; launchers and flows do that "
        "by themselves",
        "inprocess-restart",
    ),
    (
        "only tests inject faults; leave it out",
        "error-injection-rate error-injection-type",
    ),
    (
        "use --log-straggler, which finds slow devices from the times of the steps",
        "gpu-sniff-test-interval",
    ),
    (
        "--exit-interval saves and ends after a number of steps; then --load that step with "
        "--finetune to train on other data",
        "phase-transition-iterations",
    ),
    (
        ".bin and .idx files are always mapped and never read ahead as a whole; leave it out",
        "data-impl mmap-warmup",
    ),
    (
        "set the minimum learning rate with --min-lr, and the length of the decay with "
        "--lr-decay-iters or --lr-decay-samples",
        "lr-decay-ratio",
    ),
    (
        "name the keys when you tokenize the text: stages.tokenize --json-keys",
        "json-key json-keys",
    ),
    (
        "it is an option of torchrun; put it before -m stages.pretrain",
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
    "moe-input-jitter-eps": ("0", "0.0"),
    "outer-dp-sharding-strategy": ("no_shard",),
    "expert-outer-dp-sharding-strategy": ("no_shard",),
    "tensor-parallel-num-weight-shards": ("1",),
    "error-injection-rate": ("0",),
    "error-injection-type": ("transient_error",),
}
"""Values with which an unsupported option changes nothing."""

OF_THE_MODEL = """
moe-latent-size fp8-e4m3 fp8-hybrid no-fp8-wgrad fp4-format fp4
heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json model-provider
mtp-use-repeated-layer apply-residual-connection-post-layernorm no-rope-freq use-mup
attention-output-gate
"""
"""Those that make another model: a command that trains nothing refuses them too."""

OF_MEMORY = """
outer-dp-sharding-strategy expert-outer-dp-sharding-strategy enable-full-sharding-in-hsdp
tensor-parallel-num-weight-shards checkpoint-num-layers checkpoint-in-cpu
distribute-checkpointed-activations fine-grained-activation-offloading cpu-optimizer
standalone-embedding-stage
pipeline-model-parallel-split-rank
"""
"""Those that change the memory of a run: a plan refuses them."""

HUGGING_FACE = "give --tokenizer-type HuggingFaceTokenizer, with the folder of its tokenizer.json"

LATER_VALUES: dict[tuple[str, str], str] = {
    **{
        ("optimizer", name): f"the optimizer {name} {LATER}; give muon, adam, lion or sgd"
        for name in ("adaptive_muon", "soap")
    },
    ("tokenizer-type", "Llama3Tokenizer"): HUGGING_FACE,
    ("tokenizer-type", "MistralTokenizer"): HUGGING_FACE,
    (
        "tokenizer-type",
        "NullMultimodalTokenizer",
    ): "image models are not supported yet; give NullTokenizer",
    ("position-embedding-type", "mrope"): "image models are not supported yet; give rope",
    ("moe-router-load-balancing-type", "sinkhorn"): (
        f"balance by Sinkhorn's iterations {LATER}; give aux_loss, seq_aux_loss, global_aux_loss "
        "or none"
    ),
    ("cp-comm-type", "a2a+p2p"): (
        "hierarchical context parallelism does not exist here; give p2p, a2a or allgather"
    ),
    ("fp8-recipe", "custom"): (
        "quantizers of one's own do not exist here; give tensorwise or delayed"
    ),
    ("main-grads-dtype", "fp16"): (
        "leave it out and give --grad-reduce-in-fp16, which keeps and sums the gradients of --fp16 "
        "in 16 bits"
    ),
    ("ckpt-convert-format", "zarr"): "it is no longer written; give torch_dist or torch",
}
"""Values of options that we have, by flag and value, which are refused."""
