"""Ways to cut one small run over up to eight ranks, and which of them are valid.

The run itself is the same for all: a few layers, dropout on the residual stream, eight
micro-batches a step whose numbers of tokens that count differ, gradients that are clipped. Knows
nothing of processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from random import Random
from typing import Any, Literal

from tests.trainyard.training.layouts.kinds import KINDS, MODELS, SEQ_LENGTH, SMALL
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.optim.config import OptimizerConfig, OptimizerKind
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import DEFAULT_ORDER, ParallelConfig
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.layout_checks import check_model
from trainyard.testing.covering import Row, covering_rows, cross

MAX_RANKS = 8
NUM_MICROBATCHES = 8
"""Of a step, over all data-parallel ranks."""
MICRO_BATCH_SIZE = 2
VOCAB = 64
"""Tokens, which every tensor-parallel size divides without padding."""
ODD_VOCAB = 50
"""Tokens that one, two and four tensor-parallel ranks pad to 52, 56 and 64."""

Tensor = Literal["one", "tp2", "tp4", "tp2 sp", "tp4 sp", "tp2 sp overlap", "tp4 sp overlap"]
Context = Literal["one", "p2p", "allgather", "a2a"]
Reduction = Literal["plain", "overlap", "zero", "zero overlap", "optim_grads", "optim_grads_params"]
Recompute = Literal["none", "selective", "full", "block"]

FACTORS: dict[str, tuple[Any, ...]] = {
    "tensor": ("one", "tp2", "tp2 sp", "tp2 sp overlap", "tp4", "tp4 sp", "tp4 sp overlap"),
    "context": ("one", "p2p", "allgather", "a2a"),
    "pp": (1, 2, 4),
    "chunks": (1, 2),
    "dp": (1, 2, 4),
    "reduction": ("plain", "overlap", "zero", "zero overlap"),
    "recompute": ("none", "selective", "full", "block"),
    "kind": ("gpt", "llama"),
    "tied": (True, False),
    "padded": (False, True),
    "bf16": (False, True),
}
"""What is combined with everything else; the order is that of the fields of `Cut`."""

TURN = 11
"""Prime to the number of combinations that are dealt out."""

CUTTING = ("tensor", "context", "pp", "chunks", "dp", "reduction", "recompute")
"""Those that must not change what is computed; the others say what is."""
EXTRA_CUTTING = ("rank_order", "bucket_size", "pipeline", "ep", "etp", "instances")

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "layernorm", "mlp"),
    },
    "full": {"recompute_granularity": "full"},
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
}

# Adam divides by the root of the second moment, which makes of a gradient of next to nothing (that
# of a bias of the keys, which no softmax sees) a step of full length in the direction of its
# rounding errors. A larger epsilon leaves such numbers alone; the others move as ever.
ADAM_EPS = 1e-3


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to run it; without arguments, one process."""

    tensor: Tensor = "one"
    context: Context = "one"
    pp: int = 1
    chunks: int = 1
    """Of each pipeline rank."""
    dp: int = 1
    reduction: Reduction = "plain"
    recompute: Recompute = "none"
    kind: str = "gpt"
    tied: bool = True
    padded: bool = False
    """A vocabulary that is padded, by another number of rows at every tensor-parallel size."""
    bf16: bool = False
    # --- what is varied by tests of its own ---------------------------------------------------
    rank_order: str = DEFAULT_ORDER
    bucket_size: int | None = None
    pipeline: tuple[tuple[str, Any], ...] = ()
    """More options of the pipeline: uneven stages, a layout."""
    clip_grad: float = 1.0
    adam_eps: float = ADAM_EPS
    num_layers: int = 4
    hidden_dropout: float = 0.1
    per_token: bool = False
    """Weigh all tokens of a step alike."""
    packed: bool = False
    """Samples are conversations with bounds and positions of their own."""
    ep: int = 1
    etp: int | None = None
    instances: int = 1
    """Groups of data-parallel ranks that each shard everything."""
    rule: OptimizerKind = "adam"
    tp_mode: Literal["duplicated", "distributed"] = "duplicated"
    """Of Muon."""
    order: tuple[int, ...] = tuple(range(NUM_MICROBATCHES))
    """Which micro-batch stands at each place of a step."""

    @property
    def tp(self) -> int:
        """Ranks that share each matrix."""
        return 1 if self.tensor == "one" else int(self.tensor[2])

    @property
    def cp(self) -> int:
        """Ranks that share each sequence."""
        return 1 if self.context == "one" else 2

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def vocab_size(self) -> int:
        return ODD_VOCAB if self.padded else VOCAB

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.model.padded_vocab_size(self.vocab_size, self.tp)

    @property
    def model(self) -> TransformerConfig:
        options = SMALL | KINDS[self.kind] | RECOMPUTE[self.recompute]
        if self.kind == "retro":  # the second layer of each pair has cross attention
            options["retro_cross_attention_layers"] = tuple(range(2, self.num_layers + 1, 2))
        return MODELS.get(self.kind, GPTConfig)(
            **options,
            num_layers=self.num_layers,
            hidden_dropout=self.hidden_dropout,
            untie_embeddings_and_output_weights=not self.tied,
        )

    @property
    def parallel(self) -> ParallelConfig:
        zero, overlap = "zero" in self.reduction, "overlap" in self.reduction
        fully = self.reduction if self.reduction.startswith("optim") else None
        bucket_size = self.bucket_size or (3000 if overlap else None)
        return ParallelConfig(
            tensor_model_parallel_size=self.tp,
            sequence_parallel="sp" in self.tensor,
            tp_comm_overlap="overlap" in self.tensor,
            context_parallel_size=self.cp,
            cp_comm_type="p2p" if self.context == "one" else self.context,
            pipeline_model_parallel_size=self.pp,
            num_virtual_stages_per_pipeline_rank=self.chunks if self.chunks > 1 else None,
            rank_order=self.rank_order,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            data_parallel=DataParallelConfig(
                use_distributed_optimizer=zero,
                data_parallel_sharding_strategy=fully,
                num_distributed_optimizer_instances=self.instances,
                overlap_grad_reduce=overlap,
                overlap_param_gather=zero and overlap,
                ddp_bucket_size=bucket_size,
            ),
            **dict(self.pipeline),
        )

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            optimizer=self.rule,
            lr=0.01,
            clip_grad=self.clip_grad,
            adam_eps=self.adam_eps,
            muon_extra_scale_factor=0.2,
            muon_use_nesterov=True,
            muon_tp_mode=self.tp_mode,
        )

    @property
    def precision(self) -> PrecisionConfig:
        """fp32, or bf16 with fp32 main parameters."""
        return PrecisionConfig(bf16=self.bf16)

    def alone(self) -> Cut:
        """The same run in one process."""
        one = Cut()
        return replace(self, **{name: getattr(one, name) for name in (*CUTTING, *EXTRA_CUTTING)})

    def deep_enough(self) -> Cut:
        """With two layers for each of up to two stages, and one for each chunk of more: on two
        cores the messages within a layer are nearly all that a run waits for."""
        return replace(self, num_layers=max(2 * min(self.pp, 2), self.pp * self.chunks))

    def __str__(self) -> str:
        """`tp2 sp, cp2 a2a, pp2 x 2, dp2 zero, full, llama, tied`."""
        parts = [
            self.tensor if self.tp > 1 else "",
            f"cp2 {self.context}" if self.cp > 1 else "",
            f"pp{self.pp}" + (f" x {self.chunks}" if self.chunks > 1 else "")
            if self.pp > 1
            else "",
            f"dp{self.dp} {self.reduction}" if self.dp > 1 else "",
            f"{self.instances} instances" if self.instances > 1 else "",
            f"ep{self.ep}" if self.ep > 1 else "",
            f"etp{self.etp}" if self.etp else "",
            self.recompute if self.recompute != "none" else "",
            self.kind,
            "tied" if self.tied else "",
            "padded" if self.padded else "",
            "bf16" if self.bf16 else "",
            self.rule if self.rule != "adam" else "",
            self.tp_mode if self.tp_mode != "duplicated" else "",
            "per token" if self.per_token else "",
            "packed" if self.packed else "",
        ]
        return ", ".join(filter(None, parts))


