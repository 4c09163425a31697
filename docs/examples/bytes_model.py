"""A model, data and loss of your own, trained by one call on any number of ranks."""

import logging
import os
from pydoc_data.topics import topics  # the texts of Python's own help(): real English, at hand

import numpy as np
import torch
from torch import nn

from trainyard.api import (
    ColumnParallelLinear,
    GPTConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    PretrainConfig,
    ProvidedData,
    RowParallelLinear,
    TokenizerConfig,
    TrainingConfig,
    VocabParallelEmbedding,
    pretrain,
    vocab_parallel_cross_entropy,
)

LAYERS, WIDTH, LENGTH, VOCAB = 4, 64, 64, 256


class Layer(nn.Module):
    """Each token sees itself and the one that is 1, 2, 4, ... places before it."""

    def __init__(self, number, parallel):
        super().__init__()
        self.reach = 2**number
        self.layernorm = nn.LayerNorm(WIDTH)
        self.fc1 = ColumnParallelLinear(2 * WIDTH, 4 * WIDTH, bias=True, parallel=parallel)
        self.fc2 = RowParallelLinear(4 * WIDTH, WIDTH, bias=True, parallel=parallel)

    def forward(self, hidden):  # (s, b, h)
        seen = self.layernorm(hidden)
        before = torch.cat([torch.zeros_like(seen[: self.reach]), seen[: -self.reach]])
        inner = self.fc1(torch.cat([seen, before], dim=-1))  # (s, b, 4 h / tp)
        return hidden + self.fc2(nn.functional.gelu(inner))


class ByteModel(nn.Module):
    """The part of the model that a pipeline stage holds; layers keep their global numbers."""

    def __init__(self, parallel, pipeline_stage):
        super().__init__()
        self.parallel, self.pipeline_stage = parallel, pipeline_stage
        held = {str(n): Layer(n, parallel) for n in pipeline_stage.layer_numbers(LAYERS)}
        self.layers = nn.ModuleDict(held)
        if pipeline_stage.has_embedding:
            self.embedding = VocabParallelEmbedding(VOCAB, WIDTH, parallel=parallel)
        if pipeline_stage.has_output:
            self.output_layer = ColumnParallelLinear(WIDTH, VOCAB, bias=False, parallel=parallel)

    def forward_step(self, hidden, batch):
        """hidden: (s, b, h) of the stage before, None on the first. Returns those for the
        next stage, or on the last one the loss of every token, (b, s)."""
        if hidden is None:
            hidden = self.embedding(batch["tokens"].t())
        for layer in self.layers.values():
            hidden = layer(hidden)
        if not self.pipeline_stage.has_output:
            return hidden
        logits = self.output_layer(hidden)  # (s, b, V / tp)
        return vocab_parallel_cross_entropy(logits, batch["labels"].t(), self.parallel).t()


class Windows:
    """Samples: any object with a length and items that are dicts of arrays."""

    def __init__(self, text):
        self.text = np.frombuffer(text, np.uint8).astype(np.int64)

    def __len__(self):
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, index):
        piece = self.text[index * LENGTH : (index + 1) * LENGTH + 1]
        mask = np.ones(LENGTH, np.float32)  # every token counts
        return {"tokens": piece[:-1], "labels": piece[1:], "loss_mask": mask}


def data(num_train, num_valid):
    text = "".join(topics.values()).encode()
    return Windows(text[:-50_000]), Windows(text[-50_000:])


logging.basicConfig(level="INFO", format="%(message)s")
result = pretrain(
    ByteModel,
    data,
    PretrainConfig(
        # Of this, another model takes what cuts it: layers, width, length of a sample.
        model=GPTConfig(
            num_layers=LAYERS, hidden_size=WIDTH, seq_length=LENGTH, num_attention_heads=4
        ),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB),
        data=ProvidedData(dataloader_type="cyclic"),  # shuffled, again and again
        optimizer=OptimizerConfig(lr=4e-3, lr_warmup_iters=5),
        training=TrainingConfig(
            micro_batch_size=8, global_batch_size=16, train_iters=60, eval_interval=30, eval_iters=2
        ),
        parallel=ParallelConfig(tensor_model_parallel_size=int(os.environ.get("WORLD_SIZE", "1"))),
        logging=LoggingConfig(log_interval=20),
        save="run-bytes",
    ),
)
if result.ledger:  # on the first rank
    first, last = result.ledger[0], result.ledger[-1]
    print(f"{result.outcome}: loss {first['lm_loss']:.4f} to {last['lm_loss']:.4f}")
