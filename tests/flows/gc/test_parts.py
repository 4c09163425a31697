"""What a sweep keeps for datasets that are parts, and for folders that a training read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.gc.test_gc import kinds, swept
from tests.flows.gc.yards import Corpus, parts_list, train
from trainyard.artifacts import store
from trainyard.artifacts.manifest import InputRecord, Manifest, publish
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError

pytestmark = pytest.mark.slow


def test_the_parts_of_a_virtual_dataset_stay_as_long_as_it_does(store_url: str) -> None:
    corpus = Corpus(store_url)
    used = corpus.publish("a", "b", is_virtual=True)
    corpus.publish("b", "c", is_virtual=True)
    current = corpus.publish("c", "d", is_virtual=True)
    corpus.part("e")
    part = corpus.part("f")  # in a list that no manifest names
    store.write_bytes(
        join(store_url, "mine/all.parts"), parts_list([part], join(store_url, "mine/all"))
    )
    train(join(store_url, "runs/one"), used)
    found = swept(store_url)
    assert not found.failed
    left = store.list_files(join(store_url, "web/parts"))
    names = {name.rpartition("/")[2][0] for name in left if name.endswith(".bin")}
    assert names == {"a", "b", "c", "d", "f"}
    assert store.exists(used + ".parts")
    assert store.exists(current + ".parts")
    assert kinds(found) == {"corpus version": 1, "corpus part": 1}
    store.write_bytes(join(store_url, "mine/all.parts"), b"{}")
    with pytest.raises(ArtifactError, match=r"all\.parts: not the parts of a virtual dataset"):
        swept(store_url)


def test_a_training_on_a_folder_of_parts_keeps_all_of_them(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path))
    corpus.publish("a")
    corpus.part("b")
    folder = join(corpus.url, "parts", "options")
    manifest = Manifest(stage="pretrain", inputs={"data_0": InputRecord((folder,), "d")})
    publish(str(tmp_path / "run/manifest.json"), manifest, None)
    assert kinds(swept(str(tmp_path))) == {}
    store.delete(str(tmp_path / "run/manifest.json"))
    elsewhere = InputRecord(("/mnt/other/web/parts/options/",), "d")  # on another machine
    manifest = Manifest(stage="pretrain", inputs={"data_0": elsewhere})
    publish(str(tmp_path / "run/manifest.json"), manifest, None)
    assert kinds(swept(str(tmp_path))) == {}
