"""Faiss on the CPU; beside `index_gpus` the only module that imports it.

An index is built from faiss's factory string, trained once, and filled from codes, which are made
block by block and can be kept. The same vectors give the same bytes on any number of threads: the
graph of a coarse quantizer, whose edges depend on the order in which threads insert, is built by
one."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import faiss
import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval.index_choice import MOST_POINTS_PER_LIST, POINTS_PER_LIST
from trainyard.retrieval.index_document import DOCUMENT, IndexDocument
from trainyard.retrieval.index_gpus import cluster_on_gpus
from trainyard.retrieval.index_trial import try_index
from trainyard.retrieval.vectors import Vectors

log = logging.getLogger(__name__)

Codes = NDArray[np.uint8]
"""[vectors, code bytes]"""

PRODUCT_CENTROIDS = 256
"""Vectors that a product quantizer of 8 bits needs at least."""

READ_BYTES = WRITE_BYTES = 1 << 22

TABLE_BYTES = 1 << 31

MOST_PARTS = 8
"""Indices within each other: a rotation, lists, their quantizer, its vectors."""

_PLACE = re.compile(r"Error in .{0,500} at \S{1,200}:[0-9]{1,6}: (Error: )?")


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """What an index needs and what it will take."""

    num_lists: int
    """Of an inverted file; 0 for any other index."""
    code_bytes: int
    """For each vector, with the number of its list; 0 without codes."""
    has_codes: bool
    """False for an index that is filled in order and by one thread: graphs (HNSW, NSG alone) and
    fast-scan, whose codes are packed together."""
    needs_training: bool

    @property
    def least_training(self) -> int:
        """Training vectors below which faiss fails, or makes an index that finds little."""
        if not self.needs_training:
            return 0
        return max(self.num_lists * POINTS_PER_LIST, PRODUCT_CENTROIDS)

    @property
    def most_training(self) -> int | None:
        """Training vectors beyond which faiss drops some; None without lists."""
        return self.num_lists * MOST_POINTS_PER_LIST or None


def create(dimensions: int, index_str: str) -> Any:
    """An empty, untrained index of squared Euclidean distances.

    Raises ConfigError for a string that faiss does not know, or that does not fit."""
    try:
        index = faiss.index_factory(dimensions, index_str)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--retro-index-str {index_str!r}: faiss builds no index from it for vectors of "
            f"{dimensions} dimensions ({_faiss_words(error)}); an example: IVF4096,SQ8"
        ) from error
    if isinstance(innermost(index), faiss.IndexIDMap):
        raise ConfigError(
            f"--retro-index-str {index_str!r}: IDMap keeps ids of its own, and here the id of a "
            "vector is its place; leave it out"
        )
    return index


def facts(index: Any) -> IndexFacts:
    """What the index needs, trained or not."""
    lists = inverted_file(index)
    inner = innermost(index)
    has_codes = isinstance(inner, (faiss.IndexIVF, faiss.IndexFlatCodes)) and not isinstance(
        inner, faiss.IndexIVFFastScan
    )
    return IndexFacts(
        num_lists=0 if lists is None else int(lists.nlist),
        code_bytes=int(index.sa_code_size()) if has_codes else 0,
        has_codes=has_codes,
        needs_training=not index.is_trained,
    )


def train(index: Any, vectors: Vectors) -> None:
    """Train the index; on all GPUs where faiss is built for them and finds some."""
    lists = inverted_file(index)
    if lists is None or not isinstance(faiss.downcast_index(lists.quantizer), faiss.IndexHNSW):
        if lists is not None:
            cluster_on_gpus(lists)
        index.train(vectors)
        return
    # Train with exact assignment, then build the graph over the centroids with one thread.
    graph, is_own = faiss.downcast_index(lists.quantizer), lists.own_fields
    exact = faiss.IndexFlatL2(graph.d)
    trains_alone, lists.quantizer_trains_alone = lists.quantizer_trains_alone, 0
    lists.own_fields, lists.quantizer = False, exact
    cluster_on_gpus(lists)
    index.train(vectors)
    with _threads(1):
        if not graph.is_trained:
            graph.train(exact.reconstruct_n(0, exact.ntotal))
        graph.add(exact.reconstruct_n(0, exact.ntotal))
    lists.quantizer, lists.own_fields = graph, is_own
    lists.quantizer_trains_alone = trains_alone
    graph.this.disown()  # type: ignore[attr-defined, unused-ignore] # it belongs to the inverted file again


def encode(index: Any, vectors: Vectors) -> Codes:
    """The codes of the vectors, each with the number of its list."""
    codes: Codes = index.sa_encode(vectors)
    return codes


def add_codes(index: Any, codes: Codes, first: int | None = None) -> None:
    """Add vectors by their codes. first: id of the first of them; default: the next one."""
    first = index.ntotal if first is None else first
    ids = np.arange(first, first + len(codes), dtype=np.int64)
    inner = innermost(index)
    inner.add_sa_codes(codes, ids)
    index.ntotal = inner.ntotal  # a transform in front has a count of its own


def add_vectors(index: Any, vectors: Vectors) -> None:
    """Add vectors to an index without codes, by one thread."""
    with _threads(1):
        index.add(vectors)


def stored_codes(index: Any, ids: NDArray[np.int64]) -> tuple[Codes, NDArray[np.bool_]]:
    """The codes of some vectors in the index, as `encode` gives them, and whether it has each.

    ids: increasing. Looks through all lists."""
    inner: Any = innermost(index)
    codes = np.zeros((len(ids), index.sa_code_size()), np.uint8)
    is_there = np.zeros(len(ids), np.bool_)
    if not isinstance(inner, faiss.IndexIVF):
        is_there = (ids >= 0) & (ids < inner.ntotal)
        flat = faiss.rev_swig_ptr(inner.codes.data(), inner.ntotal * inner.code_size)
        codes[is_there] = flat.reshape(-1, inner.code_size)[ids[is_there]]
        return codes, is_there
    ivf: Any = inner
    lists, width = ivf.invlists, ivf.coarse_code_size()
    for number in range(lists.nlist):
        size = lists.list_size(number)
        if not size:
            continue
        held = faiss.rev_swig_ptr(lists.get_ids(number), size)
        places = np.minimum(np.searchsorted(ids, held), max(len(ids) - 1, 0))
        mine = np.flatnonzero(ids[places] == held)
        rows = faiss.rev_swig_ptr(lists.get_codes(number), size * lists.code_size)
        codes[places[mine], :width] = np.frombuffer(number.to_bytes(width, "little"), np.uint8)
        codes[places[mine], width:] = rows.reshape(size, -1)[mine]
        is_there[places[mine]] = True
    return codes, is_there


def append(index: Any, other: Any) -> None:
    """Move all vectors of another index to the end of this one; both were trained as one.

    In lists they keep their ids, elsewhere ids go on."""
    inner = innermost(index)
    inner.merge_from(innermost(other), 0)
    index.ntotal = inner.ntotal


def keeps_ids(index: Any) -> bool:
    """Whether each vector has an id of its own; else its id is its place in the index."""
    return isinstance(innermost(index), faiss.IndexIVF)


def search(
    index: Any, queries: Vectors, k: int, nprobe: int, ef_search: int
) -> tuple[Vectors, NDArray[np.int64]]:
    """Squared distances and ids of the k nearest, both [queries, k]; id -1 where none was found.

    nprobe: lists that are searched, all at most. ef_search: of the graph, where there is one."""
    set_up(index, k, nprobe, ef_search)
    distances, ids = index.search(queries, k)
    return distances, ids


def set_up(index: Any, k: int, nprobe: int, ef_search: int) -> None:
    """Give the index the settings of such searches."""
    lists = inverted_file(index)
    space = faiss.ParameterSpace()
    if lists is not None:
        space.set_index_parameter(index, "nprobe", min(nprobe, lists.nlist))
        if isinstance(faiss.downcast_index(lists.quantizer), faiss.IndexHNSW):
            # The graph cannot return more lists than it visits.
            wide = max(ef_search, min(nprobe, lists.nlist))
            space.set_index_parameter(index, "quantizer_efSearch", wide)
    elif is_graph(index):
        space.set_index_parameter(index, "efSearch", max(ef_search, k))


def is_graph(index: Any) -> bool:
    """Whether its vectors are the nodes of a graph."""
    return isinstance(innermost(index), faiss.IndexHNSW)


def reset_counters() -> None:
    """Set faiss's counters of compared vectors to 0."""
    shared: Any = faiss.cvar
    for counter in (shared.indexIVF_stats, shared.hnsw_stats):
        counter.reset()


