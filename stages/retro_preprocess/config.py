"""Options of `python -m stages.retro_preprocess`, by Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import also, check_at_least, execution, location, suggest
from trainyard.embedding.config import Pooling
from trainyard.errors import ConfigError

STEPS = ("db-build", "index-train", "index-add", "query-neighbors")
"""What a task consists of, in order."""

TASKS: dict[str, tuple[str, ...]] = {
    "build": STEPS,
    "index-build": ("index-train", "index-add"),
    **{step: (step,) for step in STEPS},
    "build_db": ("db-build",),
    "train_index": ("index-train",),
    "add_to_index": ("index-add",),
    "query": ("query-neighbors",),
    "query-pretraining-neighbors": ("query-neighbors",),
}
"""By the names of Megatron-LM, then those of its guides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroPreprocessConfig:
    """Build a Retro project: chunk database, index, neighbours of a training's samples.

    Options that are not given come from the project's config.json if it is there. What is finished
    is not made again."""

    retro_project_dir: str = also("retro_workdir", role="location")
    """Folder or URL of the project. Also --retro-workdir."""
    retro_tasks: tuple[str, ...] = ("build",)
    """Tasks, separated by commas or blanks: build (all), db-build, index-build (the next two),
    index-train, index-add, query-neighbors; or as in guides: build_db, train_index, add_to_index,
    query."""
    retro_task_validate: float | None = execution(None)
    """Make nothing: compute this share of the blocks of every step again and compare. The training
    of the index has no blocks."""
    load: str | None = location(None)
    """The BERT that embeds chunks, any checkpoint that retro_embed reads. Not kept in config.json:
    give it in every call."""
    embedder: str | None = None
    """Instead of --load: an embedder of an installed package, as for retro_embed."""
    retro_gpt_seed: int | None = None
    """Seed of the order of samples; default 1234."""
    retro_gpt_data_path: tuple[str, ...] = location(())
    """Token files, WEIGHT PREFIX ... or PREFIX ...; relative prefixes are below PROJECT/data."""
    retro_gpt_data_cache_path: str | None = execution(None)
    """Folder for indices of samples."""
    retro_gpt_split: str | None = None
    """Parts of the documents for training, validation, testing; default 969,30,1."""
    retro_gpt_train_samples: int | None = None
    """Samples of the whole training."""
    retro_gpt_eval_interval: int | None = None
    """Steps between two validations."""
    retro_gpt_eval_iters: int | None = None
    """Batches of a validation."""
    retro_gpt_tokenizer_type: str | None = None
    """Tokenizer of the token files."""
    retro_gpt_tokenizer_model: str | None = location(None)
    """Its model. This and the next files: relative names are below the project."""
    retro_gpt_vocab_file: str | None = location(None)
    """Its vocabulary."""
    retro_gpt_merge_file: str | None = location(None)
    """Its merges."""
    retro_gpt_seq_length: int | None = None
    """Tokens of a sample."""
    retro_gpt_global_batch_size: int | None = None
    """Samples of a step."""
    retro_gpt_chunk_length: int | None = None
    """Tokens of a chunk; default 64."""
    retro_bert_tokenizer_type: Literal["BertWordPieceLowerCase", "BertWordPieceCase"] | None = None
    """Tokenizer of the BERT."""
    retro_bert_vocab_file: str | None = location(None)
    """Its vocab.txt."""
    retro_bert_batch_size: int | None = None
    """Chunks of a batch; default 128."""
    retro_bert_max_chunk_length: int | None = None
    """Most BERT tokens of a chunk; default 256."""
    retro_block_size: int | None = None
    """Chunks of a block of embeddings or neighbours; default 100000."""
    retro_doc_block_size: int | None = None
    """Documents of a block of the database; default 100000."""
    retro_index_type: Literal["faiss-base", "faiss-par-add"] | None = None
    """Accepted; vectors are always encoded block by block."""
    retro_index_str: str | None = None
    """The index, for faiss's index_factory; default: one that fits."""
    retro_index_ntrain: int | None = None
    """Chunks that train the index."""
    retro_index_train_load_fraction: float | None = None
    """Share of the sampled embeddings that train the index; default 1."""
    retro_index_add_load_fraction: float | None = None
    """Share of the embeddings that are added; default 1."""
    retro_index_delete_training_embeddings: bool = execution(True)
    """Accepted: embeddings are outputs of their own and stay."""
    retro_index_delete_added_codes: bool = execution(True)
    """Accepted: codes are removed once the index is published."""
    retro_query_ef_search: int | None = None
    """Width of the search in the coarse quantizer; default 256."""
    retro_query_nprobe: int | None = None
    """Lists that a query searches; default: that of the index, chosen by its recall."""
    retro_query_num_neighbors_query: int | None = None
    """Chunks to find for each chunk; default 200."""
    retro_query_num_neighbors_save: int | None = None
    """Neighbours to keep; default 20."""
    pooling: Pooling | None = None
    """Vector of a text, as for retro_embed; default: mean, Megatron-LM's."""
    normalize: bool = False
    """Scale every vector to length 1."""
    retro_sample_mode: Literal["uniform", "prefix"] | None = None
    """How chunks that train the index are drawn, as for retro_db; default: uniform."""
    target_recall: float | None = None
    """Recall for which the number of lists to search is chosen; default 0.95."""
    retro_min_recall: float | None = None
    """Publish no index of less recall; default 0."""
    retro_exclude_evaluation: tuple[str, ...] = location(())
    """Prefixes of token files of evaluation sets, whose text no neighbour repeats."""
    retro_exclude_run: int | None = None
    """Tokens in a row that repeat it; default 32."""
    retro_query_gpus: Literal["all"] | None = None
    """all: search for neighbours on all GPUs, as for faiss_query; default: the CPU."""
    bf16: bool = execution(False)
    """Embed in bfloat16."""
    fp16: bool = execution(False)
    """Embed in float16."""
    nproc_per_node: int = execution(1)
    """Ranks that embed, each with a GPU if there are any."""

    def __post_init__(self) -> None:
        """Refuse unknown tasks and numbers of no sense."""
        check_at_least(self, 1, "nproc_per_node")
        for task in self.tasks():
            if task not in TASKS:
                raise ConfigError(f"--retro-tasks {task}: {suggest(task, TASKS, 'tasks:')}")
        if not self.tasks():
            raise ConfigError("--retro-tasks names no task; leave it out for all")
        if self.retro_task_validate is not None and not 0 < self.retro_task_validate <= 1:
            raise ConfigError(
                f"--retro-task-validate must be above 0 and at most 1, got "
                f"{self.retro_task_validate}"
            )
        queried = "query-neighbors" in self.steps()
        if self.retro_task_validate is not None and self.retro_query_gpus is not None and queried:
            raise ConfigError(
                "--retro-task-validate compares neighbours one by one, which a search by "
                "--retro-query-gpus may order in another way; name the other tasks: "
                "--retro-tasks db-build,index-build"
            )
        if self.load is not None and self.embedder is not None:
            raise ConfigError("give --load (a BERT) or --embedder (a function), not both")
        if self.bf16 and self.fp16:
            raise ConfigError("give --bf16 or --fp16, not both")

    def tasks(self) -> list[str]:
        """The names that are given."""
        return [name for word in self.retro_tasks for name in word.split(",") if name]

    def steps(self) -> list[str]:
        """What is to be done, in order, each once."""
        wanted = {step for task in self.tasks() for step in TASKS[task]}
        return [step for step in STEPS if step in wanted]

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None: each stage has inputs of its own."""
        return {}

    def output(self) -> Output | None:
        """None: each stage has an output of its own."""
        return None
