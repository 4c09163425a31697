"""Yard profiles: what comes with trainyard holds, what cannot be is refused where it stands."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flows.backends.container.options import ContainerOptions
from flows.backends.kubernetes.options import Claim, KubernetesOptions
from flows.backends.slurm.options import SlurmOptions
from flows.backends.spec import LaunchSpec, Mount, Resources
from flows.runner.job_blocks import JOB_BLOCKS
from flows.stage_configs import CONFIGS
from flows.yard import read_profile as read_profile_module
from flows.yard.profile import BACKEND_OPTIONS, Profile, Watch
from flows.yard.read_profile import YARDS, parse_profile, read_profile
from trainyard.errors import ConfigError
from trainyard.version import VERSION

SLURM = 'block = "slurm"\n'
STAGES = ("pretrain", "merge")


def parse(text: str, name: str = "site") -> Profile:
    return parse_profile(tomllib.loads(text), name)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YARD_HOME", "/srv/yard")
    for name in ("YARD", "YARD_SHARED", "YARD_BUCKET", "TRAINYARD_REGISTRY"):
        monkeypatch.delenv(name, raising=False)


def test_there_is_a_profile_for_each_kind_of_place() -> None:
    backends = {read_profile(file.stem).backend for file in YARDS.glob("*.toml")}
    assert backends == set(BACKEND_OPTIONS)


@pytest.mark.parametrize("name", sorted(file.stem for file in YARDS.glob("*.toml")))
def test_weekly_sweep_removes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YARD_HOME", "/srv/yard")
    swept = read_profile(name).schedules["collect-garbage"]
    assert (swept.active, dict(swept.parameters)) == (True, {})


@pytest.mark.parametrize("name", sorted(file.stem for file in YARDS.glob("*.toml")))
def test_a_profile_that_comes_with_trainyard_makes_a_place(name: str) -> None:
    profile = read_profile(name)
    place = profile.stage_environment("s3://bucket/yard/tiny")
    assert (place.yard, place.backend, profile.pool.name) == (name, profile.backend, name)
    assert Path(place.run_folder).is_absolute()
    assert place.run_folder.endswith(("/.runs/tiny", "tiny/.runs"))


def test_a_name_leads_to_ours_and_a_path_to_any(tmp_path: Path) -> None:
    (tmp_path / "mysite.toml").write_text('block = "slurm"\n[slurm]\npartition = "gpu"\n')
    profile = read_profile(str(tmp_path / "mysite.toml"))
    assert (profile.name, profile.pool.name) == ("mysite", "mysite")
    assert profile.options == SlurmOptions(partition="gpu")
    with pytest.raises(ConfigError, match=r"profile 'slrum' in .*/yards; did you mean 'slurm'"):
        read_profile("slrum")
    with pytest.raises(ConfigError, match=r"gone\.toml cannot be read"):
        read_profile(str(tmp_path / "gone.toml"))
    (tmp_path / "mysite.toml").write_text('blok = "slurm"\n')
    with pytest.raises(ConfigError, match=f"{tmp_path}/mysite.toml: yard mysite: .*'blok'"):
        read_profile(str(tmp_path / "mysite.toml"))


@pytest.mark.parametrize(("made", "words"), [(False, "does not exist"), (True, "has none")])
def test_outside_a_checkout_the_error_names_the_folder_of_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool, words: str
) -> None:
    nowhere = tmp_path / "yards"
    if made:
        nowhere.mkdir()
    monkeypatch.setattr(read_profile_module, "YARDS", nowhere)
    with pytest.raises(ConfigError) as refused:
        read_profile("compose")
    message = str(refused.value)
    assert f"no yard profile 'compose': profiles are read from {nowhere}, which {words}" in message
    assert "a checkout or in the image of the flows; or give the path of a .toml" in message


def test_a_stages_table_goes_over_the_common_one() -> None:
    text = "[resources]\ncpus_per_node = 8\n[resources.pretrain]\nnodes = 2\ngpus_per_node = 4\n"
    place = parse(SLURM + text).stage_environment("yard/tiny")
    assert place.resources_of("merge") == Resources(cpus_per_node=8)
    assert place.resources_of("pretrain") == Resources(nodes=2, gpus_per_node=4, cpus_per_node=8)


@pytest.mark.parametrize(
    ("block", "text", "merge", "pretrain"),
    [
        (
            "slurm",
            'partition = "cpu"\naccount = "llm"\n[slurm.pretrain]\npartition = "h100"\n',
            SlurmOptions(partition="cpu", account="llm"),
            SlurmOptions(partition="h100", account="llm"),
        ),
        (
            "container",
            'network = "yard"\n[container.pretrain]\nshared_memory = "64g"\n',
            ContainerOptions(network="yard"),
            ContainerOptions(network="yard", shared_memory="64g"),
        ),
        (
            "kubernetes",
            'user = 10001\n[kubernetes.node_selector]\nkind = "cpu"\n'
            '[kubernetes.pretrain]\nextra_resources = { "rdma/ib" = "8" }\n'
            '[kubernetes.pretrain.node_selector]\nkind = "h100"\n',
            KubernetesOptions(user=10001, node_selector={"kind": "cpu"}),
            KubernetesOptions(
                user=10001, node_selector={"kind": "h100"}, extra_resources={"rdma/ib": "8"}
            ),
        ),
    ],
)
def test_options_of_a_stage_go_key_by_key_over_those_of_all(
    tmp_path: Path, block: str, text: str, merge: object, pretrain: object
) -> None:
    place = parse(f'block = "{block}"\n[{block}]\n{text}').stage_environment("yard/tiny")
    assert (place.options_of("merge"), place.options_of("pretrain")) == (merge, pretrain)
    spec = LaunchSpec(name="x", command=("true",), run_directory=str(tmp_path))
    options = [JOB_BLOCKS[block](place, spec, stage).model_dump()["options"] for stage in STAGES]
    assert options == [vars_of(pretrain), vars_of(merge)]


def vars_of(options: Any) -> dict[str, Any]:
    return dataclasses.asdict(options)


def test_no_stage_is_called_like_an_option() -> None:
    """Else `[kubernetes.NAME]` could mean both."""
    kinds = [kind for kind in BACKEND_OPTIONS.values() if kind is not None]
    for kind in (*kinds, Resources, Watch):
        assert not {field.name for field in dataclasses.fields(kind)} & set(CONFIGS)


def test_a_process_has_no_options() -> None:
    assert parse("").stage_environment("yard/tiny").options_of("pretrain") is None


@pytest.mark.parametrize("block", ["container", "slurm", "kubernetes"])
def test_how_a_job_is_watched_reaches_its_block(tmp_path: Path, block: str) -> None:
    text = f'block = "{block}"\n[watch]\ngrace_seconds = 60\n'
    text += "[watch.pretrain]\nhang_seconds = 1800\n"
    place = parse(text).stage_environment("yard/tiny")
    spec = LaunchSpec(name="x", command=("true",), run_directory=str(tmp_path))
    found = {stage: JOB_BLOCKS[block](place, spec, stage) for stage in STAGES}
    hangs = {stage: one.model_dump()["hang_seconds"] for stage, one in found.items()}
    assert hangs == {"pretrain": 1800.0, "merge": None}
    assert place.watch_of("pretrain").grace_seconds == place.watch_of("merge").grace_seconds == 60


@pytest.mark.parametrize("block", ["container", "slurm"])
def test_poll_seconds_come_from_the_yard_or_the_block(tmp_path: Path, block: str) -> None:
    spec = LaunchSpec(name="x", command=("true",), run_directory=str(tmp_path))

    def seconds(text: str) -> float:
        place = parse(f'block = "{block}"\n{text}').stage_environment("yard/tiny")
        return float(JOB_BLOCKS[block](place, spec, "merge").model_dump()["poll_seconds"])

    assert seconds("[watch]\npoll_seconds = 30") == 30
    assert seconds("") > 0


def test_deep_tables_become_what_blocks_take() -> None:
    profile = parse(
        """
        block = "kubernetes"
        [[mounts]]
        source = "/data"
        target = "/data"
        [kubernetes]
        claims = [{ name = "yard", target = "/yard" }]
        node_selector = { "kubernetes.io/arch" = "amd64" }
        """
    )
    place = profile.stage_environment("yard/tiny")
    assert place.kubernetes.claims == (Claim(name="yard", target="/yard"),)
    assert place.kubernetes.node_selector == {"kubernetes.io/arch": "amd64"}
    assert place.mounts == (Mount(source="/data", target="/data"),)


def test_an_image_gets_stage_and_version() -> None:
    text = 'block = "container"\nimage = "r.io/{stage}:{version}"\n[images]\nmerge = "r.io/own:1"\n'
    place = parse(text).stage_environment("yard/tiny")
    assert place.image_of("train_tokenizer") == f"r.io/train-tokenizer:{VERSION}"
    assert place.image_of("merge") == "r.io/own:1"
    assert place.python == "python"
    assert parse("").stage_environment("yard/tiny").python == sys.executable


def test_root_from_argument_environment_or_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = parse('store = "s3://bucket/yard/"')
    assert profile.yard_root() == "s3://bucket/yard"
    monkeypatch.setenv("YARD", "/elsewhere")
    assert profile.yard_root() == "/elsewhere"
    assert profile.yard_root("here/") == "here"
    monkeypatch.delenv("YARD")
    assert parse("").yard_root() == "yard"


def test_variables_are_filled_in_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'store = "s3://${SITE_BUCKET:-yard}/x"\n[environment]\nA = "${SITE_A}"\n'
    with pytest.raises(ConfigError, match="environment: A: the variable SITE_A is not set"):
        parse(text)
    monkeypatch.setenv("SITE_A", "1")
    assert parse(text).store == "s3://yard/x"
    monkeypatch.setenv("SITE_BUCKET", "other")
    assert parse(text).store == "s3://other/x"


def test_a_training_gets_the_resources_of_its_yard() -> None:
    gpus = SLURM + "gpu_memory_gib = 80\n[resources.pretrain]\nnodes = 4\nprocesses_per_node = 8\n"
    assert parse(gpus + "gpus_per_node = 8\n").training_resources().to_plan() == {
        "world_size": 32,
        "gpu_memory_gib": 80.0,
    }
    assert parse(gpus.replace("gpu_memory_gib = 80\n", "")).training_resources().to_plan() == {
        "world_size": 32
    }
    assert parse("").training_resources().to_plan() == {}


def test_a_process_takes_the_gpus_of_its_machine_without_asking_for_them() -> None:
    assert parse("gpu_memory_gib = 80").training_resources().to_plan() == {"gpu_memory_gib": 80.0}


REFUSED: list[tuple[str, str]] = [
    ('block = "slrum"', "block 'slrum' is not one of process, container"),
    ('blok = "slurm"', "unknown key 'blok'; did you mean 'block'"),
    ('[slurm]\npartition = "a"', "unknown key 'slurm'"),
    ('block = "slurm"\n[slurm]\npartitoin = "a"', r"\[slurm\]: unknown key .* 'partition'"),
    ('block = "slurm"\n[slurm]\nexclusive = 1', r"\[slurm\]: exclusive must be true or false"),
    ("[resources.pretrian]\nnodes = 2", r"\[resources\]: .*'pretrain'"),
    ("[resources]\nnodes = 0", r"\[resources\].*nodes"),
    ("[resources.pretrain]\nprocesses_per_node = 2", "nproc_per_node in the recipe"),
    ("[limits]\npretrain = 0", r"\[limits\] pretrain must be at least 1"),
    (
        'block = "container"\n[shares]\ntokenize = 4',
        "for block process, slurm, kubernetes; block 'container' starts one",
    ),
    ('block = "slurm"\n[shares]\nreport = 4', r"\[shares\].*'report'"),
    ("gpu_memory_gib = 0", "gpu_memory_gib must be positive"),
    ("gpu_memory_gib = true", "gpu_memory_gib must be a number"),
    ('block = "slurm"\ngpu_memory_gib = 80', r"gpu_memory_gib \(80\) .*\[resources.pretrain\]"),
    (
        'block = "slurm"\ngpu_memory_gib = 80\n[resources.evaluate]\ngpus_per_node = 1',
        "set gpus_per_node in",
    ),
    ('block = "slurm"\n[slurm.pretrian]\nqos = "a"', r"\[slurm\]: .*'pretrian'; .* 'pretrain'"),
    ('block = "slurm"\n[slurm.pretrain]\nqso = "a"', r"\[slurm.pretrain\]: .*'qso'; .* 'qos'"),
    ('block = "slurm"\n[slurm.pretrain]\nqos = "a b"', r"\[slurm.pretrain\]: Slurm option qos"),
    ('block = "slurm"\n[slurm]\npretrain = 1', r"\[slurm\]: unknown key 'pretrain'"),
    ('block = "slurm"\n[slurm]\npartition = { a = "b" }', "partition must be a string"),
    ('block = "kubernetes"\n[kubernetes.node_selectr]\na = "b"', "did you mean 'node_selector'"),
    ("slurm = 1\nblock = 'slurm'", r"\[slurm\] must be a table"),
    ("[pool]\nconcurrency_limit = 0", r"\[pool\]: concurrency_limit must be at least 1.*pause"),
    ('block = "slurm"\nshares_at_once = 0', "shares_at_once must be at least 1"),
    ('image = "a/b:1"', "image: block 'process' runs what is installed here"),
    ('[images]\nmerge = "a/b:1"', "images: block 'process' runs what is installed here"),
    ('[[mounts]]\nsource = "/a"\ntarget = "/a"', "mounts: block 'process'"),
    ('[[mounts]]\nsource = "/a"', "target is required"),
    ('[[mounts]]\nsource = "a"\ntarget = "/a"', "mount source 'a'"),
    ("mounts = 3", "mounts must be a list"),
    ("[environment]\nA = 1", "environment.A must be a string"),
    ("[automations]\nzombie_seconds = 5", "zombie_seconds must be 0 or at least 60"),
    ("[automations]\nresume_crashed = -1", "resume_crashed must be from 0 to 100, got -1"),
    ("[schedules.corpus-refresh]\nactive = true", "cron is required"),
    ("deployments = 3", "deployments must be a list"),
    ("[watch]\nhang_seconds = 60", "hang_seconds is for block container, slurm, kubernetes"),
    ('block = "kubernetes"\n[watch]\npoll_seconds = 5', "poll_seconds is for block container, sl"),
    ('block = "slurm"\n[watch.pretrain]\nhang_seconds = 0', r"\[watch.pretrain\]: hang_seconds mu"),
    ('block = "slurm"\n[watch.pretrian]\nhang_seconds = 9', r"\[watch\]: .*'pretrain'"),
    ("[watch]\ngrace_seconds = -1", r"\[watch\]: grace_seconds must not be negative"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_impossible_values_are_refused_with_their_place(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)yard site.*{words}"):
        parse(text)


def test_shares_are_those_that_were_asked_for() -> None:
    assert parse("").stage_environment("yard/tiny").shares_of("tokenize") == 1
    here = parse("[shares]\nclean = 2").stage_environment("yard/tiny")
    assert (here.shares_of("clean"), here.shares_of("dedup")) == (2, 1)
    shared: dict[str, Any] = {"block": "slurm", "shares": {"tokenize": 4}}
    assert parse_profile(shared, "site").stage_environment("yard/tiny").shares_of("tokenize") == 4