def count_compared(index: Any, num_queries: int) -> int:
    """Vectors that the queries since `reset_counters` were compared with: those of lists and graphs
    by faiss's own counters, over all shards."""
    shared: Any = faiss.cvar
    if inverted_file(index) is not None:
        return int(shared.indexIVF_stats.ndis)
    if isinstance(innermost(index), faiss.IndexHNSW):
        return int(shared.hnsw_stats.ndis)
    return int(index.ntotal) * num_queries


def vector_bytes(index: Any) -> int:
    """What an index holds of a vector to compare it with a query."""
    inner = innermost(index)
    if isinstance(inner, faiss.IndexHNSW):
        inner = faiss.downcast_index(inner.storage)
    size = getattr(inner, "code_size", 0)  # without codes: the vector itself
    return int(size) or 4 * int(inner.d)


def list_sizes(index: Any) -> NDArray[np.int64] | None:
    """Vectors in each list of an inverted file; None for another index."""
    lists = inverted_file(index)
    if lists is None:
        return None
    sizes = [lists.invlists.list_size(i) for i in range(lists.nlist)]
    return np.array(sizes, np.int64)


def write(index: Any, file: IO[bytes]) -> None:
    """Write the index to a file, in pieces: no second copy of it is made."""
    writer = faiss.PyCallbackIOWriter(file.write, WRITE_BYTES)  # type: ignore[attr-defined, unused-ignore]
    faiss.write_index(index, writer)
    del writer  # flushes


