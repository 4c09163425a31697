"""The command line of the registration.

    python -m flows.register --profile NAME [--dry-run]    (or --yard NAME)

The server is that of PREFECT_API_URL; PREFECT_API_AUTH_STRING is its password, if it has one. This
module does not import Prefect at the top, because Prefect reads its environment on import."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows.cli.options import add_yard, check_profile
from flows.cli.run_flow import ENVIRONMENT, fail, of_server
from flows.register.desired_state import DesiredState, desired_state
from flows.register.report import Report
from flows.runner.memory_check import unknown_gpu_memory
from flows.yard.read_profile import naming_file, parse_profile, profile_name, read_document
from trainyard.arguments import Parser
from trainyard.errors import ConfigError, TrainyardError
from trainyard.logging import one_line

if TYPE_CHECKING:
    from flows.register.deployments import Flows

URL = "PREFECT_API_URL"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.register`; returns its exit status."""
    parser = Parser(
        prog="python -m flows.register",
        description="Write all that a yard needs to a Prefect server: work pool, blocks, "
        "deployments, limits, automations. A second run changes nothing.",
    )
    add_yard(parser, has_root=False)
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be written, and write nothing"
    )
    given = parser.parse_args(argv)
    try:
        check_profile(given.yard, has_root=False)
        document = read_document(given.yard)
        with naming_file(given.yard):
            profile = parse_profile(document, profile_name(given.yard))
            plan = desired_state(profile, document, os.environ)
        report = _register(plan, given)
    except TrainyardError as error:
        return fail(error)
    print("\n".join(map(one_line, report.lines)))
    if plan.notify_url is None:
        print(
            f"no notification of failures: {profile.automations.notify_variable} is not set",
            file=sys.stderr,
        )
    if remark := unknown_gpu_memory(profile):
        print(f"warning: {remark}", file=sys.stderr)
    done = "would be written" if report.is_dry else "written"
    print(f"yard {profile.name}: {report.num_changes} {done}", file=sys.stderr)
    return 0


def _register(plan: DesiredState, given: argparse.Namespace) -> Report:
    if not os.environ.get(URL):
        raise ConfigError(
            f"{URL} is not set: it names the server, such as http://127.0.0.1:4200/api "
            f"(`make ui` starts one; run `. yard/.prefect/ui.env` to set it)"
        )
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from flows.register.deployments import load_flows

    with naming_file(given.yard):
        flows = load_flows(plan)  # checks them before any request
    try:
        return asyncio.run(_write(plan, flows, given.dry_run))
    except Exception as error:
        if (ours := of_server(error)) is not None:
            raise ours from error
        raise


async def _write(plan: DesiredState, flows: Flows, is_dry: bool) -> Report:
    from prefect import get_client

    from flows.register.automations import register_automations
    from flows.register.server import Registration, report_leftovers

    report = Report(is_dry)
    async with get_client() as client:
        registration = Registration(client, plan, flows, report)
        await registration.run()
        await register_automations(registration)
        await report_leftovers(client, plan, report)
    return report
