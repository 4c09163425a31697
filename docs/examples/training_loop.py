"""A training loop on the library alone: text to token files, a model, a checkpoint, text again."""

from pydoc_data.topics import topics  # the texts of Python's own help(): real English, at hand

from trainyard.api import (
    ALONE,
    BatchSize,
    DataConfig,
    GPTConfig,
    IndexedWriter,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    SampleFormat,
    SamplerShape,
    SamplingConfig,
    StepContents,
    StepOptions,
    TokenizerConfig,
    TrainState,
    build_gpt_datasets,
    build_loader,
    build_optimizer_schedule,
    build_tokenizer,
    build_train_module,
    built_in_provider,
    generate,
    init_parameters,
    load_model,
    model_sizes,
    model_tensors,
    open_checkpoint,
    open_output,
    optimal_dtype,
    optimizer_tensors,
    resolve_device,
    restore_training,
    save_step,
    to_dict,
)

STEPS, SEED = 200, 1234
SIZE = BatchSize(global_batch_size=16, micro_batch_size=8, dp=1)  # two micro-batches a step

# Text to Megatron token files. A token is a byte here; 256 ends a document.
tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=257))
with open_output("help.bin") as bin_file, open_output("help.idx") as idx_file:
    writer = IndexedWriter(bin_file, optimal_dtype(tokenizer.vocab_size))
    for text in topics.values():
        writer.add_document([[*text.encode(), tokenizer.eod]])
    writer.write_index(idx_file)

# Token files to batches, in the order in which Megatron-LM serves them.
data = DataConfig(data_path=("help",), split="1")
form = SampleFormat(seq_length=64, seed=SEED, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
train, _, _ = build_gpt_datasets(data, form, (STEPS * SIZE.global_batch_size, 0, 0))
shape = SamplerShape(len(train), SIZE.micro_batch_size, dp=1)
batches = build_loader(train, data, shape, consumed=0, dp_rank=0)

# The model, its optimizer, and their rates over the run: on this process alone, in fp32.
gpt = GPTConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=form.seq_length,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
vocab_size = gpt.padded_vocab_size(tokenizer.vocab_size)
rates = OptimizerConfig(lr=5e-3, min_lr=5e-4, lr_decay_style="cosine", lr_warmup_iters=20)
optimizer_schedule = build_optimizer_schedule(rates, STEPS, SIZE.global_batch_size)


def build():
    """The model in training, without weights yet."""
    return build_train_module(
        built_in_provider(gpt, vocab_size),
        model_sizes(gpt, SIZE.micro_batch_size),
        ParallelConfig(),
        rates,
        PrecisionConfig(),
        ALONE,
        resolve_device("auto"),
        StepOptions(seed=SEED),
    )


train_module = build()
for chunk in train_module.chunks:  # several with virtual pipeline stages; each knows its own layers
    init_parameters(chunk, SEED)
train_module.optimizer.adopt_model_parameters()

consumed = 0  # schedules count samples, as Megatron-LM's do
for step in range(1, STEPS + 1):
    result = train_module.step(step, SIZE, batches, optimizer_schedule.at(consumed))
    consumed += SIZE.global_batch_size
    if step == 1 or step % 20 == 0:
        print(f"step {step:3d}  loss {result.lm_loss:.4f}  grad norm {result.grad_norm:.3f}")

# A checkpoint that carries its model and its tokenizer.
train_module.optimizer.finish_parameters()
position = TrainState(
    step=STEPS, consumed_train_samples=consumed, scheduled_samples=consumed, num_updates=STEPS
)
save_step(
    "run",
    STEPS,
    {**model_tensors(train_module.chunks), **optimizer_tensors(train_module)},
    StepContents(
        state=position.state_dict(),
        documents={"config.json": {"model": to_dict(gpt), "padded_vocab_size": vocab_size}},
        files={f"tokenizer/{name}": content for name, content in tokenizer.files().items()},
        lineage="",
        stage_name="a loop of my own",
    ),
)

# Everything back, from the checkpoint alone.
loaded = load_model("run")
prompt = "The value of "
sampling = SamplingConfig(temperature=0.7, top_k=0)
result = generate(loaded.model, [list(prompt.encode())], 40, sampling=sampling, vocab_size=256)
print(prompt + bytes(result.outputs[0]).decode(errors="replace"))

# To resume: every tensor is read by its name, under any layout.
again = build()
with open_checkpoint("run") as checkpoint:  # the latest step; "run/iter_0000200" names one
    position = restore_training(checkpoint, again)
    corner = checkpoint.read_slice("model.embedding.word_embeddings.weight", (0, 0), (2, 3))
    print(f"step {position.step}, {position.consumed_train_samples} samples")
    print(f"{len(checkpoint.names())} tensors, a corner of one: {corner.tolist()}")
