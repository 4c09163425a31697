"""GPT: tokens in, logits or per-token losses out.

Parameter names are Megatron-LM core's (`decoder.layers.0.self_attention.linear_qkv.weight`),
numbered from the first layer of the whole model. Inside, tensors are (s, b, h); at the door, (b,
s)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.attention import KVCache
from trainyard.models.block import TransformerBlock
from trainyard.models.config import GPTConfig
from trainyard.models.embedding import Embedding
from trainyard.models.linear import Linear
from trainyard.models.rope import rotary_angles


class GPTModel(nn.Module):
    """A decoder-only transformer over a padded vocabulary.

    Its parameters are not filled when it is built: `init_parameters` or a checkpoint does that."""

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.embedding = Embedding(config, vocab_size)
        self.decoder = TransformerBlock(config)
        self.output_layer: Linear | None = None
        if config.untie_embeddings_and_output_weights:
            self.output_layer = Linear(config.hidden_size, vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        kv_cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (b, s, V) of the token after each of `tokens`, (b, s) int64."""
        hidden = self.hidden_states(tokens, position_ids, kv_cache, attention_mask)
        return self.logits(hidden).transpose(0, 1)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Cross entropy of each label in nats, (b, s) fp32, not masked and not averaged."""
        logits = self.logits(self.hidden_states(tokens, position_ids, None, attention_mask))
        flat = logits.view(-1, self.vocab_size).float()
        losses = functional.cross_entropy(flat, labels.t().reshape(-1), reduction="none")
        return losses.view(logits.shape[:2]).t()

    def hidden_states(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        kv_cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """What the output layer sees, (s, b, h), after the final norm.

        position_ids: (b, s); unset: 0, 1, ... after what the cache holds. attention_mask:
        (b, 1, s, s), True where a token may look; unset: causal. A cache brings its own mask and is
        not advanced here, so that its owner decides how many of the tokens count."""
        num_new = tokens.shape[1]
        if kv_cache is not None:
            attention_mask = kv_cache.mask(num_new)
            position_ids = kv_cache.positions(num_new) if position_ids is None else position_ids
        if position_ids is None:
            position_ids = torch.arange(num_new, device=tokens.device).unsqueeze(0)
        x = self.embedding(tokens, position_ids)
        hidden: Tensor = self.decoder(x, self._rotary(position_ids), attention_mask, kv_cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., h). Returns (..., V)."""
        output = self.embedding.word_embeddings if self.output_layer is None else self.output_layer
        return functional.linear(hidden, output.weight)

    def _rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.position_embedding_type != "rope":
            return None
        return rotary_angles(position_ids, self.config.rotary_dim, self.config.rotary_base)
