"""Small checkpoints for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.trainyard.models.perturbed import perturb
from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.layout import ShardedTensor
from trainyard.checkpoint.save import StepContents, save_step
from trainyard.config import to_dict
from trainyard.conversion.source import Source
from trainyard.models.families import family_of
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters

END = "<|endoftext|>"
PADDED_VOCAB = 384


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of several types, optimizer states, generator states; shapes from scalar to cube."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (40, 8),
        "layers.0.weight": (8, 8),
        "layers.0.bias": (8,),
        "layers.1.cube": (3, 4, 5),
        "scale": (),
        "empty": (0, 4),
    }
    tensors = {}
    for name, shape in shapes.items():
        tensors[f"model.{name}"] = torch.randn(shape, generator=generator)
        tensors[f"optimizer.exp_avg.{name}"] = torch.randn(shape, generator=generator)
        tensors[f"optimizer.exp_avg_sq.{name}"] = torch.rand(shape, generator=generator)
    tensors["model.layers.1.half"] = torch.randn(6, 5, generator=generator).to(torch.bfloat16)
    tensors["rng.rank0.torch"] = torch.randint(0, 256, (33,), generator=generator).to(torch.uint8)
    return tensors


def save(
    root_url: str,
    tensors: Mapping[str, torch.Tensor | ShardedTensor],
    step: int = 50,
    lineage: str = "abc",
    documents: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    **options: Any,
) -> list[FileRecord]:
    """Save a step as a trainer does."""
    return save_step(root_url, step, tensors, contents(step, lineage, documents, files), **options)


def contents(
    step: int,
    lineage: str = "abc",
    documents: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> StepContents:
    """What is no tensor of a step."""
    return StepContents(
        state={"consumed_samples": step * 4, "lineage": lineage},
        documents=documents or {"config.json": {"model": {}}},
        files=files or {"ledger.jsonl": b'{"step": 50}\n'},
        lineage=lineage,
        stage_name="pretrain",
    )


def tokenizer_files() -> dict[str, bytes]:
    """A byte-level tokenizer of 257 tokens, as a checkpoint carries it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([END, *alphabet])}
    engine = Tokenizer(models.BPE(vocab, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([END])
    description = {"format_version": 1, "tokenizer_type": "HuggingFaceTokenizer"}
    return {
        "tokenizer/tokenizer.json": engine.to_str().encode(),
        "tokenizer/trainyard_tokenizer.json": json.dumps(description).encode(),
    }


def random_gpt(config: GPTConfig, seed: int = 1) -> GPTModel:
    """A model in which no parameter is 0 or 1, so that a swapped one is seen."""
    model: GPTModel = family_of(config).load_class()(config, PADDED_VOCAB, true_vocab_size=257)
    init_parameters(model, seed)
    return perturb(model, seed=seed, scale=0.05).eval()


def save_gpt(root_url: str, model: GPTModel, step: int = 50, **options: Any) -> None:
    """Save a model with its configuration and tokenizer."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    moments = {
        f"optimizer.{moment}.{name}": torch.full_like(parameter, value)
        for moment, value in [("exp_avg", 0.25), ("exp_avg_sq", 0.5)]
        for name, parameter in model.named_parameters()
    }
    rng = {"rng.rank0.torch": torch.arange(16, dtype=torch.uint8)}
    document = {
        "model": to_dict(model.config),
        "vocab_size": 257,
        "padded_vocab_size": PADDED_VOCAB,
        "run": {},
        "inputs": {},
    }
    files = {"ledger.jsonl": b'{"step": 50}\n', **tokenizer_files()}
    save(
        root_url,
        {**tensors, **moments, **rng},
        step,
        documents={"config.json": document},
        files=files,
        **options,
    )


def model_of_source(source: Source) -> GPTModel:
    """The model of a source, filled with its weights and nothing else."""
    model = GPTModel(source.config, source.padded_vocab_size)
    names = [name for name in source.specs if name.startswith("model.")]
    model.load_state_dict({name.removeprefix("model."): source.read(name) for name in names})
    return model.eval()
