"""Small models and a tokenizer for tests of evaluation."""

from __future__ import annotations

import torch

from tests.trainyard.checkpoint.samples import tokenizer_files
from trainyard.conversion.tokenizer_files import tokenizer_of
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.tokenizers.base import Tokenizer


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and one that ends documents."""
    files = tokenizer_files()
    return tokenizer_of({name.removeprefix("tokenizer/"): data for name, data in files.items()})


def repeating_model(seq_length: int) -> GPTModel:
    """A model whose likeliest next token is the token before: its layers add nothing to the
    embedding, which is the output layer too."""
    config = GPTConfig(num_layers=1, hidden_size=64, num_attention_heads=2, seq_length=seq_length)
    model = GPTModel(config, 384, true_vocab_size=257)
    init_parameters(model, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name or "position" in name:
                parameter.zero_()
    return model.eval()


def random_model(seq_length: int, seed: int = 3, **options: int) -> GPTModel:
    """A model that knows nothing, with logits that differ clearly."""
    config = GPTConfig(
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4} | options,
        seq_length=seq_length,
        init_method_std=0.3,
    )
    model = GPTModel(config, 384, true_vocab_size=257)
    init_parameters(model, seed)
    return model.eval()
