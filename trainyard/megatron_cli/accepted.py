"""Flags of Megatron-LM that are accepted and ignored, grouped by the reason. Data only.

Names are flags without leading dashes; `x-*` is every flag that begins with `x-`. Options of a
feature that a run does not use are ignored by Megatron-LM too; the flag that turns the feature on
is in `absent`."""

from __future__ import annotations

ACCEPTED: tuple[tuple[str, str], ...] = (
    (
        "--compile-layers, --attention-backend, --norm-backend and --optimizer-backend choose the "
        "kernels; fusing them changes no result",
        """
        no-masked-softmax-fusion masked-softmax-fusion no-bias-swiglu-fusion bias-swiglu-fusion
        no-bias-dropout-fusion bias-dropout-fusion no-rope-fusion rope-fusion apply-rope-fusion
        no-persist-layer-norm persist-layer-norm memory-efficient-layer-norm
        no-gradient-accumulation-fusion gradient-accumulation-fusion
        no-gradient-reduce-div-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl
        scaled-upper-triang-masked-softmax-fusion scaled-masked-softmax-fusion
        use-fused-weighted-squared-relu use-te-activation-func use-transformer-engine-op-fuser
        transformer-impl enable-cuda-graph external-cuda-graph cuda-graph-* onnx-safe use-kitchen*
        kitchen-* no-clone-scatter-output-in-embedding clone-scatter-output-in-embedding
        export-force-local-attention export-te-mcore-model
        """,
    ),
    ("the command says which model it trains", "export-model-type"),
    (
        "the model has one implementation, with Megatron core's parameter names",
        "use-mcore-models deprecated-use-mcore-models use-legacy-models",
    ),
    (
        "--overlap-grad-reduce, --overlap-param-gather and --tp-comm-overlap overlap communication "
        "with computation; pipeline stages always send while they compute",
        """
        overlap-p2p-communication no-overlap-p2p-communication overlap-p2p-comm
        no-async-tensor-model-parallel-allreduce async-tensor-model-parallel-allreduce
        overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step
        no-align-grad-reduce align-grad-reduce no-align-param-gather align-param-gather
        delay-grad-reduce delay-param-gather no-delay-grad-reduce
        defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute
        no-scatter-gather-tensors-in-pipeline scatter-gather-tensors-in-pipeline
        use-ring-exchange-p2p batch-p2p-communication no-batch-p2p-communication
        no-contiguous-buffers-in-local-ddp use-contiguous-buffers-in-local-ddp ddp-impl
        tp-comm-overlap-* disable-tp-comm-* tp-comm-split-* tp-comm-atomic-* tp-comm-bulk-*
        no-tp-comm-split-* no-tp-comm-bulk-* tp-comm-bootstrap-backend tp-comm-overlap-cfg
        """,
    ),
    (
        "NCCL has its own environment variables (NCCL_*), and process groups are created when they "
        "are needed",
        """
        nccl-communicator-config-path use-nccl-ub nccl-ub disable-symmetric-registration use-sharp
        sharp-enabled-group high-priority-stream-groups pipeline-model-parallel-comm-backend
        disable-gloo-process-groups enable-gloo-process-groups use-gloo-process-groups
        distributed-timeout-seconds-after-init create-all-gather-group
        """,
    ),
    (
        "initial weights follow from --seed and the parameter's name, on any device and at any "
        "degree of parallelism; a run that loads weights draws none",
        """
        no-initialization use-cpu-initialization init-model-with-meta-device lazy-mpu-init
        te-rng-tracker inference-rng-tracker
        """,
    ),
    (
        "dropout and the order of samples follow from --seed and the step, so checkpoints hold no "
        "state of random generators",
        "no-save-rng no-load-rng",
    ),
    (
        "the loss is computed in fp32, and query-key scaling is off unless "
        "--apply-query-key-layer-scaling is given",
        "fp16-lm-cross-entropy no-query-key-layer-scaling fp32-allreduce dynamic-loss-scale",
    ),
    (
        "checkpoints have one format, whole tensors by name, which loads at any degree of "
        "parallelism (docs/formats.md); each step is checked when it is read",
        """
        ckpt-format dist-ckpt-format use-dist-ckpt auto-detect-ckpt-format
        ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load
        ckpt-assume-constant-structure dist-ckpt-save-pre-mcore-014
        dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
        no-strict-fsdp-dtensor-load load-main-params-from-ckpt verify-integrity
        use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args
        """,
    ),
    (
        "a missing or unexpected tensor is always an error; with --finetune, --load-allow-missing "
        "and --load-allow-unexpected name exceptions",
        "dist-ckpt-strictness",
    ),
    (
        "files of the distributed optimizer from before 2024-02 are read without conversion",
        "ckpt-convert-update-legacy-dist-opt-format",
    ),
    (
        "with --async-save, a thread of the rank writes the step",
        "async-strategy use-persistent-ckpt-worker",
    ),
    (
        "one of the ranks that have a tensor writes it to the node-local save, once",
        "non-persistent-local-ckpt-algo",
    ),
    (
        "node-local saves are not replicated; tensors of a lost node come from --save, which "
        "--non-persistent-upload keeps recent",
        "replication replication-jump replication-factor",
    ),
    (
        "SIGTERM, SIGINT and SIGUSR1 always save and stop",
        "exit-signal",
    ),
    (
        "samples are read through the indices in --data-cache-path, which are found by content",
        """
        dataloader-fast-cache-load dataloader-defer-npy-index-mmap per-dataset-sequences-path
        sample-rate
        """,
    ),
    (
        "it belongs to services and experiments inside NVIDIA",
        """
        adlr-autoresume adlr-autoresume-interval no-one-logger enable-one-logger one-logger-*
        app-tag-run-name app-tag-run-version enable-ft-package calc-ft-timeouts
        run-workload-inspector-server disable-msc enable-msc otel-* enable-experimental
        config-logger-dir result-rejected-tracker-filename test-mode
        """,
    ),
    (
        "--moe-token-dispatcher-type and --moe-grouped-gemm choose how experts are reached and "
        "computed; fusing and overlapping the parts changes no result",
        "moe-* overlap-moe-expert-parallel-comm",
    ),
    (
        "scales change once a step, by maxima over all ranks of a pipeline stage",
        "fp8-interval tp-only-amax-red",
    ),
    (
        "weights stay in bfloat16 and are cast where they are multiplied",
        "keep-fp8-* reuse-grad-buf-for-mxfp8-param-ag",
    ),
    (
        "it only applies to FP4 training, and to FP8 with quantizers of one's own",
        "fp4-* fp8-quantizer-factory",
    ),
    (
        "with --multi-latent-attention, generation always keeps latents",
        "cache-mla-latents",
    ),
    (
        "convolution and scan of a Mamba layer are recomputed in the backward pass",
        "disable-mamba-mem-eff-path",
    ),
    (
        "a Mamba layer keeps its state in fp32, its convolution's inputs in the weights' type",
        "mamba-inference-*",
    ),
    (
        "sharded weights are gathered layer by layer, in memory that torch allocates; how changes "
        "no result",
        "fsdp-* megatron-fsdp-version suggested-communication-unit-size",
    ),
    (
        "the samples of a table of neighbours are always compared with those of the run",
        "retro-no-verify-neighbor-count retro-verify-neighbor-count",
    ),
    (
        "it only applies to inference; stages.generate generates text",
        """
        inference-* max-tokens-to-oom flash-decode use-legacy-static-engine symmetric-ar-type
        nccl-all-reduce-for-prefill mlp-chunks-for-prefill disable-chunked-prefill
        enable-chunked-prefill decode-only-cuda-graphs
        """,
    ),
    (
        "it only applies to reinforcement learning (--perform-rl-step)",
        "rl-* no-rl-* grpo-* langrl-* no-langrl-*",
    ),
    (
        "Megatron-LM's sft_retro.py does not use it either; instruction data names its task by the "
        "name of its file, and the encoder of a Retro rests",
        """
        task keep-last weight adaptor project-size stored-params eval-ppl debug add-retriever
        return-neighbor-ids add-offset-doc-ids offset-dict-path neighbors-path
        valid-neighbors-path database-path valid-database-path encoder-layers
        encoder-hidden-dropout encoder-attention-dropout k r m dpr-mode faiss-ckpt reuse-top
        original-db-file shuffle-topn chunk0 disable-encoder qa-space-pad retro-mask-encoder
        without-title prefix question-in-encoder reset-eval cyclic-train-iters
        """,
    ),
    (
        "the snapshot of --record-memory-history is in logs/ of --save",
        "memory-snapshot-path",
    ),
    (
        "with --optimizer-cpu-offload, torch's kernel updates on the CPU, memory is pinned, and "
        "copies overlap",
        """
        use-torch-optimizer-for-cpu-offload no-pin-cpu-grads no-pin-cpu-params
        overlap-cpu-optimizer-d2h-h2d
        """,
    ),
    (
        "it only applies with --inprocess-restart",
        """
        inprocess-max-iterations inprocess-monitor-* inprocess-progress-watchdog-interval
        inprocess-heartbeat-* inprocess-soft-timeout inprocess-hard-timeout
        inprocess-barrier-timeout inprocess-completion-timeout inprocess-last-call-wait
        inprocess-termination-grace-time inprocess-granularity inprocess-active-world-size
        inprocess-empty-cuda-cache
        """,
    ),
    (
        "torch manages the device's memory (set PYTORCH_CUDA_ALLOC_CONF)",
        "empty-unused-memory-level train-sync-interval",
    ),
    (
        "--manual-gc always collects when the validation loss is measured",
        "no-manual-gc-eval manual-gc-eval",
    ),
    (
        "stragglers are reported from the first step, without a controller or its port",
        "disable-straggler-on-startup straggler-ctrlr-port",
    ),
    (
        "spikes are always logged as warnings",
        "check-for-large-grads",
    ),
    (
        "gradients are summed in the type that stores them, fp32 unless --grad-reduce-in-bf16 is "
        "given",
        "ddp-reduce-scatter-with-fp32-accumulation",
    ),
    (
        "trainyard does not measure it",
        "log-energy log-max-attention-logit",
    ),
    (
        "--monitor-memory-continuously watches memory, every --memory-monitor-interval seconds",
        "log-memory-interval log-device-memory-used",
    ),
)

CLASS_FIELDS = """
init_method output_layer_init_method perform_initialization params_dtype timers
finalize_model_grads_func pipeline_dtype grad_scale_func enable_autocast autocast_dtype
variable_seq_lengths num_microbatches_with_partial_activation_checkpoints batch_p2p_comm
batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs no_sync_func grad_sync_func
param_sync_func _cpu_offloading_context cpu_offloading_weights cpu_offloading_activations
lazy_mpu_init fp8_wgrad fp8_param fp8_dot_product_attention fp8_multi_head_attention
hidden_dropout_func moe_token_dropping
"""
"""Fields of Megatron-LM's model classes that --yaml-cfg files have; no program of Megatron-LM has
them as options, and they are ignored here."""
