"""The flags that Megatron-LM's training programs take: those of its parsers (v0.7 to v0.15 and what
came later), older spellings, and those of guides."""

TRAINING = """
account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
accumulate-allreduce-grads-in-fp32 activation-func-clamp-value adam-beta1 adam-beta2 adam-eps
add-qkv-bias adlr-autoresume adlr-autoresume-interval allow-ambiguous-pad-tokens app-tag-run-name
app-tag-run-version apply-layernorm-1p apply-query-key-layer-scaling
apply-residual-connection-post-layernorm async-save async-strategy attention-backend
attention-dropout attention-softmax-in-fp32 auto-detect-ckpt-format batch-size bert-embedder-type
bert-load bert-no-binary-head bf16 biencoder-projection-dim biencoder-shared-query-context-model
block-data-path cache-mla-latents calc-ft-timeouts calculate-per-token-loss check-for-large-grads
check-for-spiky-loss check-weight-hash-across-dp-replicas-interval checkpoint-activations
ckpt-assume-constant-structure ckpt-convert-format ckpt-convert-save
ckpt-convert-update-legacy-dist-opt-format ckpt-format ckpt-fully-parallel-load
ckpt-fully-parallel-save ckpt-step classes-fraction clip-grad config-logger-dir
context-parallel-size cp-comm-type cpu-offloading-num-layers cross-entropy-fusion-impl
cross-entropy-loss-fusion cuda-graph-impl cuda-graph-scope cuda-graph-warmup-steps data-args-path
data-cache-path data-parallel-random-init data-parallel-sharding-strategy data-path
data-per-class-fraction dataloader-defer-npy-index-mmap dataloader-fast-cache-load
dataloader-inter-document-masking dataloader-type dataset-size ddp-average-in-collective
ddp-bucket-size ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw
ddp-reduce-scatter-with-fp32-accumulation DDP-impl decode-only-cuda-graphs
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers decoder-num-layers
decoder-seq-length decoupled-lr decoupled-min-lr decrease-batch-size-if-needed
defer-embedding-wgrad-compute delay-grad-reduce delay-param-gather delay-wgrad-compute
deterministic-mode dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size
dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp
dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs disable-bf16-reduced-precision-matmul
disable-bias-linear disable-chunked-prefill disable-gloo-process-groups
disable-mamba-mem-eff-path disable-msc disable-straggler-on-startup
disable-symmetric-registration disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag
disable-tp-comm-split-rs dist-ckpt-format dist-ckpt-optim-fully-reshardable
dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness distrib-optim-fully-reshardable-mem-efficient
distribute-saved-activations distributed-backend distributed-timeout-minutes
distributed-timeout-seconds-after-init dump-param-to-param-group-map embedding-init-method-std
embedding-path empty-unused-memory-level enable-cuda-graph enable-experimental enable-ft-package
enable-full-sharding-in-hsdp encoder-num-layers encoder-seq-length end-weight-decay
eod-mask-loss epochs error-injection-rate error-injection-type eval-global-batch-size eval-interval
eval-iters evidence-data-path exit-duration-in-mins exit-interval exit-on-missing-checkpoint
exit-signal exit-signal-handler exp-avg-dtype exp-avg-sq-dtype expert-model-parallel-size
expert-tensor-parallel-size external-cuda-graph ffn-hidden-size fim-data fim-fragment-rate
fim-no-prefix fim-rate fim-split-sample fim-spm-rate fine-grained-activation-offloading finetune
first-last-layers-bf16 flash-decode fp16 fp16-lm-cross-entropy fp32-residual-connection fp4-format
fp4-param-gather fp4-quantizer-factory fp4-recipe fp8-amax-compute-algo fp8-amax-history-len
fp8-format fp8-interval fp8-margin fp8-param-gather fp8-quantizer-factory fp8-recipe
fsdp-double-buffer full-validation global-batch-size glu-linear-offset gpu-sniff-test-interval
grad-reduce-in-bf16 gradient-clip-val group-query-attention grpo-clamp-eps-lower
grpo-clamp-eps-upper grpo-default-temperature grpo-default-top-p grpo-entropy-term-weight
grpo-filter-groups-with-same-reward grpo-group-size grpo-iterations grpo-kl-beta
grpo-prompts-per-step head-lr-mult heterogeneous-layers-config-encoded-json
heterogeneous-layers-config-path hidden-dropout hidden-size hierarchical-context-parallel-sizes
high-priority-stream-groups hybrid-attention-ratio hybrid-context-parallel hybrid-layer-pattern
hybrid-mlp-ratio hybrid-override-pattern hysteresis ict-head-size ict-load img-h img-w
indexer-batch-size indexer-log-interval inference-batch-times-seqlen-threshold
inference-dynamic-batching inference-dynamic-batching-block-size
inference-dynamic-batching-buffer-guaranteed-fraction
inference-dynamic-batching-buffer-overflow-factor inference-dynamic-batching-buffer-size-gb
inference-dynamic-batching-max-requests-override inference-dynamic-batching-max-tokens-override
inference-dynamic-batching-num-cuda-graphs
inference-dynamic-batching-track-paused-request-events
inference-dynamic-batching-unified-memory-level inference-max-batch-size inference-max-requests
inference-max-seq-length inference-rng-tracker inference-wandb-logging-step-interval init-method
init-method-std init-method-xavier-uniform init-model-with-meta-device initial-loss-scale
inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout
inprocess-empty-cuda-cache inprocess-granularity inprocess-hard-timeout
inprocess-heartbeat-interval inprocess-heartbeat-timeout inprocess-last-call-wait
inprocess-max-iterations inprocess-monitor-process-interval inprocess-monitor-thread-interval
inprocess-progress-watchdog-interval inprocess-restart inprocess-soft-timeout
inprocess-termination-grace-time is-hybrid-model iter-per-epoch iterations-to-skip json-key
json-keys keep-fp8-transpose-cache kv-channels kv-lora-rank langrl-env-config
langrl-external-server langrl-inference-server-conversation-template langrl-inference-server-type
lazy-mpu-init legacy-tokenizer load load-main-params-from-ckpt local-rank
log-batch-size-to-tensorboard log-energy log-interval log-memory-to-tensorboard
log-num-zeros-in-grad log-params-norm log-progress log-straggler log-throughput
log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard
log-memory-interval log-device-memory-used log-max-attention-logit
logging-level loss-scale loss-scale-window lr lr-decay-iters lr-decay-ratio lr-decay-samples
lr-decay-style lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples
lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style main-grads-dtype main-params-dtype
make-vocab-size-divisible-by mamba-head-dim mamba-num-groups mamba-num-heads mamba-state-dim
manual-gc manual-gc-interval mask-factor mask-prob mask-type max-position-embeddings
max-tokens-to-oom memory-monitor-interval memory-snapshot-path merge-file micro-batch-size
microbatch-group-size-per-virtual-pipeline-stage mid-level-dataset-surplus min-loss-scale min-lr
mlp-chunks-for-prefill mock-data model-parallel-size moe-apply-probs-on-input moe-aux-loss-coeff
moe-deepep-num-sms moe-enable-deepep moe-expert-capacity-factor moe-extended-tp
moe-ffn-hidden-size moe-grouped-gemm moe-input-jitter-eps moe-layer-freq moe-layer-recompute
moe-pad-expert-input-to-capacity moe-permute-fusion moe-router-bias-update-rate
moe-router-dtype moe-router-enable-expert-bias moe-router-fusion moe-router-group-topk
moe-router-load-balancing-type moe-router-num-groups moe-router-pre-softmax
moe-router-score-function moe-router-topk moe-router-topk-scaling-factor
moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-token-dispatcher-type
moe-token-drop-policy moe-upcycling-granularity moe-use-legacy-grouped-gemm moe-use-upcycling
moe-z-loss-coeff monitor-memory-continuously mrope-section mscale mscale-all-dim
mtp-loss-scaling-factor mtp-num-layers multi-latent-attention multiple-validation-sets
muon-extra-scale-factor muon-momentum muon-no-split-qkv muon-num-ns-steps muon-scale-mode
muon-tp-mode muon-use-nesterov nccl-all-reduce-for-prefill nccl-communicator-config-path
no-align-grad-reduce no-align-param-gather no-async-tensor-model-parallel-allreduce
no-barrier-with-level-1-timing no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save
no-clone-scatter-output-in-embedding no-create-attention-mask-in-dataloader no-data-sharding
no-fp8-wgrad no-gradient-accumulation-fusion no-gradient-reduce-div-fusion no-initialization
no-load-optim no-load-rng no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard
no-manual-gc-eval no-masked-softmax-fusion no-mmap-bin-files no-one-logger
no-overlap-p2p-communication no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params
no-position-embedding no-query-key-layer-scaling no-rope-freq no-rope-fusion no-save-optim
no-save-rng no-scatter-gather-tensors-in-pipeline no-strict-fsdp-dtensor-load
no-use-tokenizer-model-from-checkpoint-args non-persistent-ckpt-type
non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir
non-persistent-save-interval norm-epsilon normalization num-attention-heads num-channels
num-classes num-dataset-builder-threads num-distributed-optimizer-instances num-experts num-layers
num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 num-layers-per-virtual-pipeline-stage
num-query-groups num-virtual-stages-per-pipeline-rank num-workers object-storage-cache-path
one-logger-async one-logger-project one-logger-run-name onnx-safe openai-gelu optimizer
optimizer-cpu-offload optimizer-offload-fraction otel-enabled outer-dp-sharding-strategy
output-bert-embeddings overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce
overlap-moe-expert-parallel-comm overlap-p2p-communication-warmup-flush overlap-param-gather
overlap-param-gather-with-optimizer-step override-opt-param-scheduler
override-opt_param-scheduler padded-vocab-size patch-dim per-dataset-sequences-path
per-split-data-args-path perform-rl-step persistent-save-interval phase-transition-iterations
pipeline-model-parallel-comm-backend pipeline-model-parallel-layout pipeline-model-parallel-size
pipeline-model-parallel-split-rank position-embedding-type pretrained-checkpoint profile
profile-ranks profile-step-end profile-step-start q-lora-rank qk-head-dim qk-l2-norm qk-layernorm
qk-pos-emb-head-dim query-in-block-prob quick-geglu rampup-batch-size recompute-activations
recompute-granularity recompute-method recompute-modules recompute-num-layers
record-memory-history relative-attention-max-distance relative-attention-num-buckets replication
replication-factor replication-jump rerun-mode reset-attention-mask reset-position-ids
result-rejected-tracker-filename retriever-report-topk-accuracies retriever-score-scaling
retriever-seq-length retro-add-retriever retro-attention-gate retro-cyclic-train-iters
retro-encoder-attention-dropout retro-encoder-hidden-dropout retro-encoder-layers
retro-no-verify-neighbor-count retro-num-neighbors retro-num-retrieved-chunks retro-project-dir
reuse-grad-buf-for-mxfp8-param-ag rl-partial-rollouts rl-prompts-per-eval
rl-use-sequence-packing rope-scaling-factor rope-type rotary-base rotary-interleaved
rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor
run-workload-inspector-server sample-rate save save-interval save-performance-summary
save-retain-interval seed seq-length sequence-parallel sft sgd-momentum sharp-enabled-group
short-seq-prob skip-train softmax-type spec split squared-relu standalone-embedding-stage
start-weight-decay step-batch-size-schedule straggler-ctrlr-port straggler-minmax-count
suggested-communication-unit-size swiglu swin-backbone-type symmetric-ar-type te-rng-tracker
tensor-model-parallel-size tensor-parallel-num-weight-shards tensorboard-dir
tensorboard-log-interval tensorboard-queue-size test-data-path test-mode tiktoken-num-special-tokens
tiktoken-pattern tiktoken-special-tokens timing-log-level timing-log-option titles-data-path
tokenizer-metadata tokenizer-model tokenizer-type torch-fsdp2-no-reshard-after-forward
tp-comm-bootstrap-backend tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad
train-data-path train-iters train-samples train-steps train-sync-interval transformer-impl
trust-remote-code untie-embeddings-and-output-weights use-checkpoint-args
use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler use-cpu-initialization
use-custom-fsdp use-dist-ckpt use-distributed-optimizer use-flash-attn
use-fused-weighted-squared-relu use-legacy-models use-legacy-static-engine use-mcore-models
use-megatron-fsdp use-mp-args-from-checkpoint-args use-mup use-nccl-ub use-one-sent-docs
use-persistent-ckpt-worker use-precision-aware-optimizer use-pytorch-profiler
use-ring-exchange-p2p use-rope-scaling use-rotary-position-embeddings use-sharp
use-te-activation-func use-torch-fsdp2 use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping
v-head-dim valid-data-path verify-integrity vision-backbone-type vision-pretraining
vision-pretraining-type vocab-extra-ids vocab-file vocab-size wandb-entity wandb-exp-name
wandb-project wandb-save-dir warmup warmup-steps weight-decay weight-decay-incr-style
wgrad-deferral-limit window-attn-skip-freq window-size world-size yaml-cfg
"""

