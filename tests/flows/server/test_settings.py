"""The settings that we give to Prefect are settings of the installed one."""

from __future__ import annotations

from prefect.settings.legacy import _get_valid_setting_names
from prefect.settings.models.root import Settings

from flows import ui
from flows.cli import run_flow
from flows.register.desired_state import HEARTBEAT
from flows.server import ephemeral


def test_the_settings_that_we_give_are_settings_of_this_prefect() -> None:
    given = {*ephemeral.SETTINGS, *ui.SETTINGS, *run_flow.PATIENCE, HEARTBEAT}
    assert given - {"DO_NOT_TRACK"} - _get_valid_setting_names(Settings) == set()
