"""The Prefect server that a flow starts for itself, against other users and foreign pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.security import servers
from tests.security.attacks import Target, open_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[Target]:
    with servers.own_server(folder / "yard" / ".prefect") as target:
        yield target


@pytest.mark.every_case
@pytest.mark.parametrize("check", servers.CHECKS, ids=lambda check: check.__name__)
def test_the_server_of_a_flow(target: Target, check: Callable[[Target], None]) -> None:
    check(target)


def test_other_users_read_nothing_of_it(target: Target, folder: Path) -> None:
    servers.tells_no_other_user(target, folder)


def test_two_on_one_home_work_each_with_its_own_password(target: Target) -> None:
    with servers.own_server(target.home) as other:
        servers.answers_its_owner(other)
        servers.answers_its_owner(target)
        servers.keeps_other_passwords_out(target, other)
    servers.answers_its_owner(target)
