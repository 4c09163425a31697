"""The small run of `cases.Cut`, on the ranks of a pool or here, and its whole results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainyard.pieces import Piece, assembled
from tests.trainyard.training.layouts.cases import MICRO_BATCH_SIZE, NUM_MICROBATCHES, Cut
from tests.trainyard.training.layouts.kinds import SEQ_LENGTH
from trainyard.checkpoint.layout import LocalTensors, slices_held
from trainyard.checkpoint.model_tensors import model_tensors
from trainyard.datasets.loader import Batch
from trainyard.models.families import family_of
from trainyard.models.init import init_parameters
from trainyard.models.model import TransformerModel
from trainyard.optim.schedule import Rates
from trainyard.parallel.dims import dims_of, expert_dims_of
from trainyard.parallel.groups import ProcessGroups, build_groups
from trainyard.testing.pool import RankPool
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.build import build_train_module, built_in_provider, model_sizes
from trainyard.training.loop.step import StepOptions, TrainModule
from trainyard.training.run.tensors import optimizer_tensors

NUM_STEPS = 5
LEARNING_RATE = 0.01
SEED = 11
CPU = torch.device("cpu")
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""What has a row for each token, and for padding."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank says of a run."""

    losses: list[float]
    norms: list[float]
    first_moments: list[Piece]
    """After the first step: a tenth of its clipped gradient."""
    tensors: list[Piece]
    """Parameters and the state of the optimizer, in the end."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a run."""

    losses: list[float]
    norms: list[float]
    gradients: Tensors
    """Of the first step, clipped, by name; up to a factor."""
    tensors: Tensors
    """`model.NAME`, `optimizer.KIND.NAME` after the last step."""


def run_of(cut: Cut, ranks: RankPool | None = None, num_steps: int = NUM_STEPS) -> Run:
    """Train over as many ranks as the cut needs, or here where that is one; together again."""
    if cut.world_size == 1:
        shares = [train(cut, num_steps)]
    else:
        assert ranks is not None
        shares = ranks.run(train, cut.world_size, cut, num_steps)
    return without_padding(together(shares), cut)


@cache
def reference(cut: Cut, num_steps: int = NUM_STEPS) -> Run:
    """The run in one process that a cut is to be equal to."""
    return run_of(cut.alone(), num_steps=num_steps)


# --- on a rank --------------------------------------------------------------------------------


def train(cut: Cut, num_steps: int) -> Share:
    """This rank's part of the run."""
    train_module = train_module_of(cut)
    size = BatchSize(NUM_MICROBATCHES * MICRO_BATCH_SIZE, MICRO_BATCH_SIZE, cut.dp)
    losses, norms, first_moments = [], [], []
    for step in range(1, num_steps + 1):
        rates = Rates(LEARNING_RATE / step**0.5, 0.1, LEARNING_RATE / step**0.5)
        result = train_module.step(step, size, batches(cut, step, train_module.groups), rates)
        losses += [result.lm_loss, *result.more_losses.values()]
        norms.append(result.grad_norm)
        if step == 1:
            held = optimizer_tensors(train_module)
            first_moments = pieces({n: h for n, h in held.items() if ".exp_avg." in n})
    train_module.optimizer.finish_parameters()
    found = pieces(model_tensors(train_module.chunks) | optimizer_tensors(train_module))
    return Share(losses, norms, first_moments, found)


def train_module_of(cut: Cut, padded_vocab_size: int | None = None) -> TrainModule:
    """The model of a cut, its weights drawn; on the ranks of the default group, or alone.

    padded_vocab_size: unset: as the cut pads."""
    is_several = dist.is_initialized()
    dims = dims_of(cut.parallel, dist.get_world_size() if is_several else 1)
    experts = expert_dims_of(cut.parallel, dims)
    groups = build_groups(
        dims,
        dist.get_rank() if is_several else 0,
        expert_dims=experts,
        num_instances=cut.instances,
    )
    rows = padded_vocab_size or cut.padded_vocab_size
    train_module = build_train_module(
        built_in_provider(cut.model, rows, min(rows, cut.vocab_size)),
        model_sizes(cut.model, MICRO_BATCH_SIZE, with_neighbors=not cut.packed),
        cut.parallel,
        cut.optimizer,
        cut.precision,
        groups,
        CPU,
        StepOptions(
            seed=SEED,
            per_token=cut.per_token,
            more_losses=family_of(cut.model).more_losses(cut.model),
            layer_sums=family_of(cut.model).layer_sums(cut.model),
        ),
        own_positions=cut.packed,
    )
    for chunk in train_module.chunks:
        assert isinstance(chunk, TransformerModel)
        init_parameters(chunk, SEED)
    train_module.optimizer.adopt_model_parameters()
    return train_module


def batches(cut: Cut, step: int, groups: ProcessGroups) -> Iterator[Batch]:
    """This rank's micro-batches of a step."""
    for place in range(groups.dp_rank, NUM_MICROBATCHES, groups.dims.dp):
        batch = microbatch(step, cut.order[place], cut.vocab_size, cut.model.seq_length)
        if cut.packed:  # a Retro is tuned without neighbours
            yield as_conversations(batch, place)
        else:
            yield AS_SAMPLES[cut.model.model_type](batch, step)