MAIN = """
activation-func-fp8-input-store actual-vocab-size adaptive-muon-beta2 adaptive-muon-eps
apply-dsa-kernel-fusion apply-wd-to-qk-layernorm async-ckpt-cpu-priority async-ckpt-io-priority
async-ckpt-use-cpu-shm attention-output-gate batch-invariant-mode check-optimizer-step-success
ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-process-group
ckpt-fully-parallel-load-replicate-local ckpt-fully-parallel-save-process-group
ckpt-fully-parallel-save-replicate-local ckpt-load-validate-sharding-integrity cp-partition-mode
csa-compress-ratios csa-dense-mode csa-window-size cuda-graph-modules
ddp-param-name-patterns-for-fp32-local-accumulation decoupled-weight-decay
delay-offload-until-cuda-graph dense-grouped-gemm disable-jit-fuser dsa-indexer-n-heads
dsa-kernel-backend dynamic-context-parallel enable-hyper-connections
encoder-pipeline-model-parallel-size encoder-tensor-model-parallel-size engram-config
ep-overlap-early-attn-memory-release exit-signal-handler-for-dataloader
exit-signal-handler-for-training experimental-attention-variant export-kd-teacher-load
export-model-type export-quant-cfg filter-warnings fine-grained-offloading-max-inflight-offloads
flight-recorder-dump-path flight-recorder-trace-buffer-size fsdp-db-use-persist-buf-on-alloc-fail
full-cuda-graph fused-residual-rmsnorm fused-single-qkv-rope gdn-conv-pad-alignment
gdn-pre-gated-delta-rule-fusion head-wise-attn-gate hetereogenous-dist-checkpoint
high-priority-a2a-comm-stream inference-cuda-graph-scope inference-shards
keep-fp8-weight-transpose-cache-when-using-custom-fsdp kitchen-config-file linear-attention-freq
linear-attention-type linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads
linear-num-value-heads linear-value-head-dim log-l2-norm-grad-to-tensorboard
log-moe-overload-factor log-runtime-to-tensorboard log-throughput-to-tensorboard lora-rank
mamba-inference-conv-states-dtype max-seqlen-per-dp-cp-rank megatron-fsdp-grad-comm-dtype
megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype memory-keys mhc-recompute-layer-num
mhc-sinkhorn-iterations min-hybrid-context-parallel-size min-offloaded-tensor-size
mla-down-proj-fusion modules-to-filter moe-latent-size moe-routing-trace-path mok-minibatch-size
most-recent-k muon-scalar-optimizer muon-split-qkv mup-attn-scale-power mup-base-head-dim
mup-base-hidden-size mup-embedding-mult mup-output-mult mup-width-mult no-check-for-nan-in-grad
no-check-for-nan-in-loss no-ckpt-load-validate-sharding-integrity no-decoupled-weight-decay
no-filter-warnings no-flight-recorder-dump-on-timeout no-pad-vocab-size no-save-tokenizer-assets
no-store-param-remainders null-tokenizer-eod-id null-tokenizer-pad-id num-residual-streams
num-speculative-tokens nvtx-ranges offload-modules offload-optimizer-states
offset-sampling-seed-by-dp-rank optimizer-cuda-graph overlap-dispatch-backward-with-experts-wgrad
param-name-patterns-for-fp32-local-accumulation peft-scheme pytorch-profiler-collect-callstack
pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes qk-clip qk-clip-alpha
qk-clip-threshold recompute-hyper-connection-num-layers record-shapes refit-execution-batch-bytes
refit-method return-log-probs rl-inference-tensor-model-parallel-size rl-profile
rotary-base-per-layer runtime-time-unit s3-cache-path save-activations-interval
save-config-filepath save-dgrads-interval save-params-interval save-tokenizer-assets
save-tokens-per-expert-interval save-wgrads-interval sequence-packing-scheduler
set-level-for-all-loggers sft-mock-dataset-config-json skip-prompt-log-probs
skip-sync-grad-norm-across-mp soap-precondition-frequency soap-shampoo-beta soap-use-kl-shampoo
start-eval-at-iter store-param-remainders te-precision-config-file throughput-window-size
tokenizer-special-tokens tp-comm-overlap-disable-fc1 tp-only-amax-red use-flashinfer-fused-rope
use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert use-kitchen-attention
use-layer-wise-distributed-optimizer use-mok-megakernel use-same-sampling-seed-across-dp-ranks
use-varlen-dataset validation-set-names varlen-mock-dataset-config-json
"""
"""Flags of Megatron-LM's main branch that no release up to 0.15 has."""

