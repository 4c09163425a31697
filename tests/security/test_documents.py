"""Recipes, configs, presets and profiles that somebody else wrote or named."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.browse.root import Root
from flows.cli.flow_commands import flow_main
from flows.cli.options import check_profile, check_root
from flows.recipes.recipe import parse_recipe, read_recipe, yard_root
from flows.recipes.stage_job import read_job
from flows.yard.read_profile import filled_in, parse_profile, read_profile
from stages.merge.config import MergeConfig
from stages.pretrain.config import PretrainConfig
from stages.runtime.cli import stage_main
from trainyard.artifacts import store
from trainyard.artifacts.documents import read_text
from trainyard.artifacts.urls import refuse_secrets, show_url
from trainyard.config_text import parse_document
from trainyard.errors import ConfigError, TrainyardError
from trainyard.evaluation.detokenizers import detokenize_wikitext
from trainyard.megatron_cli.yaml_cfg import read_yaml_cfg
from trainyard.megatron_cli.yaml_text import read_entries
from trainyard.training.run.node_local import expanded
from trainyard.variables import looks_secret

SECRET = "hunter2"


def message_of(read: Callable[..., object], *given: Any) -> str:
    """The message of a refusal; empty without one."""
    try:
        read(*given)
    except ConfigError as error:
        return str(error)
    return ""


# --- a password in a URL is not repeated ----------------------------------------------------------

URLS = [
    f"https://user:{SECRET}@h.example/x.toml",
    f"https://{SECRET}@h.example/x.toml",
    f"https://user:{SECRET}%40@h.example/x.toml",
    f"https://user:p/{SECRET}/w@h.example/x.toml",
    f"https://user:p?{SECRET}@h.example/x.toml",
    f"https://user:p#{SECRET}@h.example/x.toml",
    f"https://user:p@{SECRET}@h.example/x.toml",
    f"https://h.example/x.toml?X-Amz-Signature={SECRET}",
    f"https://h.example/x.toml?{SECRET}",
    f"https://h.example/x.toml#{SECRET}",
    f"HTTPS://user:{SECRET}@h.example/x.toml",
    f"HTTPS://h.example/x.toml?{SECRET}",
    f"s3://AKIA:{SECRET}@bucket/x.toml",
    f"s3://AKIA:ab/{SECRET}@bucket/x.toml",
    f"s3://AKIA:ab+/{SECRET}/c@bucket/x.toml",
    f"simplecache::https://user:{SECRET}@h.example/x.toml",
    f"simplecache::https://h.example/x.toml?{SECRET}",
    f"ftp://user:{SECRET}@h.example/x.toml",
    f"https://[user:{SECRET}@h.example/x.toml",
    f"https://user:{SECRET}@[::1/x.toml",
    f"https://user:{SECRET}@h.example:x/x.toml",
]

PLAIN_URLS = [
    "s3://bucket/a@b.toml",
    "https://h.example:8080/a@b/x.toml",
    "https://[::1]:8080/a@b/x.toml",
    "file:///a@b/x.toml",
    "/runs/a@b:c?d#e",
]


def of_preset(url: str) -> object:
    return parse_recipe(f"preset = {url!r}", "recipe.toml")


def of_stage(url: str) -> object:
    raise ConfigError(str(stage_main("merge", MergeConfig, "none", argv=["--config", url])))


def of_megatron(url: str) -> object:
    argv = ["--yaml-cfg", url]
    raise ConfigError(str(stage_main("pretrain", PretrainConfig, "none", argv=argv, megatron=True)))


def of_program(module: str, *before: str) -> Callable[[str], object]:
    def run(url: str) -> object:
        raise ConfigError(str(flow_main(module, [*before, url])))

    return run


READERS: dict[str, Callable[[str], object]] = {
    "recipe": read_recipe,
    "preset": of_preset,
    "config": lambda url: read_job("merge", url),
    "profile": read_profile,
    "--config of a stage": of_stage,
    "--yaml-cfg of a stage": of_megatron,
    "a flow's recipe": of_program("pretrain_gpt"),
    "a flow's profile": of_program("pretrain_gpt", "recipes/quickstart.toml", "--profile"),
    "a flow's root": of_program("pretrain_gpt", "recipes/quickstart.toml", "--root"),
    "a flow's config": of_program("run_stage", "merge", "--config"),
    "a root": yard_root,
    "what browse shows": Root,
    "a root in place of a profile": lambda url: check_root(url + ".toml"),
    "a profile in place of a root": lambda url: check_profile(url + "/"),
    "any file": store.read_bytes,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_password_in_a_url_is_refused_and_not_shown(
    reader: Callable[[str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    for url in URLS:
        with pytest.raises(TrainyardError) as caught:
            reader(url)
        shown = str(caught.value) + "".join(capsys.readouterr())
        assert SECRET not in shown, url
        assert "Traceback" not in shown, url


@pytest.mark.parametrize("url", URLS)
def test_a_shown_url_keeps_what_is_no_secret(url: str) -> None:
    assert show_url(url).startswith(url.partition("://")[0] + "://...")
    assert SECRET not in show_url(url)


@pytest.mark.parametrize("url", PLAIN_URLS)
def test_a_url_without_secrets_is_shown_as_it_is(url: str) -> None:
    refuse_secrets(url)
    assert show_url(url) == url


# --- variables that look like secrets -------------------------------------------------------------

SECRETS = [
    *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "HF_TOKEN"),
    *("WANDB_KEY", "WANDB_API_KEY", "WANDB_APIKEY", "COMET_API_KEY", "OPENAI_API_KEY", "NGC_KEY"),
    *("PGPASS", "PGPASSWORD", "PGPASSFILE", "MYSQL_PWD", "DB_PASS", "DB_PW", "RSYNC_PASSWORD"),
    *("DATABASE_URL", "DATABASE_URI", "SQLALCHEMY_DATABASE_URI", "REDIS_URL", "MONGODB_URI"),
    *("SSH_KEY", "SSH_PRIVATE_KEY", "DEPLOY_KEYS", "SLURM_JWT", "SENTRY_DSN", "GITLAB_PAT"),
    *("SLACK_WEBHOOK", "SLACK_WEBHOOK_URL", "TRAINYARD_NOTIFY_URL", "AZURE_CONNECTION_STRING"),
    *("AZURE_STORAGE_CONNECTION_STRING", "GOOGLE_APPLICATION_CREDENTIALS", "NETRC", "MY_AUTH"),
    *("GPG_PASSPHRASE", "SESSION_COOKIE", "REGISTRY_CREDS", "wandb_api_key", "Db_Password"),
    *("PREFECT_API_KEY", "PREFECT_API_URL", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_HOME"),
    "INDEX_URL",
]
"""The last one holds a URL with a password."""

HARMLESS = [
    *("HOME", "PWD", "USER", "YARD", "YARD_HOME", "SLURM_JOB_ID", "TMPDIR", "NCCL_DEBUG", "MONKEY"),
    *("TOKENIZERS_PARALLELISM", "KEYBOARD", "AUTHOR", "BYPASS", "PYTHONPATH", "TRAINYARD_REGISTRY"),
    *("COMPASS_DIR", "PATH", "PATTERN", "BROWSE_PORT", "HTTPS_PROXY", "OMP_NUM_THREADS"),
]

VALUES = dict.fromkeys(SECRETS, SECRET) | {"INDEX_URL": f"https://me:{SECRET}@pypi.example"}


def filled_by_yaml(name: str) -> object:
    return read_entries(f"save: /runs/${{{name}}}", VALUES, "--yaml-cfg x")


NAMING: dict[str, Callable[[str], object]] = {
    "profile": lambda name: parse_profile({"store": f"/runs/${{{name}}}"}, "site"),
    "profile, with a default": lambda name: parse_profile({"store": f"${{{name}:-x}}"}, "site"),
    "profile, within a table": lambda name: filled_in({"a": [{"b": f"${{{name}}}"}]}, VALUES, "x"),
    "--yaml-cfg": filled_by_yaml,
    "a folder for local checkpoints": lambda name: expanded(f"/tmp/${name}/x"),
    "a folder, in braces": lambda name: expanded(f"/tmp/${{{name}}}"),
}


@pytest.mark.parametrize("reader", NAMING.values(), ids=NAMING)
def test_no_document_names_a_variable_that_looks_like_a_secret(
    reader: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, VALUES[name])
        refusal = f"the variable {name} .*no document may read"
        with pytest.raises(ConfigError, match=refusal) as caught:
            reader(name)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", HARMLESS)
def test_other_variables_may_be_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not looks_secret(name)
    monkeypatch.setenv(name, "/some")
    assert expanded(f"${name}/x") == "/some/x"


# --- endings, and what is no recipe ---------------------------------------------------------------

DISGUISED = [
    "{folder}/secret#.toml",
    "{folder}/secret#x/y.toml",
    "{folder}/secret?.toml",
    "{folder}/secret?a=b.toml",
    "s3://bucket/secret?versionId=1.toml",
    "s3://bucket/secret#.toml",
    "https://h.example/secret#.toml",
    "https://h.example/secret?.toml",
    "memory://secret?.toml",
]


@pytest.mark.parametrize("pattern", DISGUISED)
def test_an_ending_behind_a_mark_is_refused(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"a = '{SECRET}'")
    url = pattern.format(folder=tmp_path.as_uri())
    for reader in (read_recipe, read_text, read_profile, of_preset):
        with pytest.raises(ConfigError, match=r"'\?' and no '#'|a query would be"):
            reader(url)


NO_RECIPES = [
    f"[default]\naws_secret_access_key = {SECRET}\n",
    f"machine h.example login me password {SECRET}\n",
    f"root:x:0:0:{SECRET}:/root:/bin/sh\n",
    f"export TOKEN={SECRET}\n",
    f"-----BEGIN KEY-----\n{SECRET}\n",
    f"{{{SECRET}: [",
    f"a: *{SECRET}",
    f"a: !{SECRET} b",
    f"a: !{SECRET}!b c",
    f"a: &{SECRET} 1\nb: &{SECRET} 2\nc: *other{SECRET}",
    f"%{SECRET} 1\n--- a",
    f"a: '{SECRET}",
    f'a: "{SECRET}',
    f'a: "\\q{SECRET}"',
    f"a: {SECRET}: b: c",
    f"@{SECRET}",
    f"`{SECRET}",
    f"{SECRET} {SECRET}: 1",
    f"'{SECRET}.': 1\n'{SECRET}!': 1",
    f"? [{SECRET}]\n: 1",
    f'{{"a": "{SECRET}" "b"}}',
    f'{{"a": {SECRET}}}',
    f'{{"{SECRET}!": 1}}',
    f"\0{SECRET}",
    f"{SECRET}\t= 1 2",
]
"""Files that a person does not mean to show."""


@pytest.mark.parametrize("ending", [".toml", ".yaml", ".json"])
@pytest.mark.parametrize("text", NO_RECIPES)
def test_a_file_that_is_no_recipe_is_not_quoted(text: str, ending: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(text, f"x{ending}")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("text", NO_RECIPES)
def test_what_is_no_file_of_megatron_is_not_quoted(text: str) -> None:
    message = message_of(read_yaml_cfg, text, PretrainConfig, {}, "x")
    assert SECRET not in message


def test_an_error_says_where_a_document_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"YAML: .*'<stream end>' \(at line 2, column 1\)"):
        parse_document("a: [\n", ".yaml", "x")
    with pytest.raises(ConfigError, match=r"TOML: Invalid value \(at line 1, column 5\)"):
        parse_document("a = b", ".toml", "x")


# --- documents that take long ---------------------------------------------------------------------

N = 40_000
DEEP = 600
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
MERGED = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)
)

LONG = {
    "a number of zeros": "a: " + N * "0",
    "a number of zeros and a mark": "a: " + N * "0" + "x",
    "zeros behind a point": "a: ." + N * "0" + "x",
    "underscores": "a: 1" + N * "_" + ".",
    "digits and underscores": "a: " + N * "1_",
    "digits": "a: " + N * "9",
    "base 60": "a: 1" + N * ":1",
    "base 60 with a point": "a: 1" + N * ":1" + ".5",
    "an exponent": "a: 1e" + N * "9",
    "laughs": LAUGHS,
    "merged tables": MERGED,
    "itself": "a: &a [*a]",
    "nested lists": "a: " + DEEP * "[",
    "nested tables": "a: " + DEEP * "{a: ",
    "nested JSON": '{"a": ' + DEEP * "[" + DEEP * "]" + "}",
    "nested TOML": "a = " + DEEP * "[" + DEEP * "]",
    "nested 200 deep": "a: " + 200 * "[" + 200 * "]",
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_no_document_keeps_its_reader_busy(text: str) -> None:
    began = time.process_time()
    for ending in (".yaml", ".json", ".toml"):
        assert len(message_of(parse_document, text, ending, "x")) < 500
    assert len(message_of(read_entries, text, {}, "x")) < 500
    assert time.process_time() - began < 5  # today's longest takes a tenth of it


def test_a_long_value_is_cut_in_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_recipe("corpus: " + N * "x", "x.yaml")
    assert len(str(caught.value)) < 500


# --- texts that are evaluated on ------------------------------------------------------------------

BRACKETS = ["(", "( ", "[", "{ \t", '" ', "' '", "( )", "([{", ") (", "=" * 4, " @-@ "]


@pytest.mark.parametrize("unit", BRACKETS)
def test_a_tokenised_text_becomes_plain_in_linear_time(unit: str) -> None:
    def seconds(length: int) -> float:
        began = time.thread_time()
        detokenize_wikitext(unit * length + " " * length)
        return time.thread_time() - began

    once = min(seconds(5_000) for _ in range(3))
    assert min(seconds(10_000) for _ in range(3)) < 3 * once + 0.01
