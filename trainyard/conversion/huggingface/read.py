"""Opens a Hugging Face folder as a source: config.json, weights, tokenizer.

    config.json   model.safetensors, or shards with their index
    optional: tokenizer.json ... or tokenizer.model, generation_config.json

config.json determines the expected weights. A missing, unexpected or mis-shaped one is an error
before any is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.bounds import check_model
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.safetensors.header import MAX_TENSORS, TensorSpec
from trainyard.conversion.documents import read_document
from trainyard.conversion.huggingface.architecture import GPT2
from trainyard.conversion.huggingface.bert import BERTS
from trainyard.conversion.huggingface.compressed import DequantizedWeights, read_quantization
from trainyard.conversion.huggingface.config_read import read_config
from trainyard.conversion.huggingface.deepseek import (
    DEEPSEEKS,
    repeated_tables,
    without_absent_layers,
)
from trainyard.conversion.huggingface.from_hf import recipes
from trainyard.conversion.huggingface.gpt_oss import GPT_OSS
from trainyard.conversion.huggingface.mamba import MAMBAS, NEMOTRON_H
from trainyard.conversion.huggingface.mxfp4 import UnpackedWeights
from trainyard.conversion.huggingface.t5 import T5
from trainyard.conversion.huggingface.to_hf import targets
from trainyard.conversion.lazy_tensors import About, AssembledSource, TheirTensors
from trainyard.conversion.source import model_shapes, refuse_differences
from trainyard.conversion.tokenizer_files import find_tokenizer
from trainyard.conversion.torch_save.file import TorchWeights
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.bert import checkpoint_names as bert_names
from trainyard.models.config import TransformerConfig
from trainyard.models.mamba import checkpoint_names as mamba_names
from trainyard.models.t5 import checkpoint_names as t5_names

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

INDEX_ENDING = ".index.json"

Open = Callable[[str], TheirTensors]


class SafetensorsWeights:
    """All tensors of a safetensors file."""

    def __init__(self, url: str) -> None:
        self._file = TensorFile(url)
        self.specs: Mapping[str, TensorSpec] = {
            name: extent.spec for name, extent in self._file.extents.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._file.read(name)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


WHOLE: dict[str, Open] = {
    "model.safetensors": SafetensorsWeights,
    "pytorch_model.bin": TorchWeights,
}
"""Names of a model in one file, the preferred one first, and what reads it.

The index of a sharded model has the same name plus `.index.json`."""


class Shards:
    """The tensors of several files."""

    def __init__(self, url: str, names: Iterable[str], open_file: Open) -> None:
        self._files: list[TheirTensors] = []
        self._places: dict[str, TheirTensors] = {}
        try:
            for name in names:
                self._add(open_file(join(url, name)), join(url, name))
        except BaseException:
            self.close()
            raise

    def _add(self, file: TheirTensors, url: str) -> None:
        self._files.append(file)
        for name in file.specs:
            if self._places.setdefault(name, file) is not file:
                raise ArtifactError(f"{url}: tensor {name!r} is in another shard as well")

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Type and shape of each tensor, by its name in the files."""
        return {name: file.specs[name] for name, file in self._places.items()}

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._places[name].read(name)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def open_weights(url: str) -> TheirTensors:
    """The tensors of a folder: one file, or shards with an index."""
    present = store.list_folder(url)
    for name, open_file in WHOLE.items():
        if name in present:
            return open_file(join(url, name))
        if name + INDEX_ENDING in present:
            return _shards(url, name + INDEX_ENDING, open_file)
    raise ConfigError(
        f"{url}: has a config.json but no weights: neither {' nor '.join(WHOLE)}, nor shards with "
        "an index; download the whole folder"
    )


def _shards(url: str, index: str, open_file: Open) -> Shards:
    mapped = weight_map(url, index)
    files = Shards(url, sorted(set(mapped.values())), open_file)
    missing = sorted(mapped.keys() - files.specs.keys())
    if missing:
        files.close()
        raise ArtifactError(f"{join(url, index)}: {missing[0]} is not in {mapped[missing[0]]}")
    return files


def weight_map(url: str, index: str) -> dict[str, str]:
    """The file of each tensor, from an index."""
    place = join(url, index)
    document: Any = read_document(place)
    mapped = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise ArtifactError(f"{place}: has no weight_map")
    if len(mapped) > MAX_TENSORS:
        raise ArtifactError(f"{place}: names {len(mapped)} tensors; {MAX_TENSORS} are read at most")
    for file in mapped.values():
        if not isinstance(file, str) or not PLAIN_NAME.fullmatch(file):
            raise ArtifactError(
                f"{place}: {file!r:.80} is not a plain name of a file in the same folder"
            )
    return mapped


CONFIG = "config.json"
GENERATION = "generation_config.json"

