"""Registration and worker have one version; two builds of it are reported."""

from __future__ import annotations

import pytest

from flows.yard.registered_profile import YardProfile, block_name, check_build, check_yard
from trainyard.errors import ConfigError
from trainyard.version import VERSION, build_revision


def registered(revision: str, version: str = VERSION) -> YardProfile:
    return YardProfile(document={}, version=version, revision=revision)


def test_another_version_is_refused_whatever_the_revision() -> None:
    with pytest.raises(ConfigError, match=f"by trainyard 0.0.0, and this worker has {VERSION}"):
        check_build("site", registered("aaa", "0.0.0"), "aaa")


@pytest.mark.parametrize(("theirs", "ours"), [("aaa", "aaa"), ("", "aaa"), ("aaa", ""), ("", "")])
def test_the_same_or_an_unknown_build_gives_no_warning(theirs: str, ours: str) -> None:
    assert check_build("site", registered(theirs), ours) == ""


def test_two_builds_of_a_version_give_a_warning() -> None:
    warning = check_build("site", registered("aaa"), "bbb")
    assert "of revision aaa, and this worker is of bbb" in warning


def test_a_block_without_a_revision_is_read() -> None:
    assert YardProfile(document={}, version=VERSION).revision == ""


def test_images_built_without_a_revision_know_none() -> None:
    assert build_revision({"TRAINYARD_REVISION": "unknown"}) == build_revision({}) == ""
    assert build_revision({"TRAINYARD_REVISION": "aaa"}) == "aaa"


def test_names_of_blocks_are_what_prefect_takes() -> None:
    assert block_name("My_site.2") == "my-site-2"


def test_two_yards_with_similar_names_are_distinguished() -> None:
    assert block_name("my_site") == block_name("my-site")
    with pytest.raises(
        ConfigError, match=r"yard my_site and yard my-site, .* yard-profile/my-site"
    ):
        check_yard("my_site", "my-site")


@pytest.mark.parametrize("theirs", ["", "my_site"])
def test_ones_own_block_may_be_written_again(theirs: str) -> None:
    check_yard("my_site", theirs)
