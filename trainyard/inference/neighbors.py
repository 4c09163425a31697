"""Generates from a Retro whose prompt comes with neighbours of its chunks.

Every new token passes the whole text again: encoder and chunks need it, and no cache of keys and
values knows them. The neighbours of a chunk serve its last token and the next chunk, so those of
the last chunk of a prompt serve the answer (arXiv:2112.04426, section 2.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainyard.errors import ConfigError
from trainyard.inference.config import GREEDY, SamplingConfig, check_length
from trainyard.inference.sampling import choose_tokens, draw_uniforms, request_generators
from trainyard.models.retro.chunks import Neighbors
from trainyard.models.retro.model import RetroModel

PADDING = 0


def neighbors_of_texts(
    model: RetroModel, chunks: Sequence[Sequence[Sequence[int]]], length: int
) -> Neighbors:
    """The tokens of given neighbours of the first chunks of one text, as the model takes them.

    chunks: for each chunk its neighbours, at most --retro-num-neighbors; longer ones are cut to
    the tokens of a neighbour. length: tokens of the text. ConfigError for neighbours of chunks that
    it does not have."""
    config = model.config
    count, size = config.retro_num_neighbors, config.retrieved_length
    whole = length // config.retro_chunk_length
    if not chunks or len(chunks) > whole:
        raise ConfigError(
            f"neighbours of {len(chunks)} chunks were given, and a text of {length} tokens has "
            f"{whole} whole chunks of {config.retro_chunk_length}; give at most as many"
        )
    if (most := max(map(len, chunks))) > count:
        raise ConfigError(
            f"{most} neighbours of a chunk were given, and the model takes {count} "
            "(--retro-num-neighbors); leave the last ones out"
        )
    tokens = torch.full((1, len(chunks), count, size), PADDING, dtype=torch.int64)
    lengths = torch.zeros((1, len(chunks), count), dtype=torch.int64)
    for chunk, texts in enumerate(chunks):
        for place, text in enumerate(texts):
            kept = torch.tensor(text[:size], dtype=torch.int64)
            tokens[0, chunk, place, : len(kept)] = kept
            lengths[0, chunk, place] = len(kept)
    return Neighbors(tokens.to(model.device), lengths.to(model.device))


@torch.inference_mode()
def generate_with_neighbors(
    model: RetroModel,
    prompt: Sequence[int],
    chunks: Sequence[Sequence[Sequence[int]]],
    max_new_tokens: int,
    *,
    sampling: SamplingConfig = GREEDY,
    eod: int | None = None,
    vocab_size: int | None = None,
) -> list[int]:
    """Up to `max_new_tokens` after a prompt, ending early with `eod`, which is then the last one.

    chunks: the tokens of the neighbours of each of its first whole chunks; empty lists for a chunk
    without any. vocab_size: tokens that the tokenizer knows. The model should be in eval mode."""
    check_length(
        f"the prompt of {len(prompt)} tokens", len(prompt), max_new_tokens, model.config.positions
    )
    neighbors = neighbors_of_texts(model, chunks, len(prompt))
    generators = request_generators(0, 1, sampling.seed)
    text = torch.tensor([list(prompt)], dtype=torch.int64, device=model.device)
    made: list[int] = []
    for _ in range(max_new_tokens):
        logits = model(text, neighbors=neighbors)[:, -1, :vocab_size]
        uniforms = None if sampling.greedy else draw_uniforms(generators, model.device)
        chosen = choose_tokens(logits, sampling, uniforms)
        made.append(int(chosen))
        if made[-1] == eod:
            break
        text = torch.cat((text, chosen.unsqueeze(1)), dim=1)
    return made
