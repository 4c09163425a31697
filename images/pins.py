"""Update the digests of the base images to those of their tags today.

    python images/pins.py              asks each registry, without a password; writes what changed
    python images/pins.py --check      exit 1 when a tag leads elsewhere by now; writes nothing

Every image of others is named once, in one of PLACES, by tag and digest: the tag says what it is,
the digest is what is pulled. Standard library only."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[1]
PLACES = (
    *("images/cpu.Dockerfile", "images/cuda.Dockerfile", "docker-compose.yml"),
    "deploy/dev/postgres.Dockerfile",
)
PINNED = re.compile(r"(?P<name>[\w./:-]+):(?P<tag>[\w.-]+)@(?P<digest>sha256:[0-9a-f]{64})")
FIELD = re.compile(r'(\w+)="([^"]*)"')
SECONDS = 30

# First what stands for all machines, so that the digest is not that of this one.
KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


class PinError(Exception):
    """A registry that does not give a digest; the message names it and the reason."""


@dataclass(frozen=True, slots=True)
class Image:
    """A base image, as a file names it."""

    name: str
    tag: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}@{self.digest}"

    @property
    def manifest(self) -> str:
        """The URL of the tag's manifest in its registry, as Docker resolves it."""
        first, _, rest = self.name.partition("/")
        if rest and ("." in first or ":" in first or first == "localhost"):
            host, path = first, rest
        else:
            host, path = "registry-1.docker.io", self.name if rest else f"library/{self.name}"
        scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
        return f"{scheme}://{host}/v2/{path}/manifests/{self.tag}"


def images(text: str) -> list[Image]:
    """The images that a text names by tag and digest."""
    return [Image(**match.groupdict()) for match in PINNED.finditer(text)]


def current(image: Image) -> Image:
    """The same image with the current digest of its tag.

    Raises PinError if the registry is unavailable or gives no digest."""
    try:
        body, reported = _manifest(image.manifest)
    except (OSError, KeyError, ValueError) as error:
        raise PinError(f"{image.name}:{image.tag}: {image.manifest}: {error}") from error
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if reported is not None and reported != digest:
        raise PinError(
            f"{image.name}:{image.tag}: the registry reports digest {reported} but sent a manifest "
            f"with digest {digest}; try again"
        )
    return Image(image.name, image.tag, digest)


def _manifest(url: str) -> tuple[bytes, str | None]:
    """The manifest, and its digest according to the registry. Also a public registry requires a
    token, and names the server that issues it."""
    head = {"Accept": ", ".join(KINDS)}
    try:
        return _get(url, head)
    except urllib.error.HTTPError as error:
        asked = error.headers.get("WWW-Authenticate", "")
        if error.code != 401 or not asked.startswith("Bearer "):
            raise
    fields = dict(FIELD.findall(asked))
    where = f"{fields.pop('realm')}?{urlencode(fields)}"
    given: dict[str, Any] = json.loads(_get(where, {})[0])
    token = given.get("token") or given["access_token"]
    return _get(url, {**head, "Authorization": f"Bearer {token}"})


def _get(url: str, head: Mapping[str, str]) -> tuple[bytes, str | None]:
    request = urllib.request.Request(url, headers=dict(head))
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return answer.read(), answer.headers.get("Docker-Content-Digest")


def renewed(text: str) -> str:
    """A text with the current digests; raises PinError."""
    for image in images(text):
        text = text.replace(str(image), str(current(image)))
    return text


def main() -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description="Bring the digests of base images up to date.")
    parser.add_argument("--check", action="store_true", help="only report what is not up to date")
    given = parser.parse_args()
    before = {place: (ROOT / place).read_text() for place in PLACES}
    try:
        after = {place: renewed(text) for place, text in before.items()}
    except PinError as reason:
        print(f"{reason}\nNothing is written.", file=sys.stderr)
        return 3
    stale = 0
    for place, text in after.items():
        for image in images(text):
            if str(image) not in before[place]:
                stale += 1
                print(f"{place}: {image}")
        if not given.check and text != before[place]:
            (ROOT / place).write_text(text)
    if not stale:
        print("every tag leads to the digest that is written")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
