"""Options of `python -m stages.reshard`: those of Megatron-LM's converter, and ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import execution, from_dict, location
from trainyard.errors import ConfigError
from trainyard.tokenizers.config import TokenizerConfig, TokenizerType

Loader = Literal[
    "auto", "trainyard", "hf", "llama_mistral", "core", "legacy", "torch_dist", "mixtral_hf"
]
Saver = Literal["trainyard", "hf", "llama_mistral", "core", "legacy", "torch_dist", "mixtral_hf"]

LATER = {
    "mixtral_hf": "it comes with mixtures of experts",
}
"""Formats of Megatron-LM's converter that this version does not have, and when it will."""

SPLIT = ("core", "legacy")
"""Savers that cut tensors by ranks."""

MEGATRON = (*SPLIT, "torch_dist")
"""Savers that pad the vocabulary as Megatron-LM does."""

PER_VIRTUAL_STAGE = "--target-num-layers-per-virtual-pipeline-stage"
VIRTUAL_STAGES = "--target-num-virtual-stages-per-pipeline-rank"
PP = "--target-pipeline-parallel-size"
FIRST = "--target-decoder-first-pipeline-num-layers"
LAST = "--target-decoder-last-pipeline-num-layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardConfig:
    """Write a checkpoint again, bit for bit: from one format, or number of files, into another."""

    load_dir: str = location()
    """What to read: a run folder (its latest step), a step folder, or somebody else's folder."""
    save_dir: str = location()
    """Folder to write; a place of its own."""
    loader: Loader = "auto"
    """Format to read: ours, a Hugging Face folder (hf), Megatron-LM's files of ranks (core, legacy)
    or its distributed checkpoint (torch_dist), Llama as Meta or Hugging Face publish it
    (llama_mistral), or what the files say."""
    saver: Saver = "trainyard"
    """Format to write: ours, a Hugging Face folder for `transformers` (hf), a Llama or Mistral in
    the layout of --saver-checkpoint-type (llama_mistral), the files of the ranks of Megatron-LM's
    models (core, legacy), or its distributed checkpoint, which any number of ranks loads
    (torch_dist)."""
    model_type: Literal["GPT", "BERT", "T5"] = "GPT"
    """Kind of model; GPT so far."""
    num_shards: int | None = None
    """Files that weights (and as many that optimizer states) are spread over; unset: 1, or as many
    as the target sizes make."""
    target_tensor_parallel_size: int | None = None
    """Ranks that share out each layer, in files of Megatron-LM's and Meta's, which has one for each
    of them; unset: 1."""
    target_pipeline_parallel_size: int | None = None
    """Ranks that share out the layers, in files of Megatron-LM's; unset: 1."""
    target_num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of each of the virtual stages that a pipeline rank has, in files for Megatron-LM's
    interleaved schedule; unset: a rank has one stage."""
    target_num_virtual_stages_per_pipeline_rank: int | None = None
    """The same, said by the number of virtual stages."""
    target_decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank, in core files for a run with Megatron-LM's
    --decoder-first-pipeline-num-layers; the other ranks share the rest evenly. Unset: as many on
    every rank."""
    target_decoder_last_pipeline_num_layers: int | None = None
    """The same for the last pipeline rank."""
    target_expert_parallel_size: int | None = None
    """Ranks that share out experts; 1, until there are some."""
    saver_transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Whose names core files have for norms: those of Transformer Engine, or of the local
    layers."""
    saver_checkpoint_type: Literal["meta", "hf"] | None = None
    """Layout that --saver llama_mistral writes: consolidated.NN.pth and params.json as Meta and
    Mistral publish them (meta), or what `transformers` loads (hf, the default)."""
    make_vocab_size_divisible_by: int | None = None
    """Pad the vocabulary anew, to a multiple of this times the target tensor-parallel size; unset:
    the rows stay as they are."""
    true_vocab_size: int | None = None
    """Tokens that the tokenizer knows, where the files do not say it. --saver core, legacy and
    torch_dist pad them anew, as Megatron-LM does."""
    num_attention_heads: int | None = None
    """Query heads, for files of Megatron-LM that hold no arguments, such as its GPT-345M: 16."""
    tokenizer_type: TokenizerType | None = None
    """Kind of the tokenizer to carry in place of the source's, by Megatron-LM's name."""
    tokenizer_model: str | None = location(None)
    """File or folder of that tokenizer; the kind alone, or HuggingFaceTokenizer."""
    vocab_file: str | None = location(None)
    """Vocabulary of that tokenizer (GPT2BPETokenizer, BertWordPiece)."""
    merge_file: str | None = location(None)
    """Merges of that tokenizer (GPT2BPETokenizer)."""
    vocab_size: int | None = None
    """Ids of that tokenizer (NullTokenizer), of which the last ends a document."""
    checkpoint_type: Literal["meta", "hf"] | None = execution(None)
    """Accepted with --loader llama_mistral, as Megatron-LM wants it; the files say it."""
    model_size: str | None = execution(None)
    """Accepted with --loader llama_mistral, as Megatron-LM wants it; the files say it."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_formats()
        self._check_virtual_stages()
        self._check_ends()
        load, save = self.load_dir.rstrip("/") + "/", self.save_dir.rstrip("/") + "/"
        if load.startswith(save) or save.startswith(load):
            raise ConfigError(
                f"--save-dir {self.save_dir} and --load-dir {self.load_dir} lie in one another; "
                "choose a folder of its own for what is written"
            )

    def _check_counts(self) -> None:
        for name in (
            "num_shards",
            "target_tensor_parallel_size",
            "target_pipeline_parallel_size",
            "target_num_layers_per_virtual_pipeline_stage",
            "target_num_virtual_stages_per_pipeline_rank",
            "target_decoder_first_pipeline_num_layers",
            "target_decoder_last_pipeline_num_layers",
            "target_expert_parallel_size",
            "make_vocab_size_divisible_by",
            "true_vocab_size",
            "vocab_size",
            "num_attention_heads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if (self.target_expert_parallel_size or 1) > 1:
            raise ConfigError(
                f"--target-expert-parallel-size {self.target_expert_parallel_size}: there are no "
                "experts in a GPT of this version; leave it out"
            )

    def _check_formats(self) -> None:
        for option, value in (("--loader", self.loader), ("--saver", self.saver)):
            if value in LATER:
                raise ConfigError(f"{option} {value} is not in this version: {LATER[value]}")
        if self.model_type != "GPT":
            raise ConfigError(
                f"--model-type {self.model_type}: this version converts GPT; the others come with "
                "their models"
            )
        if self.num_shards is not None and self.saver in SPLIT:
            raise ConfigError(
                f"--num-shards {self.num_shards}: --saver {self.saver} writes one file for each "
                "rank; give --target-tensor-parallel-size and --target-pipeline-parallel-size"
            )
        self._check_meta()
        if self.tokenizer_type is None and (self.vocab_file or self.merge_file or self.vocab_size):
            raise ConfigError("--vocab-file, --merge-file and --vocab-size need --tokenizer-type")
        self.tokenizer()

    def _check_meta(self) -> None:
        """The layouts of --saver llama_mistral."""
        kind = self.saver_checkpoint_type
        if kind is not None and self.saver != "llama_mistral":
            raise ConfigError(
                f"--saver-checkpoint-type {kind} is of --saver llama_mistral, and this is --saver "
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
        """What does not depend on how many layers there are."""
        given = {
            PER_VIRTUAL_STAGE: self.target_num_layers_per_virtual_pipeline_stage,
            VIRTUAL_STAGES: self.target_num_virtual_stages_per_pipeline_rank,
        }
        named = [flag for flag, value in given.items() if value is not None]
        if not named:
            return
        flag = named[0]
        if len(named) > 1:
            raise ConfigError(f"{PER_VIRTUAL_STAGE} and {VIRTUAL_STAGES} say the same; give one")
        if self.saver not in SPLIT:
            raise ConfigError(
                f"{flag} {given[flag]}: --saver {self.saver} writes what any number of stages "
                "loads; leave it out, or take --saver core or legacy, whose files are of ranks"
            )
        if self.pipeline_parallel_size == 1:
            raise ConfigError(
                f"{flag} {given[flag]}: virtual stages are of several pipeline ranks; give "
                f"{PP} 2 or more, or leave it out"
            )

    def _check_ends(self) -> None:
        """The same for ranks of more or fewer layers."""
        for flag, layers in self.ends.items():
            if self.saver != "core":
                why = (
                    "its models have as many layers on every rank"
                    if self.saver == "legacy"
                    else "it writes what any split loads; leave it out"
                )
                raise ConfigError(
                    f"{flag} {layers} is of --saver core; --saver {self.saver}: {why}"
                )
            if self.pipeline_parallel_size == 1:
                raise ConfigError(f"{flag} {layers}: give {PP} 2 or more, or leave it out")
            if self.target_num_layers_per_virtual_pipeline_stage is not None:
                raise ConfigError(f"with {flag} stages differ; give {VIRTUAL_STAGES}, which works")

    @property
    def ends(self) -> dict[str, int]:
        """Layers of the first and the last pipeline rank, by flag, where they were given."""
        given = {
            FIRST: self.target_decoder_first_pipeline_num_layers,
            LAST: self.target_decoder_last_pipeline_num_layers,
        }
        return {flag: layers for flag, layers in given.items() if layers is not None}

    @property
    def tensor_parallel_size(self) -> int:
        """Of the files to be written."""
        return self.target_tensor_parallel_size or 1

    @property
    def pipeline_parallel_size(self) -> int:
        """Of the files to be written."""
        return self.target_pipeline_parallel_size or 1

    @property
    def shards(self) -> int:
        """Files of each kind where ranks do not count."""
        return self.num_shards or self.tensor_parallel_size * self.pipeline_parallel_size

    def tokenizer(self) -> TokenizerConfig | None:
        """The one to carry in place of the source's; ConfigError where it lacks an option."""
        if self.tokenizer_type is None and self.tokenizer_model is None:
            return None
        options = {
            "tokenizer_type": self.tokenizer_type or "HuggingFaceTokenizer",
            "tokenizer_model": self.tokenizer_model,
            "vocab_file": self.vocab_file,
            "merge_file": self.merge_file,
            "vocab_size": self.vocab_size,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return from_dict(TokenizerConfig, given)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint, and the tokenizer to carry."""
        tokenizer = (self.tokenizer_model, self.vocab_file, self.merge_file)
        given = tuple(url for url in tokenizer if url)
        return {"checkpoint": (self.load_dir,), **({"tokenizer": given} if given else {})}

    def output(self) -> Output | None:
        """A folder."""
        return Output.directory(self.save_dir)