CHOICES: dict[str, str] = {
    "attention-backend": "flash fused unfused local auto",
    "ckpt-convert-format": "torch torch_dist zarr",
    "ckpt-format": "torch torch_dist zarr torch_dcp fsdp_dtensor",
    "cp-comm-type": "p2p a2a allgather a2a+p2p",
    "data-parallel-sharding-strategy": "no_shard optim optim_grads optim_grads_params",
    "dataloader-type": "single cyclic external",
    "distributed-backend": "nccl gloo",
    "exp-avg-dtype": "fp32 fp16 bf16 fp8",
    "exp-avg-sq-dtype": "fp32 fp16 bf16 fp8",
    "fp8-amax-compute-algo": "most_recent max",
    "fp8-format": "e4m3 hybrid",
    "fp8-recipe": "tensorwise delayed mxfp8 blockwise custom",
    "lr-decay-style": "constant linear cosine inverse-square-root WSD",
    "lr-wsd-decay-style": "exponential linear cosine minus_sqrt",
    "main-grads-dtype": "fp32 bf16 fp16",
    "main-params-dtype": "fp32 fp16",
    "moe-router-dtype": "fp32 fp64",
    "moe-router-load-balancing-type": "aux_loss seq_aux_loss global_aux_loss sinkhorn none",
    "moe-router-score-function": "softmax sigmoid",
    "moe-token-dispatcher-type": "allgather alltoall alltoall_seq flex",
    "moe-token-drop-policy": "probs position",
    "muon-scale-mode": "spectral unit_rms_norm shape_scaling",
    "muon-tp-mode": "blockwise duplicated distributed",
    "non-persistent-ckpt-type": "global local in_memory",
    "normalization": "LayerNorm RMSNorm",
    "optimizer": "adam sgd muon dist_muon lion soap adaptive_muon",
    "position-embedding-type": "learned_absolute rope yarn mrope relative none",
    "recompute-granularity": "full selective",
    "recompute-method": "uniform block",
    "recompute-modules": "core_attn moe_act layernorm mla_up_proj mlp moe shared_experts",
    "rerun-mode": "disabled validate_results report_stats report_determinism_stats",
    "softmax-type": "vanilla off-by-one learnable",
    "timing-log-option": "max minmax all",
    "tokenizer-type": """
        BertWordPieceLowerCase BertWordPieceCase GPT2BPETokenizer SentencePieceTokenizer
        GPTSentencePieceTokenizer HuggingFaceTokenizer Llama2Tokenizer Llama3Tokenizer
        MistralTokenizer TikTokenizer MultimodalTokenizer NullTokenizer NullMultimodalTokenizer
        SFTTokenizer
    """,
    "weight-decay-incr-style": "constant linear cosine",
}
"""Values that Megatron-LM's options of a training offer, of 0.7 to main."""