BUFFERS = re.compile(
    r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq|embeddings\.position_ids|"
    r"EncDecAttention\.relative_attention_bias\.weight)"
)
"""Tensors that older versions saved besides weights; they follow from the configuration, or no
model uses them."""

HEAD = "lm_head.weight"

OLD_NORM = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""Names of TensorFlow, which google-bert's files still have."""


def open_huggingface(url: str) -> AssembledSource:
    """The model of a folder that `from_pretrained` loads.

    Raises ConfigError for a model that ours does not compute, ArtifactError for a damaged folder or
    one whose files contradict each other."""
    where = join(url, CONFIG)
    document: Any = read_document(where, infinity=True)
    is_quantized = read_quantization(document, where) is not None
    if is_quantized:
        document = {k: v for k, v in document.items() if k != "quantization_config"}
    name, config, rows = read_config(document, where)
    files = open_weights(url)
    try:
        if is_quantized:
            files = DequantizedWeights(files, url)
        if name == GPT_OSS:
            files = UnpackedWeights(files, url)
        config = without_absent_layers(config, files.specs)
        check_model(config, rows, len(files.specs), where)
        wanted = class_tensors(name, config, rows)
        about = About(url, config, rows, find_tokenizer(url), _generation(url))
        prefixes = (_prefix(name), _other_prefix(name))
        weights = ClassWeights(files, wanted, prefixes[0], _copies(name, config), prefixes[1])
        shapes = {key: spec.shape for key, spec in weights.specs.items()}
        refuse_differences(shapes, wanted, url, f"config.json, {name},")
        weights.refuse_other_copies(url)
        return AssembledSource(about, recipes(config, name), weights)
    except BaseException:
        files.close()
        raise


def class_tensors(name: str, config: TransformerConfig, rows: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the class `name`, and its shape."""
    ours = model_shapes(config, rows)
    return {
        target.name: tuple(target.convert(torch.empty(ours[target.source], device="meta")).shape)
        for target in targets(config, name)
    }


def _prefix(name: str) -> str:
    """Of the names, which files of the model without its head omit."""
    if name in BERTS:
        return "bert."
    if name == T5:
        return ""
    if name in MAMBAS:
        return mamba_names.PREFIX
    return "transformer." if name == GPT2 else "model."


def _other_prefix(name: str) -> str:
    """Of the names in files of other releases, instead of the prefix; empty: there are none."""
    return mamba_names.NEWER_PREFIX if name == NEMOTRON_H else ""


def _copies(name: str, config: TransformerConfig) -> Mapping[str, str]:
    """Tensors that files of the class may repeat, and the originals."""
    if name in BERTS:
        return bert_names.COPIES
    if name == T5:
        return t5_names.COPIES
    if name in DEEPSEEKS:
        return {HEAD: "model.embed_tokens.weight", **repeated_tables(config)}
    if name in MAMBAS:
        return mamba_names.COPIES
    return {HEAD: "transformer.wte.weight" if name == GPT2 else "model.embed_tokens.weight"}


def _generation(url: str) -> Mapping[str, Any]:
    place = join(url, GENERATION)
    found: Any = read_document(place) if store.exists(place) else {}
    return found if isinstance(found, dict) else {}


class ClassWeights:
    """The weights of a folder under the names of their class.

    Files may omit the prefix of the names, and may contain buffers and copies, such as that of the
    embedding as the tied output layer."""

    def __init__(
        self,
        files: TheirTensors,
        wanted: Mapping[str, object],
        prefix: str,
        copies: Mapping[str, str],
        other_prefix: str = "",
    ) -> None:
        """copies: names that a file may have besides, and the originals. other_prefix: may stand in
        place of the prefix."""
        self._files = files
        self._stored: dict[str, str] = {}
        self._copies: dict[str, str] = {}
        """Original by the name of its copy in the files."""
        for stored in files.specs:
            name = stored
            for old, new in OLD_NORM.items():
                if name.endswith(old):
                    name = name.removesuffix(old) + new
            if other_prefix and name.startswith(other_prefix):
                name = name.removeprefix(other_prefix)
            name = prefix + name if prefix + name in wanted else name
            if name in copies and name not in wanted:
                self._copies[stored] = copies[name]
            elif name in wanted or not BUFFERS.fullmatch(name):
                self._stored[name] = stored

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Type and shape of each, by the name of the class."""
        specs = self._files.specs
        return {name: specs[stored] for name, stored in self._stored.items()}

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._files.read(self._stored[name])

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def refuse_other_copies(self, url: str) -> None:
        """Refuse a copy, such as a tied output layer, that differs from its original."""
        for copy, original in self._copies.items():
            ours, theirs = self.read(original), self._files.read(copy)
            if not torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8)):
                untie = ', or put "tie_word_embeddings": false into config.json'
                advice = untie if copy == HEAD else ""
                raise ArtifactError(
                    f"{url}: by config.json {copy} repeats {original}, but {copy} differs from "
                    f"{original}; delete {copy}{advice}"
                )
