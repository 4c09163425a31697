"""The profile of a yard on a Prefect server: `python -m flows.register` writes it.

Every flow run of a deployment reads it, so that workers need no copy of the file."""

from __future__ import annotations

import re
from typing import Any

from prefect import get_client, get_run_logger, runtime
from prefect.blocks.core import Block
from prefect.exceptions import ObjectNotFound

from flows.yard.profile import Profile
from flows.yard.read_profile import parse_profile, profile_name, read_profile
from trainyard.artifacts.urls import show_url
from trainyard.errors import ConfigError
from trainyard.logging import one_line
from trainyard.version import VERSION, build_revision

NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


class YardProfile(Block):
    """Where the stages of a yard run, and with which resources."""

    _block_type_name = "Yard Profile"
    _block_type_slug = "yard-profile"
    _description = "A profile of deploy/yards, written by `python -m flows.register`."

    document: dict[str, Any]
    """The tables of the file."""
    yard: str = ""
    """Name of the profile, which gives the block its name; empty in older blocks."""
    version: str
    """Version of the trainyard that registered it."""
    revision: str = ""
    """Revision of that trainyard's sources; empty if unknown."""


async def yard_profile(name: str) -> Profile:
    """The profile of a flow run: as registered for a deployment, else from the file.

    A profile decides which programs run, so a deployment takes only a registered profile or one of
    deploy/yards. Raises ConfigError for any other, and if another version of trainyard registered
    it; warns of another build of the same version."""
    if runtime.deployment.id is None:
        return read_profile(name)
    check_is_name(name)
    slug, document = YardProfile.get_block_type_slug(), block_name(profile_name(name))
    async with get_client() as client:
        try:
            found = await client.read_block_document_by_name(document, slug)
        except ObjectNotFound:
            return read_profile(name)
    registered = YardProfile(**found.data)
    check_yard(profile_name(name), registered.yard)
    if remark := check_build(name, registered, build_revision()):
        get_run_logger().warning("%s", remark)
    return parse_profile(registered.document, profile_name(name))


def check_is_name(name: str) -> None:
    """Raise ConfigError for a profile by a path or URL."""
    if not NAME.fullmatch(name) or name.endswith(".toml"):
        raise ConfigError(
            f"profile {one_line(show_url(name))!r}: a deployment takes the name of a registered "
            f"profile or of one in deploy/yards, since a profile decides which programs run; "
            f"register the file with `python -m flows.register --profile FILE` and give its name"
        )


def check_yard(ours: str, theirs: str) -> None:
    """Raise ConfigError if our block belongs to another yard.

    theirs: the registered name; empty in older blocks."""
    if theirs not in ("", ours):
        raise ConfigError(
            f"yard {ours} and yard {theirs}, which is registered, would share the block "
            f"yard-profile/{block_name(ours)}, as Prefect takes lower-case letters, digits and "
            f"'-' alone: rename the file of one of them"
        )


def check_build(yard: str, registered: YardProfile, revision: str) -> str:
    """The warning for another build of our version, else empty; ConfigError for another version.

    revision: ours; empty if unknown."""
    if registered.version != VERSION:
        raise ConfigError(
            f"yard {yard} was registered by trainyard {registered.version}, and this worker has "
            f"{VERSION}: run `python -m flows.register --profile {yard}` with {VERSION}, or start "
            f"workers of {registered.version}"
        )
    if not revision or registered.revision in ("", revision):
        return ""
    return (
        f"yard {yard} was registered by trainyard {VERSION} of revision {registered.revision}, and "
        f"this worker is of {revision}: register it from the build that the workers run"
    )


def block_name(yard: str) -> str:
    """The name of a yard's block: Prefect accepts only lower-case letters, digits and '-'."""
    return yard.lower().replace("_", "-").replace(".", "-")