def as_conversations(batch: Batch, place: int) -> Batch:
    """The same tokens as three conversations, of which the second halves are learnt."""
    shape = batch["tokens"].shape
    bounds = torch.tensor([0, 3 + place % 4, 10]).expand(shape[0], -1)
    begins = (torch.arange(SEQ_LENGTH) >= bounds[0].unsqueeze(1)).long().sum(dim=0) - 1
    positions = torch.arange(SEQ_LENGTH) - bounds[0][begins]
    mask = (positions >= 2).float().expand(shape)
    unused = torch.full((shape[0], SEQ_LENGTH - 2), SEQ_LENGTH)
    return {
        **batch,
        "labels": torch.where(mask > 0, batch["labels"], -100),
        "loss_mask": mask.contiguous(),
        "position_ids": positions.expand(shape).contiguous(),
        "cu_seqlens": torch.cat((bounds, unused), dim=1).int(),
    }


def microbatch(step: int, number: int, vocab_size: int, length: int) -> Batch:
    """Text that counts in steps of its own; how many of its tokens are trained on differs."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    start = torch.randint(vocab_size, (MICRO_BATCH_SIZE, 1), generator=generator)
    stride = torch.randint(1, 4, (MICRO_BATCH_SIZE, 1), generator=generator)
    text = (start + stride * torch.arange(length + 1)) % vocab_size
    mask = torch.ones(MICRO_BATCH_SIZE, length)
    mask[:, : number % 5] = 0.0
    positions = torch.arange(length).expand(MICRO_BATCH_SIZE, -1)
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": mask,
        "position_ids": positions,
    }


def with_hidden_words(batch: Batch, step: int) -> Batch:
    """The same text as two runs of sentences with padding behind them, some of its words hidden."""
    text, mask = batch["tokens"], batch["loss_mask"]
    length = text.shape[1]
    row = torch.arange(MICRO_BATCH_SIZE).unsqueeze(1)
    places = torch.arange(length).expand_as(text)
    padding_mask = (places < length - (step + 3 * row) % 6).long()
    hidden = ((places + row + step) % 4 == 0) & padding_mask.bool() & mask.bool()
    return {
        "text": torch.where(hidden, 1, text),
        "types": (places >= length // 2).long(),
        "labels": torch.where(hidden, text, -1),
        "loss_mask": hidden.float(),
        "padding_mask": padding_mask,
        "is_random": (row.squeeze(1) + step) % 2,
    }


def with_neighbors(batch: Batch, step: int) -> Batch:
    """The same text with neighbours of its chunks of four tokens: two of up to eight tokens, none
    for some chunks."""
    text = batch["tokens"]
    chunks = text.unflatten(1, (-1, 4))
    lengths = (torch.arange(2) + 2 * chunks[..., :1] + step) % 9
    lengths[:, (step + 1) % 4] = 0
    tokens = (chunks[..., :1, None] + torch.arange(8) + 3 * torch.arange(2)[:, None]) % 50
    return {**batch, "neighbor_tokens": tokens, "neighbor_lengths": lengths}


def with_hidden_spans(batch: Batch, step: int) -> Batch:
    """The same text with padding behind it, for a decoder that spells its beginning out."""
    text = batch["tokens"]
    length = text.shape[1] // 2
    row = torch.arange(MICRO_BATCH_SIZE).unsqueeze(1)
    places = torch.arange(text.shape[1]).expand_as(text)
    enc_mask = (places < text.shape[1] - (step + 3 * row) % 6).long()
    dec_mask = (places < length - (step + 2 * row) % 4).long()[:, :length]
    asked = dec_mask.bool() & batch["loss_mask"][:, :length].bool()
    return {
        "text_enc": text.roll(1, 1),
        "text_dec": text[:, :length].contiguous(),
        "labels": torch.where(dec_mask.bool(), batch["labels"][:, :length], -1),
        "loss_mask": asked.float(),
        "enc_mask": enc_mask,
        "dec_mask": dec_mask,
    }


AS_SAMPLES: dict[str, Callable[[Batch, int], Batch]] = {
    "gpt": lambda batch, step: batch,
    "bert": with_hidden_words,
    "t5": with_hidden_spans,
    "retro": with_neighbors,
    "mamba": lambda batch, step: batch,
}
"""What each family of models makes of a text."""


def pieces(held: Mapping[str, LocalTensors]) -> list[Piece]:
    """What a rank holds, copied."""
    return [
        Piece(name, part.tensor.detach().clone(), tuple(part.offset), tuple(part.global_shape))
        for name, parts in held.items()
        for part in slices_held(name, parts)
    ]


# --- of all ranks -----------------------------------------------------------------------------


def together(shares: Sequence[Share]) -> Run:
    """One run from what its ranks hold. They must say the same of what they know together."""
    first = shares[0]
    for share in shares:
        assert (share.losses, share.norms) == (first.losses, first.norms), "ranks disagree"
    return Run(
        first.losses,
        first.norms,
        assembled([piece for share in shares for piece in share.first_moments]),
        assembled([piece for share in shares for piece in share.tensors]),
    )


def without_padding(run: Run, cut: Cut) -> Run:
    """Only the rows of tokens, whose number no cut changes. The others must never have had a
    gradient."""
    for name, tensor in [*run.gradients.items(), *run.tensors.items()]:
        if name.endswith(TABLES) and ".exp_avg" in name:
            assert not tensor[cut.vocab_size :].any(), f"padding is trained: {name}"
    return replace(
        run, gradients=_tokens_of(run.gradients, cut), tensors=_tokens_of(run.tensors, cut)
    )


def _tokens_of(tensors: Tensors, cut: Cut) -> Tensors:
    return {n: t[: cut.vocab_size] if n.endswith(TABLES) else t for n, t in tensors.items()}
