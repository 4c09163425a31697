"""The profile of a yard as a server knows it: written by `python -m flows.register`, and read by
every flow run of a deployment, so that a site's own reaches workers that have not got its file."""

from __future__ import annotations

from typing import Any

from prefect import get_client, runtime
from prefect.blocks.core import Block
from prefect.exceptions import ObjectNotFound

from flows.profile import Profile, parse_profile, profile_name, read_profile
from trainyard.errors import ConfigError
from trainyard.version import VERSION


class YardProfile(Block):
    """Where the stages of a yard run, and with what means."""

    _block_type_name = "Yard Profile"
    _block_type_slug = "yard-profile"
    _description = "A profile of deploy/yards, written by `python -m flows.register`."

    document: dict[str, Any]
    """The tables of the file."""
    version: str
    """Of trainyard that registered it."""


async def yard_profile(name: str) -> Profile:
    """The profile of a flow run: as registered for a deployment, else the file.

    Raises ConfigError where the deployment was registered by another version of trainyard."""
    if runtime.deployment.id is None:
        return read_profile(name)
    slug, registered = YardProfile.get_block_type_slug(), block_name(profile_name(name))
    async with get_client() as client:
        try:
            found = await client.read_block_document_by_name(registered, slug)
        except ObjectNotFound:
            return read_profile(name)
    version = str(found.data["version"])
    if version != VERSION:
        raise ConfigError(
            f"yard {name} was registered by trainyard {version}, and this worker has {VERSION}: "
            f"run `python -m flows.register --yard {name}` with {VERSION}, or start workers of "
            f"{version}"
        )
    return parse_profile(found.data["document"], profile_name(name))


def block_name(yard: str) -> str:
    """The name of a yard's block; Prefect takes lower-case letters, digits and '-' alone."""
    return yard.lower().replace("_", "-").replace(".", "-")