def is_valid(row: Mapping[str, Any]) -> bool:
    """Whether the cut fits on eight ranks, no factor says what another makes void, and the product
    does not refuse it."""
    cut = Cut(**row).deep_enough()
    if cut.world_size > MAX_RANKS or (cut.chunks > 1 and cut.pp == 1):
        return False
    # Alone, gradients are added to nobody's; context-parallel ranks hold the same weights, too.
    if cut.dp * cut.cp == 1 and cut.reduction != "plain":
        return False
    if cut.chunks > 1 and NUM_MICROBATCHES // cut.dp < cut.pp:
        return False
    try:
        check_model(
            cut.parallel,
            num_layers=cut.model.num_layers,
            num_attention_heads=cut.model.num_attention_heads,
            num_query_groups=cut.model.query_groups,
            ffn_hidden_size=cut.model.ffn_size,
            seq_length=SEQ_LENGTH,
            padded_vocab_size=cut.padded_vocab_size,
        )
    except ConfigError:
        return False
    return True


@cache
def valid_rows() -> tuple[Row, ...]:
    """All combinations of `FACTORS` that are valid."""
    depends = {name: FACTORS[name] for name in (*CUTTING[:-1], "kind")}
    free = list(product(*(FACTORS[name] for name in ("recompute", "tied", "padded", "bf16"))))
    return tuple(
        (*row[:-1], recompute, row[-1], *rest)
        for row in cross(depends, is_valid)
        for recompute, *rest in free
    )


