"""Messages for errors of stores, and for what is in the way of a local file.

Looks at names only, and opens nothing."""

from __future__ import annotations

import difflib
import errno
import glob
import os
import re
import stat
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from trainyard.artifacts.urls import has_glob, is_local, is_web, local_path
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError, TrainyardError

NO_FILE = "not a file but a pipe or a device; copy it into a file"

MOST_NAMES = 1000
"""Names of a folder among which the nearest is looked for."""

NEAREST = "the nearest name is"

TOO_LONG = "the file system takes no name as long; choose a shorter one"


def why_absent(url: str, otherwise: str = "there is no such file or object") -> str:
    """Why there is no file: a bad link, pipe or name on its path, or `otherwise`.

    Of token files the nearest prefix is named too."""
    path = local_path(url)
    if path is not None and (fault := _in_place_of(path)):
        return fault
    return nearest(url[:-4], otherwise) if url.endswith((".bin", ".idx")) else otherwise


def nearest(url: str, message: str) -> str:
    """The message, with the nearest name if there is no file."""
    path = local_path(url)
    near = what_is_there(url) if path is not None and not os.path.lexists(path) else ""
    return f"{message}; {near}" if near.startswith(NEAREST) else message


def what_is_there(url: str) -> str:
    """What is found where an input is missing: the nearest name, or how far its path leads."""
    path = local_path(url)
    if path is None or has_glob(url):
        return "check the path"
    if path.is_dir():
        return "the folder is empty"
    for ending in (".bin", ".idx"):
        if fault := _fault_of_link(Path(f"{path}{ending}")):
            return f"{path.name}{ending} is {fault}"
    absent = next((at for at in reversed(path.absolute().parents) if not at.is_dir()), None)
    if absent is not None:
        return f"there is no folder {absent}"
    with os.scandir(path.absolute().parent) as folder:
        names = sorted(e.name for e in islice(folder, MOST_NAMES) if not e.name.startswith("."))
    pairs = [name.removesuffix(".idx") for name in names if name.endswith(".idx")]
    near = [name for name in pairs if name.startswith(f"{path.name}_")]
    near = near or difflib.get_close_matches(path.name, [*pairs, *names], n=1)
    if not near:
        return "check the path"
    return f"{NEAREST} {url.rstrip('/').removesuffix(path.name)}{near[0]}"


def _in_place_of(path: Path) -> str | None:
    for at in (*reversed(path.parents), path):
        if os.path.islink(at) and (fault := _fault_of_link(at)):
            return f"{at} is {fault}" if at != path else fault
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return TOO_LONG if error.errno == errno.ENAMETOOLONG else None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else NO_FILE


def _fault_of_link(path: Path) -> str | None:
    try:
        path.stat()
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        return f"a link to {os.readlink(path)}, which does not exist; fix or remove it"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"a link to {os.readlink(path)}, which leads back to it; fix or remove it"
    return None


def broken_link(url: str) -> tuple[Path, str] | None:
    """The first broken link that matches a pattern or is below a folder, and its fault."""
    root = local_path(url)
    if root is None:
        return None
    if has_glob(url) and not root.is_file():
        found: Iterable[Path] = map(Path, glob.glob(str(root), recursive=True))
    else:
        found = (Path(at, name) for at, _, names in os.walk(root) for name in names)
    for path in found:
        shown = path.relative_to(root).parts if root in path.parents else ()
        if os.path.islink(path) and not any(part.startswith(".") for part in shown):
            fault = _fault_of_link(path)
            if fault is not None:
                return path, fault
    return None


CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL in the environment"


def rights(url: str) -> str:
    """What to check when access to a URL is refused."""
    if is_web(url):
        return "that everyone may read it, as no password is ever sent, or download it"
    return "the permissions of the path" if is_local(url) else CREDENTIALS


def system_fault(url: str, name: str, error: OSError) -> TrainyardError:
    """An error of the operating system during an operation, as an error of ours."""
    writes = name in ("open", "create", "replace", "move")
    no_folder = isinstance(error, FileExistsError | NotADirectoryError)
    if no_folder and writes:
        return ConfigError(f"{url}: a file stands where a folder is needed; choose another path")
    if "bucket does not exist" in str(error):
        return ConfigError(f"{url}: the bucket does not exist; create it first")
    if error.errno == errno.ENAMETOOLONG and writes:
        return ConfigError(f"{url}: {TOO_LONG}")
    if isinstance(error, FileNotFoundError) and name in ("open", "create"):
        return ConfigError(f"{url}: no file can be created there; choose another path")
    nowhere = (errno.ELOOP, errno.ENAMETOOLONG)
    if no_folder or isinstance(error, FileNotFoundError) or error.errno in nowhere:
        return ArtifactError(f"{url}: {why_absent(url)}")
    if isinstance(error, IsADirectoryError):
        return ArtifactError(f"{url}: this is a folder, not a file")
    if isinstance(error, PermissionError):
        return ConfigError(f"{url}: access refused ({error}); check {rights(url)}")
    return InfrastructureError(f"{url}: {name} failed: {error}")


BUCKET = re.compile("[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def bad_bucket(name: str) -> ConfigError:
    """The error for a name of a bucket that a store refuses."""
    return ConfigError(
        f"s3://{name}: the store refuses this name of a bucket; a name has 3 to 63 lower-case "
        f"letters, digits, '.' and '-', a letter or digit at both ends"
    )


def store_fault(url: str, name: str, error: Exception) -> TrainyardError:
    """An error of an object store's library during an operation, as an error of ours."""
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return ConfigError(
            f"{url}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            f"(and AWS_ENDPOINT_URL for a store other than AWS) in the environment"
        )
    if "Invalid bucket name" in str(error):  # botocore refuses it before the store is asked
        return bad_bucket(url.partition("://")[2].partition("/")[0])
    return InfrastructureError(f"{url}: {name} failed: {type(error).__name__}: {error}")
