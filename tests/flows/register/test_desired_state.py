"""prefect.yaml and a profile make what a server has to know."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml

from flows.register.desired_state import ROOT, DesiredState, desired_state, read_deployments
from flows.register.flow_schedules import to_create
from flows.register.report import Report, differing
from flows.yard.read_profile import parse_profile
from trainyard.errors import ConfigError

FLOWS = [
    *("prepare-corpus", "pretrain-bert", "pretrain-gpt", "pretrain-t5"),
    *("build-retro", "detoxify-gpt", "finetune-gpt", "pretrain-retro"),
    *("release", "collect-corpus", "corpus-refresh", "run-stage", "collect-garbage"),
]


def want(
    text: str, environment: dict[str, str] | None = None, file: Path | None = None
) -> DesiredState:
    document = tomllib.loads(text)
    return desired_state(parse_profile(document, "site"), document, environment or {}, file)


def test_every_flow_is_deployed_under_the_name_of_the_yard() -> None:
    made = want('[pool]\nname = "gpus"\ncode = "/srv/code"\n')
    names = [one.entrypoint.rpartition(":")[2].replace("_", "-") for one in made.deployments]
    assert set(FLOWS) <= set(names)
    assert len(names) == len(read_deployments(ROOT / "prefect.yaml"))
    for flow, one in zip(names, made.deployments, strict=True):
        assert (one.name, one.pool, one.parameters["profile"]) == ("site", "gpus", "site")
        assert one.pull_steps[0].popitem()[1] == {"directory": "/srv/code"}
        assert one.tags == (flow, "yard:site")  # lists show one or two
        assert (ROOT / one.entrypoint.partition(":")[0]).exists()


def test_parameters_of_prefect_yaml_name_files_that_are_there() -> None:
    for one in want("").deployments:
        recipe = one.parameters.get("recipe")
        assert recipe is None or (ROOT / str(recipe)).exists()


def test_a_profile_may_offer_some_flows_at_times() -> None:
    text = 'deployments = ["corpus-refresh", "run-stage"]\n'
    text += '[schedules.corpus-refresh]\ncron = "0 3 * * *"\ntimezone = "Europe/Berlin"\n'
    refresh, run_stage = want(text).deployments
    assert refresh.schedule is not None
    assert (refresh.schedule.cron, refresh.schedule.timezone) == ("0 3 * * *", "Europe/Berlin")
    assert run_stage.schedule is None


def test_parameters_of_a_schedule_are_those_of_the_deployment() -> None:
    text = 'deployments = ["release"]\n[schedules.release]\ncron = "0 3 * * *"\n'
    (made,) = want(text + 'parameters = { recipe = "mine.toml" }\n').deployments
    assert made.parameters == {"recipe": "mine.toml", "profile": "site"}
    assert [one.parameters for one in to_create(made.schedule)] == [{}]


def test_limits_are_of_the_yard() -> None:
    assert want("[limits]\npretrain = 2\n").limits == {"yard:site:pretrain": 2}


def test_the_url_of_notifications_comes_from_the_environment() -> None:
    assert want("").notify_url is None
    assert want("", {"TRAINYARD_NOTIFY_URL": "https://x"}).notify_url == "https://x"
    own = '[automations]\nnotify_variable = "CHAT"\n'
    assert want(own, {"CHAT": "https://y"}).notify_url == "https://y"


def test_only_requested_automations_are_written() -> None:
    found = [
        f"trainyard site: {what}" for what in ("zombie runs", "cancelled runs", "crashed runs")
    ]
    assert want("").automation_names() == found
    waits = "[automations]\nresume_crashed = 0\n"
    assert want(waits).automation_names() == found[:2]
    text = f'{waits}zombie_seconds = 0\ntrain_on_new_corpus = "recipes/web.toml"\n'
    names = want(text, {"TRAINYARD_NOTIFY_URL": "https://x"}).automation_names()
    assert names == ["trainyard site: failures", "trainyard site: new corpus"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('deployments = ["pretrain-bgt"]', "did you mean 'pretrain-gpt'"),
        ('[schedules.corpus_refresh]\ncron = "* * * * *"', "did you mean 'corpus-refresh'"),
    ],
)
def test_an_unknown_flow_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"yard site.*{words}"):
        want(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schedules": []}, "unknown key 'schedules'"),
        ({"entrypoint": "elsewhere.py:flow"}, "flows/FILE.py:FUNCTION"),
    ],
)
def test_ignored_keys_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    entry = read_deployments(ROOT / "prefect.yaml")[0]
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump({"deployments": [{**entry, **change}]}))
    with pytest.raises(ConfigError, match=words):
        want("", file=file)
    with pytest.raises(ConfigError, match=r"cannot be read: it does not exist.*a checkout"):
        read_deployments(tmp_path / "gone.yaml")


def test_the_report_lists_what_was_or_would_be_done() -> None:
    done, dry = Report(is_dry=False), Report(is_dry=True)
    for report in (done, dry):
        report.created("a")
        report.changed("b", ["x", "y"])
        report.unchanged("c")
        assert report.num_changes == 2
    done.kept("d")
    done.left_over("e", "delete e")
    assert done.num_changes == 2
    assert done.lines.pop() == "left over       e (no longer written; delete e)"
    assert done.lines.pop() == "kept            d"
    assert done.lines == ["created         a", "changed         b: x, y", "unchanged       c"]
    assert dry.lines[:2] == ["would create    a", "would change    b: x, y"]
    assert differing({"a": 1, "b": 2, "z": 0}, {"a": 1, "b": 3, "c": 4}) == ["b", "c"]