@cache
def pairwise_cuts() -> tuple[Cut, ...]:
    """Cuts in which every pair of values of all factors occurs that can."""
    rows = list(valid_rows())
    Random(0).shuffle(rows)  # where a pair leaves the other values open, they are not all the first
    rows.sort(key=lambda row: bool(row[-1]))  # but rather fp32, which shows more
    return tuple(cut_of(row) for row in covering_rows(rows))


# --- the full cross ---------------------------------------------------------------------------


def degrees_of(cut: Cut) -> tuple[Any, ...]:
    """How much is cut how: tp, sp, cp, pp, chunks, dp, ZeRO. Leaves out the means by which ranks
    talk: overlap, and how attention reaches the other part of the sequence."""
    sequence_parallel, zero = "sp" in cut.tensor, "zero" in cut.reduction
    return cut.tp, sequence_parallel, cut.cp, cut.pp, cut.chunks, cut.dp, zero


@cache
def all_cuts() -> tuple[Cut, ...]:
    """The cross of everything that cuts, in two ways at once.

    Every combination of degrees (`degrees_of`) with every kind of recomputation; and every
    combination of degrees with all means by which ranks talk. The product of both would be three
    times as many, and neither does the other's work. The kind of model, tied or not, a padded
    vocabulary and the precision (bf16 once in four) are dealt out, so that each meets cuts of all
    kinds."""
    ways: dict[Row, list[Row]] = {}
    for row in valid_rows():
        ways.setdefault(row[:6], []).append(row)
    groups: dict[tuple[Any, ...], list[list[Row]]] = {}
    for rows in ways.values():
        groups.setdefault(degrees_of(cut_of(rows[0])), []).append(rows)
    kinds = FACTORS["recompute"]
    found: list[Cut] = []
    for number, group in enumerate(groups.values()):
        for place in range(max(len(group), len(kinds))):
            recompute = kinds[(number + place) % len(kinds)]
            rows = [row for row in group[place % len(group)] if row[6] == recompute]
            found.append(_dealt(rows, len(found)))
    return tuple(found)


def _dealt(rows: list[Row], number: int) -> Cut:
    fp32, bf16 = ([row for row in rows if row[-1] is wanted] for wanted in (False, True))
    dealt = 3 * fp32 + bf16
    return cut_of(dealt[TURN * number % len(dealt)])


def cut_of(row: Row) -> Cut:
    """The cut that a row of `FACTORS` says."""
    return Cut(*row).deep_enough()  # type: ignore[arg-type]
