"""Rules for flags that say how ranks are started and find each other. Each returns the options that
stand for the flag."""

from __future__ import annotations

from urllib.parse import urlsplit

from trainyard.errors import ConfigError
from trainyard.megatron_cli.command_line import NO_EFFECT, CommandLine, Rule
from trainyard.megatron_cli.options import Option


def _world_size(line: CommandLine, option: Option) -> list[Option]:
    size, started = option.number, line.environ.get("WORLD_SIZE")
    if "RANK" in line.environ:
        if started is not None and started != str(size):
            raise ConfigError(
                f"{option.given} {size}: the launcher started {started} ranks (WORLD_SIZE); "
                "leave the option out"
            )
        return []
    here = line.last("nproc-per-node")
    if here is None:
        return [Option(option.given, "nproc-per-node", [str(size)])]
    if here.number != size:
        raise ConfigError(
            f"{option.given} {size} and {here.given} {here.value}: this command starts the "
            "ranks of one machine; on several, start torchrun --nnodes ... --nproc-per-node "
            f"{here.value} -m stages.pretrain ... on each"
        )
    return []


def _ranks_of_plan(line: CommandLine, option: Option) -> list[Option]:
    """A training on one machine has this many ranks; of several, --world-size counts all."""
    if line.last("world-size", "data-parallel-size") is None:
        return [Option(option.given, "world-size", option.values)]
    line.ignore(option, "--world-size or --data-parallel-size says how many devices there are")
    return []


def _init_method(line: CommandLine, option: Option) -> list[Option]:
    address = urlsplit(option.value)
    if address.scheme == "env":
        return []
    try:
        host, port = address.hostname, address.port
    except ValueError:
        host = port = None
    if address.scheme != "tcp" or host is None or port is None:
        raise ConfigError(
            f"{option.given} {option.value!r} must be tcp://HOST:PORT; torchrun gives "
            "--master-addr and --master-port to the ranks that it starts"
        )
    if "RANK" not in line.environ:
        line.remarks.append(
            f"{option.given}: {NO_EFFECT}: this command starts all ranks itself and chooses a "
            "free port for them"
        )
        return []
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", str(port))):
        launched = line.environ.get(name)
        if launched is None:
            line.environment[name] = value
        elif launched != value:
            line.remarks.append(f"{option.given}: the launcher's {name}={launched} wins")
    return []


def _local_rank(line: CommandLine, option: Option) -> list[Option]:
    if "RANK" in line.environ and "LOCAL_RANK" not in line.environ:
        line.environment["LOCAL_RANK"] = option.value
    else:
        reason = (
            f"the launcher's LOCAL_RANK={line.environ['LOCAL_RANK']} wins"
            if "RANK" in line.environ
            else "this command starts all ranks itself"
        )
        line.remarks.append(f"{option.given}: {NO_EFFECT}: {reason}")
    return []


RANK_RULES: dict[str, Rule] = {
    "world-size": _world_size,
    "nproc-per-node": _ranks_of_plan,
    "init-method": _init_method,
    "local-rank": _local_rank,
}
