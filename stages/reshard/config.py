"""Options of `python -m stages.reshard`: those of Megatron-LM's converter, and some of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainyard.artifacts.output import Output
from trainyard.config import (
    MAX_RANKS,
    MAX_SIZE,
    check_at_least,
    check_at_most,
    execution,
    from_dict,
    location,
)
from trainyard.errors import ConfigError
from trainyard.models.moe_config import MoEConfig
from trainyard.tokenizers.config import TokenizerConfig, TokenizerType

if TYPE_CHECKING:
    from trainyard.models.config import TransformerConfig

Loader = Literal[
    "auto",
    "trainyard",
    "hf",
    "llama_mistral",
    "core",
    "legacy",
    "torch_dist",
    "mixtral_hf",
    "llava",
]
Saver = Literal[
    "trainyard",
    "hf",
    "llama_mistral",
    "core",
    "legacy",
    "megatron",
    "torch_dist",
    "llava",
    "hf_llava",
]

LATER = {
    "llava": "it comes with image models",
    "hf_llava": "it comes with image models",
}
"""Formats of Megatron-LM's converter that this version does not have, and when they will come."""

SPLIT = ("core", "legacy", "megatron")
"""Savers that write one file for each rank."""

MEGATRON = (*SPLIT, "torch_dist")
"""Savers that pad the vocabulary as Megatron-LM does."""

SHARDS = ("num_shards", "target_tensor_parallel_size", "target_pipeline_parallel_size")
COUNTS = (
    "target_num_layers_per_virtual_pipeline_stage",
    "target_num_virtual_stages_per_pipeline_rank",
    "target_decoder_first_pipeline_num_layers",
    "target_decoder_last_pipeline_num_layers",
    "target_expert_parallel_size",
    "make_vocab_size_divisible_by",
    "true_vocab_size",
    "vocab_size",
    "num_attention_heads",
)

NUMBER_FORMATS = ("fp32", "bf16", "fp16")