def read(path: Path) -> Any:
    """Read an index. Raises ArtifactError for a file that is none, is damaged, or crashes faiss."""
    try_index(path)
    return load(path)


def load(path: Path) -> Any:
    """As `read`, in this process at once; a forged file may crash it."""
    with path.open("rb") as file:
        return load_from(file.fileno(), path)


def load_from(descriptor: int, path: Path) -> Any:
    """As `load`, of an open file, of which nothing was read yet."""
    # Beyond the lists in the file, faiss computes tables of up to 2 GiB.
    size = os.fstat(descriptor).st_size
    faiss.set_deserialization_vector_byte_limit(TABLE_BYTES + 2 * size)
    with refusing(path):
        reader = faiss.PyCallbackIOReader(partial(os.read, descriptor), READ_BYTES)  # type: ignore[attr-defined, unused-ignore]
        # Lists on disk are in a file that the index names: it is opened for reading, and refused.
        index = faiss.read_index(reader, faiss.IO_FLAG_READ_ONLY)
        _refuse_others(index)
        if not index.d:
            raise ValueError("its vectors have no dimensions")
    return index


def check_described(
    index: Any, document: IndexDocument, where: str, num_vectors: int | None = None
) -> None:
    """Raise ArtifactError if the document is about another index. num_vectors: in this file of
    several; default: as the document says."""
    found = {
        "dimensions": int(index.d),
        "num_vectors": int(index.ntotal),
        "num_lists": facts(index).num_lists,
    }
    wanted = {name: getattr(document, name) for name in found}
    if num_vectors is not None:
        wanted["num_vectors"] = num_vectors
    for name, value in found.items():
        if value != wanted[name]:
            raise ArtifactError(
                f"{where}: the index has {name} {value}, and {DOCUMENT} beside it says "
                f"{wanted[name]}; build the index again"
            )
    if not index.is_trained or index.metric_type != faiss.METRIC_L2:
        raise ArtifactError(
            f"{where}: the index is not trained, or not for squared Euclidean distances; build it "
            "again"
        )


IN_THE_FILE = (faiss.ArrayInvertedLists, faiss.BlockInvertedLists)  # type: ignore[attr-defined, unused-ignore]

LEAVES = (
    *(faiss.IndexFlatCodes, faiss.IndexFastScan),
    *(faiss.AdditiveCoarseQuantizer, faiss.MultiIndexQuantizer),
)
"""Indices without parts, whose vectors or codes are in the file itself."""


def _refuse_others(given: Any, depth: int = 0) -> None:
    """Raise ValueError for an index with a part that `create` never makes."""
    index: Any = faiss.downcast_index(given)
    parts: list[Any] = []
    if isinstance(index, faiss.IndexPreTransform):
        parts = [index.index]
    elif isinstance(index, faiss.IndexRefine):
        parts = [index.base_index, index.refine_index]
    elif isinstance(index, faiss.IndexIVF):
        if not isinstance(faiss.downcast_InvertedLists(index.invlists), IN_THE_FILE):  # type: ignore[arg-type, unused-ignore]
            raise ValueError("its lists are not in the file itself")
        parts = [index.quantizer]
    elif isinstance(index, (faiss.IndexHNSW, faiss.IndexNSG, faiss.IndexNNDescent)):
        parts = [index.storage]  # type: ignore[union-attr, unused-ignore]
    elif not isinstance(index, LEAVES):
        raise ValueError(f"a {type(index).__name__} is no index for neighbours")
    for part in parts:
        if part is None or depth > MOST_PARTS:
            raise ValueError("a part of it is missing, or it has too many")
        _refuse_others(part, depth + 1)


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Errors of faiss become ArtifactErrors about the file."""
    try:
        yield
    except (RuntimeError, MemoryError, AssertionError, ValueError) as error:
        raise ArtifactError(f"{path}: not an index of faiss ({_faiss_words(error)})") from error


def innermost(index: Any) -> Any:
    """The index behind rotations and other transforms."""
    inner = faiss.downcast_index(index)
    while isinstance(inner, faiss.IndexPreTransform):
        inner = faiss.downcast_index(inner.index)
    return inner


def inverted_file(index: Any) -> Any | None:
    """The inverted file of the index, or None."""
    return faiss.try_extract_index_ivf(index)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _faiss_words(error: BaseException) -> str:
    """The reason in an error of faiss, without the place in its sources."""
    text = " ".join(str(error).split())
    if "could not open" in text:
        return "its lists are not in the file itself"
    return _PLACE.sub("", text) or type(error).__name__
