"""Every dataset has the same samples of a virtual dataset as of the merged pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.merge.config import MergeConfig
from stages.merge.run import run
from tests.stages.directly import run_directly
from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.datasets.masked import test_bert, test_t5
from tests.trainyard.datasets.masked.sentence_files import SPECIAL, VOCABULARY
from tests.trainyard.datasets.test_fim import ByteTokenizer
from trainyard.artifacts import store
from trainyard.datasets.build import Datasets, build_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.fim_config import FimConfig
from trainyard.datasets.formats import FimFormat, Format
from trainyard.datasets.index_cache import IndexCache
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.splits import check_splits
from trainyard.errors import ConfigError, DataError

GPT = SampleFormat(32, seed=1, vocab_size=VOCABULARY, eod=0)
FORMS: dict[str, Format] = {
    "gpt": GPT,
    "fim": FimFormat(GPT, FimConfig(fim_rate=0.9), ByteTokenizer()),
    "bert": test_bert.sample_format(),
    "t5": test_t5.sample_format(),
}
SIZES = (200, 30, 10)


def write_parts(folder: str, num_parts: int = 3) -> list[str]:
    random, prefixes = np.random.RandomState(0), []
    for number in range(num_parts):
        docs = []
        for _ in range(20):
            lengths = random.randint(1, 40, random.randint(1, 12))
            docs.append([random.randint(SPECIAL, VOCABULARY // 8, n) for n in lengths])
        prefixes.append(write_tokens(store.join(folder, f"p{number}"), docs))
    return prefixes


def merge(output_prefix: str, *entries: str, **options: Any) -> str:
    options |= {"input": list(entries), "output_prefix": output_prefix}
    run_directly(MergeConfig, run, **options)
    return output_prefix


def build(form: Format, *paths: str, **options: Any) -> Datasets:
    data = DataConfig(data_path=paths, split="80,15,5", **options)
    return build_datasets(data, form, SIZES)


def samples(datasets: Datasets) -> list[Any]:
    assert datasets.train is not None
    every = [datasets.train, *(one for _, one in (*datasets.valid, *datasets.test))]
    return [
        {key: np.asarray(value).tolist() for key, value in dataset[index].items()}
        for dataset in every
        for index in range(len(dataset))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
def test_the_samples_are_those_of_the_merged_pair(kind: str, store_url: str) -> None:
    parts, apart = write_parts(store.join(store_url, "parts")), store.join(store_url, "apart")
    other = write_parts(apart, 1)[0]
    merged = merge(store.join(store_url, "merged"), *parts)
    virtual = merge(store.join(store_url, "virtual"), *parts, virtual=True)
    wanted = samples(build(FORMS[kind], "0.7", merged, "0.3", other))
    assert samples(build(FORMS[kind], "0.7", virtual, "0.3", other)) == wanted
    assert samples(build(FORMS[kind], virtual)) == samples(build(FORMS[kind], merged))
    folder = store.join(store_url, "parts")
    assert samples(build(FORMS[kind], "7", folder, "3", apart)) == wanted


def test_the_samples_are_the_same_without_maps_and_from_one_index_cache(tmp_path: Path) -> None:
    parts = write_parts(str(tmp_path / "parts"))
    merged = merge(str(tmp_path / "merged"), *parts)
    virtual = merge(str(tmp_path / "virtual"), *parts, virtual=True)
    wanted = samples(build(GPT, merged))
    assert samples(build(GPT, virtual, mmap_bin_files=False)) == wanted
    data, cache = DataConfig(data_path=(merged,), split="80,15,5"), str(tmp_path / "cache")
    build_datasets(data, GPT, SIZES, IndexCache(cache))
    again = DataConfig(data_path=(virtual,), split="80,15,5")
    found = build_datasets(again, GPT, SIZES, IndexCache(cache, read_only=True))
    assert samples(found) == wanted


def test_faults_are_found_before_any_work_as_in_a_pair(tmp_path: Path) -> None:
    write_parts(str(tmp_path / "parts"))
    write_tokens(tmp_path / "parts/p9", [[[1, 2]], [[3, VOCABULARY, 4]]])
    virtual = merge(str(tmp_path / "virtual"), str(tmp_path / "parts"), virtual=True)
    with pytest.raises(DataError, match=r"virtual: token 1000 in document 61 at place 1 "):
        build(GPT, virtual)
    data = DataConfig(data_path=(virtual,), split="9998,1,1")
    check_splits(data, 32, ["train"])
    with pytest.raises(ConfigError, match=r"virtual: the valid split .* has none of the"):
        check_splits(data, 32, ["valid"])
    store.delete(str(tmp_path / "parts/p0.bin"))
    with pytest.raises(DataError, match=r"virtual\.parts: its part .*p0\.bin is missing"):
        check_splits(data, 32, ["train"])
