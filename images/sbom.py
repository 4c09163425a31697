"""Write the bill of materials of an image, as CycloneDX JSON; the build runs it.

    python images/sbom.py --root /image --patches images/patches --output sbom.cdx.json

Python's packages come from cyclonedx-bom, those of the distribution (Ubuntu, below NVIDIA's) from
dpkg's own record. Every patch of ours, images/patches/PACKAGE/NAME.patch, is listed under the
package that it changes."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

Document = dict[str, Any]
ENVIRONMENT = "opt/trainyard/bin/python"


def python_packages(root: Path) -> Document:
    """The bill of materials of the image's Python environment."""
    command = [
        "cyclonedx-py",
        "environment",
        str(root / ENVIRONMENT),
        "--output-reproducible",
        "--no-validate",
    ]
    completed = subprocess.run([*command, "-o", "-"], stdout=subprocess.PIPE, text=True, check=True)
    document: Document = json.loads(completed.stdout)
    return document


def distribution(root: Path) -> Document:
    """The component of the distribution on which an image is based.

    Raises SystemExit for an image that does not name one."""
    found = [root / name for name in ("etc/os-release", "usr/lib/os-release")]
    text = next((path.read_text() for path in found if path.exists()), "")
    fields = dict(line.split("=", 1) for line in shlex.split(text, comments=True) if "=" in line)
    if not {"ID", "VERSION_ID"} <= fields.keys():
        raise SystemExit(f"no ID and VERSION_ID in {' or '.join(map(str, found))}: which one is it")
    name, version = fields["ID"], fields["VERSION_ID"]
    return {
        "bom-ref": f"os:{name}-{version}",
        "type": "operating-system",
        "name": name,
        "version": version,
        "description": fields.get("PRETTY_NAME", name),
    }


def system_packages(root: Path, system: Document) -> Iterator[Document]:
    """Components for the packages of a distribution that dpkg has installed."""
    for entry in (root / "var/lib/dpkg/status").read_text().split("\n\n"):
        lines = (line.split(": ", 1) for line in entry.splitlines() if ": " in line[:40])
        fields = {line[0]: line[1] for line in lines if not line[0].startswith(" ")}
        if fields.get("Status") != "install ok installed":
            continue
        name, version, machine = (fields[key] for key in ("Package", "Version", "Architecture"))
        where = f"arch={machine}&distro={system['name']}-{system['version']}"
        purl = f"pkg:deb/{system['name']}/{quote(name)}@{quote(version)}?{where}"
        yield {
            "bom-ref": purl,
            "type": "library",
            "name": name,
            "version": version,
            "purl": purl,
        }


def patches(folder: Path) -> Iterator[tuple[str, Document]]:
    """For each of our patches: the name of its package, and the patch in CycloneDX's terms."""
    for path in sorted(folder.glob("*/*.patch")):
        text = {"content": path.read_text(), "contentType": "text/x-diff"}
        yield path.parent.name, {"type": "unofficial", "diff": {"text": text}}


def tell_patches(components: list[Document], folder: Path) -> None:
    """Write each patch into the pedigree of its package."""
    named = {str(one["name"]).lower(): one for one in components}
    for package, patch in patches(folder):
        if package not in named:  # not in this image: `apply-patches` passed it over as well
            continue
        named[package].setdefault("pedigree", {}).setdefault("patches", []).append(patch)


def main() -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write the bill of materials of an image.")
    parser.add_argument("--root", type=Path, required=True, help="the image's root folder")
    parser.add_argument("--patches", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    document = python_packages(given.root)
    components: list[Document] = document["components"]
    system = distribution(given.root)
    components += [system, *system_packages(given.root, system)]
    tell_patches(components, given.patches)
    given.output.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    print(f"{len(components)} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
