"""Names of files to pairs: folders, patterns, prefixes, and what stands beside them."""

from __future__ import annotations

import pytest

from trainyard.corpus.pairs import find_pairs, pairs_of_folder
from trainyard.errors import ArtifactError, ConfigError


def found(names: list[str]) -> list[str]:
    return pairs_of_folder("s3://b/parts", [f"s3://b/parts/{name}" for name in names])


def test_pairs_are_found_sorted_and_what_is_ours_is_passed_over() -> None:
    names = ["b.idx", "a.bin", "a.idx", "b.bin", "a.manifest.json", "manifest.json", ".work/x.bin"]
    names += ["b.claim.json", ".b.tmp", "b.work/unit.bin", "a.docs", "a.bad_lines.jsonl"]
    names += ["b.failure.json", "a.share.json"]
    assert found(names) == ["s3://b/parts/a", "s3://b/parts/b"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.bin", "a.idx", "b.bin"], r"b\.bin has no b\.idx"),
        (["a.bin", "a.idx", "b.idx"], r"b\.idx has no b\.bin"),
        (["a.bin", "a.idx", "b.docs"], r"b\.docs has no b\.bin"),
        (["a.bin", "a.idx", "notes.txt"], r"notes\.txt is not half"),
        (["manifest.json"], "no .bin/.idx pair"),
        ([], "no .bin/.idx pair"),
    ],
)
def test_a_folder_that_is_not_pairs_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        found(names)


def both(*prefixes: str) -> list[str]:
    return [prefix + ending for prefix in prefixes for ending in (".bin", ".docs", ".idx")]


def test_entries_come_in_their_order_and_each_sorted_within() -> None:
    files = both("d/b", "d/a", "e/z", "f/x1", "f/x2", "f/y", "f/deep/x3")
    assert find_pairs(["e/z", "d", "f/x*"], files) == ["e/z", "d/a", "d/b", "f/x1", "f/x2"]
    assert find_pairs(["f/**/x*"], files) == ["f/deep/x3"]
    assert find_pairs(["s3://b/?/x[12]"], both("s3://b/c/x1", "s3://b/c/x3")) == ["s3://b/c/x1"]
    assert find_pairs(["file:///d/*"], both("/d/a")) == ["/d/a"]


def test_a_pair_named_twice_or_not_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="--input names d/a twice"):
        find_pairs(["d", "d/a"], both("d/a"))
    with pytest.raises(ArtifactError, match=r"d/q\*: has no .bin/.idx pair"):
        find_pairs(["d/q*"], both("d/a"))
    with pytest.raises(ArtifactError, match=r"d/a: has no .* did you mean d/a_x d/a_y\?"):
        find_pairs(["d/a"], both("d/a_x", "d/a_y"))
    with pytest.raises(ArtifactError, match=r"d/a\.idx has no a\.bin beside it"):
        find_pairs(["d/a"], ["d/a.idx"])
