"""Opens the encoder of a BERT in a Hugging Face folder, whatever heads the class has.

    BertModel, BertFor...                  sentence encoders and google-bert's models
    MegatronBertModel, MegatronBertFor...

config.json determines the expected weights of embedding and layers. Those of heads (pooler,
predictions, classifiers) may be there or not, and are not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainyard.artifacts.urls import join
from trainyard.checkpoint.bounds import check_model
from trainyard.conversion.documents import read_document
from trainyard.conversion.huggingface.bert import CLASSES, MODEL_TYPES
from trainyard.conversion.huggingface.config_read import read_config
from trainyard.conversion.huggingface.from_hf import recipes
from trainyard.conversion.huggingface.read import (
    CONFIG,
    ClassWeights,
    class_tensors,
    open_weights,
)
from trainyard.conversion.huggingface.to_hf import targets
from trainyard.conversion.lazy_tensors import About, AssembledSource
from trainyard.conversion.source import refuse_differences
from trainyard.conversion.tokenizer_files import NONE
from trainyard.errors import ConfigError

ENCODER = ("embedding.", "encoder.")
"""Beginnings of the names of an encoder's parameters, ours."""

THEIRS = ("bert.embeddings.", "bert.encoder.")
"""The same in files. Other names belong to heads."""

ANY_CLASS = re.compile(r"(Megatron)?Bert(Model|For[A-Za-z]+)")


def open_encoder(url: str) -> AssembledSource:
    """The encoder of a folder that `from_pretrained` of a BERT class loads; no tokenizer.

    Raises ConfigError for another model or one that ours does not compute, ArtifactError for a
    damaged folder or one without a weight of the encoder."""
    where = join(url, CONFIG)
    name, config, rows = read_config(_as_encoder(read_document(where), where), where)
    files = open_weights(url)
    try:
        check_model(config, rows, len(files.specs), where)
        whole = class_tensors(name, config, rows)
        sources = {target.name: target.source for target in targets(config, name)}
        wanted = {key: shape for key, shape in whole.items() if sources[key].startswith(ENCODER)}
        weights = ClassWeights(files, wanted, "bert.", {})
        shapes = {key: s.shape for key, s in weights.specs.items() if _is_encoders(key)}
        refuse_differences(shapes, wanted, url, "the encoder in config.json")
        made_of = {
            ours: recipe
            for ours, recipe in recipes(config, name).items()
            if ours.startswith(ENCODER)
        }
        return AssembledSource(About(url, config, rows, NONE), made_of, weights)
    except BaseException:
        files.close()
        raise


def _is_encoders(name: str) -> bool:
    return name.startswith((*THEIRS, *(begin.removeprefix("bert.") for begin in THEIRS)))


def _as_encoder(document: Any, where: str) -> Any:
    """The document of the same encoder in a class that `read_config` knows."""
    if not isinstance(document, Mapping):
        return document  # read_config has the message
    kind, named = document.get("model_type"), document.get("architectures")
    known = kind in MODEL_TYPES and (
        named is None
        or (isinstance(named, list) and all(ANY_CLASS.fullmatch(str(name)) for name in named))
    )
    if not known:
        raise ConfigError(
            f"{where}: model_type is {kind!r:.60} and architectures {named!r:.60}, not an encoder "
            "that this version reads: a model_type of bert or megatron-bert, in a class such as "
            "BertModel or BertForMaskedLM"
        )
    masked_lm = CLASSES[kind == "bert", False]
    rest = {key: value for key, value in document.items() if key != "tie_word_embeddings"}
    return {**rest, "architectures": [masked_lm]}
