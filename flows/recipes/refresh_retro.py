"""A Retro index that grows with a corpus: new documents are cut, embedded and added to it.

Under the root of a recipe with [retro_db], `yard/NAME/retro/`:

    VERSION/db, VERSION/index    chunk database and index of all sources of a version of the corpus;
                                 VERSION is that of the corpus and a digest of sources and options
    VERSION/embeddings           of the chunks that the version before does not have
    current.json                 the pointer: what the newest version consists of

A source is a dataset of the database. As long as sources only come, a version grows from the one
before, which stays as it is; once one has gone or an option changed, it is built anew. No Prefect
here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from flows.recipes.corpus import tokenizer_of
from flows.recipes.corpus_versions import (
    CURRENT,
    FORMAT_VERSION,
    CorpusVersion,
    replace_pointer,
    unique_sources,
)
from flows.recipes.recipe import Recipe
from flows.recipes.refresh import check_refresh
from flows.recipes.retro import check_index_training, index_of_sample, written_vocabulary
from flows.recipes.stage_job import StageJob
from trainyard import json_text
from trainyard.artifacts import conditional
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import resolve
from trainyard.config import from_table
from trainyard.errors import ArtifactError, ConfigError

RETRO = "retro"
ALL_DOCUMENTS = "100,0,0"
"""Every document can be retrieved, unless [retro_db] says otherwise: a source may be a single
document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroVersion:
    """A complete, immutable version of the index."""

    version: str
    """That of the corpus."""
    options_digest: str
    """Digest of all that decides chunks, embeddings and the trained index."""
    data_path: tuple[str, ...]
    """Token files of its datasets, in order."""
    database: str
    embeddings: tuple[str, ...]
    """Folders whose vectors follow one another, a chunk each."""
    index: str
    previous: str | None = None
    """The version that it grew from; None if it was built from scratch."""
    format_version: int = field(default=FORMAT_VERSION)

    def encode(self) -> bytes:
        """The document."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroRefresh:
    """The jobs for a version of the corpus."""

    version: RetroVersion
    jobs: tuple[StageJob, ...]
    """Empty if the version is there."""
    read: str | None
    """Version of the pointer's file on which this is based."""


def wants_retro(recipe: Recipe) -> bool:
    """Whether the recipe has an index that grows."""
    return "retro_db" in recipe.tables


def check_retro(recipe: Recipe) -> None:
    """Raise ConfigError for a recipe whose index cannot grow."""
    if not recipe.encoder:
        raise ConfigError(
            f"{recipe.where}: [retro_db] makes corpus-refresh add new documents to an index, whose "
            'vectors all come from one BERT; give encoder = "FOLDER" above the tables'
        )
    check_index_training(recipe)
    template = check_refresh(recipe)
    if len(template.json_keys) > 1:
        raise ConfigError(
            f"{recipe.where} [tokenize]: json_keys {', '.join(template.json_keys)}: an index is of "
            "one text a document; leave the others out, or [retro_db]"
        )


def plan_retro(recipe: Recipe, corpus: CorpusVersion) -> RetroRefresh:
    """Compare the sources of a version of the corpus with the current index; writes nothing."""
    check_retro(recipe)
    template = check_refresh(recipe)
    stem = template.file_stem(template.json_keys[0])
    parts = [source.part + stem for source in unique_sources(corpus.sources)]
    options = _options_digest(recipe, corpus)
    current, read = read_retro_pointer(recipe.at(RETRO, CURRENT))
    if current is not None and current.options_digest != options:
        current = None
    if current is not None and set(current.data_path) == set(parts):
        return RetroRefresh(version=current, jobs=(), read=read)
    base = current if current is not None and set(current.data_path) < set(parts) else None
    known = () if base is None else base.data_path
    data_path = (*known, *(part for part in parts if part not in known))
    name = f"{corpus.version}-{digest_document([options, data_path])[:12]}"
    version = RetroVersion(
        version=corpus.version,
        options_digest=options,
        data_path=data_path,
        database=recipe.at(RETRO, name, "db"),
        embeddings=(
            *(() if base is None else base.embeddings),
            recipe.at(RETRO, name, "embeddings"),
        ),
        index=recipe.at(RETRO, name, "index"),
        previous=None if base is None else base.version,
    )
    return RetroRefresh(version=version, jobs=_jobs(recipe, name, version, base), read=read)


def publish_retro(recipe: Recipe, work: RetroRefresh) -> None:
    """Make the version the current one. InfrastructureError if another run has published first."""
    replace_pointer(recipe.at(RETRO, CURRENT), work.version.encode(), work.read)


def _jobs(
    recipe: Recipe, name: str, version: RetroVersion, base: RetroVersion | None
) -> tuple[StageJob, ...]:
    data = {"data_path": list(version.data_path), **tokenizer_of(recipe)}
    grown = {} if base is None else {"retro_base_db": base.database}
    split = (
        {} if "retro_gpt_split" in recipe.table("retro_db") else {"retro_gpt_split": ALL_DOCUMENTS}
    )
    database = recipe.job("retro_db", {**data, **grown, **split, "output_dir": version.database})
    chosen = {
        **data,
        **written_vocabulary(recipe),
        "load": recipe.encoder,
        "retro_db": version.database,
    }

    def embed(kind: str, place: str, **more: Any) -> StageJob:
        decided = {**chosen, **more, "chunks": kind, "output_dir": place}
        return recipe.job("retro_embed", decided, f"embed-{kind}")

    train = embed("train", version.embeddings[-1], **grown)
    empty = recipe.at(RETRO, name, "index_empty")
    before: tuple[StageJob, ...] = ()
    if base is None:
        place = recipe.at(RETRO, name, "embeddings-sampled")
        sampled = embed("sampled", place, **index_of_sample(recipe))
        given = {"embeddings": sampled.document["output_dir"], "output_dir": empty}
        before = (sampled, recipe.job("faiss_train", given))
    add = recipe.job(
        "faiss_add",
        {
            "index": empty if base is None else base.index,
            "embeddings": list(version.embeddings),
            "output_dir": version.index,
        },
    )
    return (database, *before, train, add)


def _options_digest(recipe: Recipe, corpus: CorpusVersion) -> str:
    tables = [recipe.table(name) for name in ("retro_db", "retro_embed", "faiss_train")]
    encoder = resolve("encoder", [recipe.encoder]).digest
    return digest_document([corpus.options_digest, encoder, *tables])


def read_retro_pointer(url: str) -> tuple[RetroVersion | None, str | None]:
    """The version that a pointer names, and the version of its file; twice None if there is none.

    Raises ArtifactError for a file that is no such pointer."""
    found = conditional.read_version(url)
    if found is None:
        return None, None
    try:
        document = json_text.loads(found[0])
        if document["format_version"] > FORMAT_VERSION:
            raise ArtifactError(
                f"{url}: format {document['format_version']} is newer than {FORMAT_VERSION}, the "
                "newest this version of trainyard reads; upgrade trainyard"
            )
        return from_table(RetroVersion, document, url), found[1]
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{url}: not a pointer to an index that grows ({error!r})") from error
