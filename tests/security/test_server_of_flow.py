"""The Prefect server that a flow starts for itself, against other users and foreign pages."""

from __future__ import annotations

from collections.abc import Iterator
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


def test_it_answers_the_flow_that_started_it(target: Target) -> None:
    servers.answers_its_owner(target)


def test_it_refuses_who_has_no_password(target: Target) -> None:
    servers.refuses_who_has_no_password(target)


def test_it_refuses_foreign_pages_even_with_the_password(target: Target) -> None:
    servers.refuses_foreign_pages(target)


def test_it_refuses_foreign_names_even_with_the_password(target: Target) -> None:
    servers.refuses_foreign_names(target)


def test_its_websockets_refuse_them_too(target: Target) -> None:
    servers.refuses_websockets(target)


def test_other_users_read_nothing_of_it(target: Target, folder: Path) -> None:
    servers.tells_no_other_user(target, folder)


def test_other_users_find_its_port_and_no_more(target: Target) -> None:
    servers.lets_no_other_user_in(target)


def test_two_on_one_home_work_each_with_its_own_password(target: Target) -> None:
    with servers.own_server(target.home) as other:
        servers.answers_its_owner(other)
        servers.answers_its_owner(target)
        servers.keeps_other_passwords_out(target, other)
    servers.answers_its_owner(target)
