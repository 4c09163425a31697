"""What the bill of materials of an image says of the distribution below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from images import sbom

DEBIAN = """\
PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
ID=debian
"""
UBUNTU = """\
PRETTY_NAME="Ubuntu 24.04.3 LTS"
# NVIDIA's image stands on it.
ID=ubuntu
ID_LIKE=debian
VERSION_ID="24.04"
"""
STATUS = """\
Package: libstdc++6
Status: install ok installed
Architecture: amd64
Version: 1:12.2.0-14+deb12u1
Description: a library
 Status: no field, since it is indented

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: tzdata
Status: install ok installed
Architecture: all
Version: 2026a-0~1
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image's root folder, but for what says which distribution it is."""
    for folder in ("etc", "usr/lib", "var/lib/dpkg"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name", "version"), [(DEBIAN, "debian", "12"), (UBUNTU, "ubuntu", "24.04")]
)
def test_packages_name_the_distribution(root: Path, text: str, name: str, version: str) -> None:
    (root / "usr/lib/os-release").write_text(text)
    (root / "etc/os-release").symlink_to("../usr/lib/os-release")  # as both have it
    system = sbom.distribution(root)
    assert system["type"] == "operating-system"
    assert (system["name"], system["version"]) == (name, version)
    assert system["description"].lower().startswith(name)
    assert [one["purl"] for one in sbom.system_packages(root, system)] == [
        f"pkg:deb/{name}/libstdc%2B%2B6@1%3A12.2.0-14%2Bdeb12u1?arch=amd64&distro={name}-{version}",
        f"pkg:deb/{name}/tzdata@2026a-0~1?arch=all&distro={name}-{version}",
    ]


def test_etc_os_release_overrides_the_one_of_the_vendor(root: Path) -> None:
    (root / "usr/lib/os-release").write_text(DEBIAN)
    assert sbom.distribution(root)["name"] == "debian"
    (root / "etc/os-release").write_text(UBUNTU)
    assert sbom.distribution(root)["name"] == "ubuntu"


@pytest.mark.parametrize("text", ["", "ID=debian\n"])
def test_an_image_that_does_not_say_gets_no_bill(root: Path, text: str) -> None:
    (root / "etc/os-release").write_text(text)
    with pytest.raises(SystemExit, match=r"no ID and VERSION_ID in .*os-release"):
        sbom.distribution(root)