PER_VIRTUAL_STAGE = "--target-num-layers-per-virtual-pipeline-stage"
VIRTUAL_STAGES = "--target-num-virtual-stages-per-pipeline-rank"
PP = "--target-pipeline-parallel-size"
FIRST = "--target-decoder-first-pipeline-num-layers"
LAST = "--target-decoder-last-pipeline-num-layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardConfig:
    """Convert a checkpoint into another format or number of files. Every value stays the same, bit
    for bit, unless a number format is given."""

    load_dir: str = location()
    """Checkpoint to read: a run folder (its latest step), a step folder, or the folder of another
    program."""
    save_dir: str = location()
    """Folder to write, neither inside --load-dir nor around it."""
    loader: Loader = "auto"
    """Format to read. trainyard: ours; hf: a Hugging Face folder; llama_mistral: Llama as Meta or
    Hugging Face publish it; core, legacy: Megatron-LM's per-rank files; torch_dist: its distributed
    checkpoint; auto: detected from the file names."""
    saver: Saver = "trainyard"
    """Format to write. trainyard: ours; hf: a Hugging Face folder for `transformers`;
    llama_mistral: a Llama or Mistral in the layout of --saver-checkpoint-type; core, legacy:
    Megatron-LM's per-rank files, for its new or old models; megatron: per-rank files, for old
    models if the source has old models; torch_dist: Megatron-LM's distributed checkpoint, which any
    number of ranks loads."""
    model_type: Literal["GPT", "BERT", "T5"] | None = None
    """Kind of model that the checkpoint must hold; unset: any."""
    fp32: bool = False
    """Write weights in fp32. Without --fp32, --bf16 and --fp16, each weight keeps its number
    format."""
    bf16: bool = False
    """Write weights in bfloat16, rounded to the nearest number."""
    fp16: bool = False
    """Write weights in float16, rounded to the nearest number."""
    decoder_only: bool = False
    """For a Retro: write only its decoder, which is a GPT, without optimizer states."""
    num_shards: int | None = None
    """Number of files for the weights, and as many again for optimizer states. Unset: the product
    of the target sizes, which is 1 by default."""
    target_tensor_parallel_size: int | None = None
    """Tensor-parallel ranks that Megatron-LM's or Meta's files are for; Meta's layout has one file
    for each. Unset: 1."""
    target_pipeline_parallel_size: int | None = None
    """Pipeline-parallel ranks that Megatron-LM's files are for. Unset: 1."""
    target_num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of each virtual stage, in files for Megatron-LM's interleaved schedule. Unset: no
    virtual stages."""
    target_num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual stages of each pipeline rank; give this or their number of layers."""
    target_decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank, in core files for a run with Megatron-LM's
    --decoder-first-pipeline-num-layers; the other ranks share the rest evenly. Unset: the same
    number on every rank."""
    target_decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank, likewise."""
    target_expert_parallel_size: int | None = None
    """Expert-parallel ranks that core files are for; unset: 1. For torch_dist, the expert-parallel
    ranks of the run that loads the optimizer (with several, the experts have an optimizer of their
    own); unset: as many as the run had."""
    saver_transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Names of norms in core files, and in torch_dist of layers with experts: those of Transformer
    Engine's layers, or of the local layers."""
    saver_checkpoint_type: Literal["meta", "hf"] | None = None
    """Layout that --saver llama_mistral writes: consolidated.NN.pth and params.json as Meta and
    Mistral publish them (meta), or the files that `transformers` loads (hf, the default)."""
    make_vocab_size_divisible_by: int | None = None
    """Pad the vocabulary again, to a multiple of this times the target tensor-parallel size. Unset:
    the number of rows stays."""
    true_vocab_size: int | None = None
    """Number of tokens of the tokenizer, if the files do not say it. --saver core, legacy and
    torch_dist then pad the vocabulary again, as Megatron-LM does."""
    num_attention_heads: int | None = None
    """Query heads, for files of Megatron-LM without arguments; its GPT-345M has 16."""
    upcycle_num_experts: int | None = None
    """Turn a dense GPT into a mixture of this many experts, each a copy of the layer's MLP; train
    it with --load and --finetune."""
    upcycle_router_topk: int = 2
    """Experts that a token will visit."""
    upcycle_seed: int = 1234
    """Seed of the weights of the new routers."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer, by Megatron-LM's name, to store instead of the source's."""
    tokenizer_model: str | None = location(None)
    """File or folder of that tokenizer. Without --tokenizer-type: Llama2Tokenizer if the name ends
    with .model, otherwise HuggingFaceTokenizer."""
    vocab_file: str | None = location(None)
    """Vocabulary of that tokenizer (GPT2BPETokenizer, BertWordPiece)."""
    merge_file: str | None = location(None)
    """Merges of that tokenizer (GPT2BPETokenizer)."""
    vocab_size: int | None = None
    """Number of ids of that tokenizer (NullTokenizer); the last id ends a document."""
    vocab_extra_ids: int | None = None
    """Sentinel tokens <extra_id_N> of that tokenizer (BertWordPiece, SentencePieceTokenizer).
    Unset: 100 with BertWordPieceCase if the checkpoint has rows for them, otherwise none."""
    checkpoint_type: Literal["meta", "hf"] | None = execution(None)
    """Accepted for Megatron-LM's command lines and ignored: the files determine it."""
    model_size: str | None = execution(None)
    """Accepted for Megatron-LM's command lines and ignored: the files determine it."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_formats()
        self._check_virtual_stages()
        self._check_ends()
        load, save = self.load_dir.rstrip("/") + "/", self.save_dir.rstrip("/") + "/"
        if load.startswith(save) or save.startswith(load):
            raise ConfigError(
                f"--save-dir {self.save_dir} and --load-dir {self.load_dir} must not be the same "
                "folder or one inside the other; choose another --save-dir"
            )

    def _check_counts(self) -> None:
        check_at_least(self, 1, *COUNTS, *SHARDS)
        check_at_most(self, MAX_SIZE, *COUNTS)
        check_at_most(self, MAX_RANKS, *SHARDS)
        ep = self.target_expert_parallel_size or 1
        if ep > 1 and self.saver not in ("core", "torch_dist"):
            raise ConfigError(
                f"--target-expert-parallel-size {ep} needs --saver core or torch_dist; files of "
                f"--saver {self.saver} load at any number of expert-parallel ranks, so leave it out"
            )

    def experts(self) -> MoEConfig | None:
        """The experts of --upcycle-num-experts."""
        if self.upcycle_num_experts is None:
            return None
        count, topk = self.upcycle_num_experts, self.upcycle_router_topk
        if not 2 <= topk <= count:
            raise ConfigError(
                f"--upcycle-router-topk ({topk}) must be from 2 to --upcycle-num-experts ({count})"
            )
        return MoEConfig(num_experts=count, moe_router_topk=topk)

    def _check_formats(self) -> None:
        self.experts()
        for option, value in (("--loader", self.loader), ("--saver", self.saver)):
            if value in LATER:
                raise ConfigError(f"{option} {value} is not in this version: {LATER[value]}")
        if self.num_shards is not None and self.saver in SPLIT:
            raise ConfigError(
                f"--num-shards {self.num_shards}: --saver {self.saver} writes one file for each "
                "rank; give --target-tensor-parallel-size and --target-pipeline-parallel-size"
            )
        if len(given := [f"--{name}" for name in NUMBER_FORMATS if getattr(self, name)]) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other; give one")
        self._check_meta()
        lone = self.vocab_file or self.merge_file or self.vocab_size or self.vocab_extra_ids
        if self._tokenizer_type() is None and lone and self.true_vocab_size is None:
            raise ConfigError(
                "--vocab-file, --merge-file, --vocab-size and --vocab-extra-ids need "
                "--tokenizer-type; to say only how many tokens there are, give --true-vocab-size"
            )
        self.tokenizer()

    def _check_meta(self) -> None:
        """Check the options for the layout of --saver llama_mistral."""
        kind = self.saver_checkpoint_type
        if kind is not None and self.saver != "llama_mistral":
            raise ConfigError(
                f"--saver-checkpoint-type {kind} needs --saver llama_mistral, but --saver is "
                f"{self.saver}; leave it out, or give that saver"
            )
        if kind != "meta":
            return
        if self.num_shards is not None:
            raise ConfigError(
                f"--num-shards {self.num_shards}: Meta's layout has one file for each tensor-"
                "parallel rank; give --target-tensor-parallel-size"
            )
        if self.pipeline_parallel_size > 1:
            raise ConfigError(
                f"{PP} {self.pipeline_parallel_size}: Meta's layout has all layers in each file; "
                "leave it out"
            )

    def _check_virtual_stages(self) -> None:
        """Check what does not depend on the number of layers; `split` checks the rest."""
        given = {
            PER_VIRTUAL_STAGE: self.target_num_layers_per_virtual_pipeline_stage,
            VIRTUAL_STAGES: self.target_num_virtual_stages_per_pipeline_rank,
        }
        named = [flag for flag, value in given.items() if value is not None]
        if not named:
            return
        flag = named[0]
        if len(named) > 1:
            raise ConfigError(
                f"{PER_VIRTUAL_STAGE} and {VIRTUAL_STAGES} exclude each other; give one"
            )
        if self.saver not in SPLIT:
            raise ConfigError(
                f"{flag} {given[flag]} needs --saver core or legacy; files of --saver {self.saver} "
                "load at any number of stages, so leave it out"
            )
        if self.pipeline_parallel_size == 1:
            raise ConfigError(
                f"{flag} {given[flag]}: virtual stages need several pipeline ranks; give {PP} 2 or "
                "more, or leave it out"
            )

    def _check_ends(self) -> None:
        """Check the options for first and last ranks with another number of layers."""
        for flag, layers in self.ends.items():
            if self.saver != "core":
                why = (
                    "legacy models have the same number of layers on every rank"
                    if self.saver in ("legacy", "megatron")
                    else f"files of --saver {self.saver} load at any split; leave it out"
                )
                raise ConfigError(f"{flag} {layers} needs --saver core; {why}")
            if self.pipeline_parallel_size == 1:
                raise ConfigError(
                    f"{flag} {layers} needs several pipeline ranks; give {PP} 2 or more, or leave "
                    "it out"
                )
            if self.target_num_layers_per_virtual_pipeline_stage is not None:
                raise ConfigError(
                    f"{flag} makes stages of different sizes, so {PER_VIRTUAL_STAGE} does not "
                    f"apply; give {VIRTUAL_STAGES} instead"
                )

    def check_model(self, model: TransformerConfig) -> None:
        """Refuse to export a model of these options if `transformers` has no class for it."""
        if self.model_type is not None and self.model_type.lower() != model.model_type:
            raise ConfigError(
                f"--model-type {self.model_type}: {self.load_dir} holds a {model.model_type}; "
                "leave the option out"
            )
        if self.saver == "hf":
            # Imported late: --help does not need it.
            from trainyard.conversion.huggingface.architecture import architecture

            architecture(model)

    @property
    def number_format(self) -> str | None:
        """The number format of the weights to write; None: each in its own."""
        return next((name for name in NUMBER_FORMATS if getattr(self, name)), None)

    @property
    def ends(self) -> dict[str, int]:
        """Layers of the first and the last pipeline rank, by flag; only those that were given."""
        given = {
            FIRST: self.target_decoder_first_pipeline_num_layers,
            LAST: self.target_decoder_last_pipeline_num_layers,
        }
        return {flag: layers for flag, layers in given.items() if layers is not None}

    @property
    def tensor_parallel_size(self) -> int:
        """Tensor-parallel ranks of the files to write."""
        return self.target_tensor_parallel_size or 1

    @property
    def pipeline_parallel_size(self) -> int:
        """Pipeline-parallel ranks of the files to write."""
        return self.target_pipeline_parallel_size or 1

    @property
    def shards(self) -> int:
        """Files of each kind, in formats without files of ranks."""
        return self.num_shards or self.tensor_parallel_size * self.pipeline_parallel_size

    def tokenizer(self) -> TokenizerConfig | None:
        """The tokenizer to store instead of the source's, or None; ConfigError if it lacks an
        option."""
        kind = self._tokenizer_type()
        if kind is None:
            return None
        options = {
            "tokenizer_type": kind,
            "tokenizer_model": self.tokenizer_model,
            "vocab_file": self.vocab_file,
            "merge_file": self.merge_file,
            "vocab_size": self.vocab_size,
            "vocab_extra_ids": self.vocab_extra_ids,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return from_dict(TokenizerConfig, given)

    def _tokenizer_type(self) -> TokenizerType | None:
        """The type of the tokenizer to store: given, or as its files are those of one type."""
        if self.tokenizer_type is not None or self.tokenizer_model is not None:
            return self.tokenizer_type or _type_of(self.tokenizer_model or "")
        if self.vocab_file is not None and self.merge_file is not None:
            return "GPT2BPETokenizer"
        is_bert = self.vocab_file is not None and self.vocab_file.endswith(".txt")
        return "BertWordPieceLowerCase" if is_bert else None

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint, and the tokenizer to store."""
        tokenizer = (self.tokenizer_model, self.vocab_file, self.merge_file)
        given = tuple(url for url in tokenizer if url and self._tokenizer_type())
        return {"checkpoint": (self.load_dir,), **({"tokenizer": given} if given else {})}

    def output(self) -> Output | None:
        """A folder."""
        return Output.directory(self.save_dir)


def _type_of(tokenizer_model: str) -> TokenizerType:
    """The type of a tokenizer by its file: Llama's is a model of SentencePiece."""
    return "Llama2Tokenizer" if tokenizer_model.endswith(".model") else "HuggingFaceTokenizer"
