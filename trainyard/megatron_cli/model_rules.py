"""Rules for flags that say something about the model. Each returns the options that stand for the
flag."""

from __future__ import annotations

from trainyard.errors import ConfigError
from trainyard.megatron_cli.command_line import CommandLine, Rule
from trainyard.megatron_cli.options import Option, unquoted

PARTS_OF_MLP = ("moe", "moe_act", "shared_experts")
"""Modules of Megatron-LM's --recompute-modules that belong to the MLP of a layer with experts."""

OF_LATENTS = "mla_up_proj"
"""The module that makes queries, keys and values of latents."""

STAGES = "pipeline-model-parallel-layout"

HYBRID_SPECS = ("mamba_stack_spec", "hybrid_stack_spec")
"""Last value of the --spec of Megatron-LM's hybrids, after its module."""

GPT_OSS: dict[str, tuple[str, ...]] = {
    "position-embedding-type": ("yarn",),
    "yarn-rotary-scaling-factor": ("32",),
    "yarn-original-max-position-embeddings": ("131072",),
    "no-yarn-correction-range-round-to-int": (),
}
"""What Megatron-LM's --enable-gpt-oss sets (megatron/post_training/model_builder.py) and is no
default of ours."""

PUBLISHED_LENGTH = "--yarn-original-max-position-embeddings 4096"
"""Of gpt-oss as OpenAI publishes it."""


def _rotary(line: CommandLine, option: Option) -> list[Option]:
    given = line.last("position-embedding-type")
    if given is None:
        return [Option(option.given, "position-embedding-type", ["rope"])]
    if given.value != "rope":
        raise ConfigError(
            f"{option.given} means --position-embedding-type rope, but "
            f"--position-embedding-type is {given.value}; leave one of them out"
        )
    return []


def _no_position_embedding(line: CommandLine, option: Option) -> list[Option]:
    if line.last("position-embedding-type", "use-rotary-position-embeddings") is None:
        raise ConfigError(
            f"{option.given} does not say which positions to use instead: give "
            "--position-embedding-type rope, or none"
        )
    return []


def _rope_type(line: CommandLine, option: Option) -> list[Option]:
    """To latents rope means YaRN, which without a stretch is plain rope."""
    if line.last("multi-latent-attention") is not None:
        stretch = line.last("rotary-scaling-factor", "yarn-rotary-scaling-factor")
        if option.value == "rope" and stretch is not None and float(stretch.value) != 1.0:
            raise ConfigError(
                f"{option.given} rope does not stretch positions, and {stretch.given} is "
                f"{stretch.value}; leave one of them out"
            )
        return []
    if option.value != "rope":
        raise ConfigError(
            f"{option.given} {option.value}: give --position-embedding-type {option.value}"
        )
    return []


def _enable_gpt_oss(line: CommandLine, option: Option) -> list[Option]:
    """The positions of gpt-oss, which Megatron-LM's flag alone says."""
    given = line.last("position-embedding-type")
    if given is not None and given.value != "yarn":
        raise ConfigError(
            f"{option.given} means --position-embedding-type yarn, but --position-embedding-type "
            f"is {given.value}; leave one of them out"
        )
    names = {line.vocabulary.ours(other.name) for other in line.options}
    added = [
        Option(option.given, name, list(values))
        for name, values in GPT_OSS.items()
        if name not in names
    ]
    words = " ".join(token for one in added for token in one.tokens())
    line.remarks.append(
        f"{option.given}: {words}, as in Megatron-LM; the published model has {PUBLISHED_LENGTH}"
    )
    return added


def _retro_add_retriever(line: CommandLine, option: Option) -> list[Option]:
    """A GPT with a retriever is a family of its own."""
    given = line.last("model-type")
    if given is not None and given.value != "retro":
        raise ConfigError(
            f"{option.given} means --model-type retro, but --model-type is {given.value}; "
            "leave one of them out"
        )
    return [] if given is not None else [Option(option.given, "model-type", ["retro"])]


def _spec(line: CommandLine, option: Option) -> list[Option]:
    """The layers of a hybrid are a family of their own; any other module is the user's."""
    if option.values == ["local"]:
        return []
    name = option.values[-1] if option.values else ""
    if name not in HYBRID_SPECS:
        raise ConfigError(
            f"{option.given} {' '.join(option.values)}: pass a model of your own to the "
            "library (docs/library.md)"
        )
    given = line.last("model-type")
    if given is not None and line.vocabulary.value("model-type", given.value) != "mamba":
        raise ConfigError(
            f"{option.given} {name} means --model-type mamba, but --model-type is "
            f"{given.value}; leave one of them out"
        )
    return [] if given is not None else [Option(option.given, "model-type", ["mamba"])]


def _hybrid_pattern(line: CommandLine, option: Option) -> list[Option]:
    """It says how many layers there are where --num-layers does not, and by | which of them are a
    pipeline stage, as in newer releases."""
    pattern = unquoted(option.value)
    stages = pattern.split("|")
    letters = "".join(stages)
    found = [Option(option.given, option.name, [letters])]
    if len(stages) > 1 and "/" not in pattern:  # with layers after a / it is refused as it stands
        found += _stages_of_pattern(line, option, stages)
    else:
        found[0].values = option.values
    if line.last("num-layers", "config", "yaml-cfg", "use-checkpoint-args") is None:
        found.append(Option(option.given, "num-layers", [str(len(letters))]))
    return found


def _stages_of_pattern(line: CommandLine, option: Option, stages: list[str]) -> list[Option]:
    """The layout of the stages, for a command that has one."""
    if line.vocabulary.meaning(STAGES).kind != "ours":  # the stages of a checkpoint do not matter
        return []
    if (given := line.last(STAGES)) is not None:
        raise ConfigError(
            f"{option.given} {option.value} and {given.given} both say which layers a pipeline "
            "stage has; leave the | or the layout out"
        )
    layout = f"E{'|'.join(f't*{len(stage)}' if stage else '' for stage in stages)}L"
    line.remarks.append(f"{option.given} {option.value}: the stages are --{STAGES} '{layout}'")
    return [Option(option.given, STAGES, [layout])]


def _pre_softmax(line: CommandLine, option: Option) -> list[Option]:
    """Megatron-LM's DeepSeek recipes have it beside sigmoid scores, where it does nothing."""
    score = line.last("moe-router-score-function")
    if score is None or score.value != "sigmoid":
        return [option]
    line.ignore(option, "--moe-router-score-function sigmoid has no softmax")
    return []


def _dispatcher(line: CommandLine, option: Option) -> list[Option]:
    """`flex` is `alltoall` through kernels of DeepEP, `alltoall_seq` an older `alltoall`: the same
    tokens reach the same experts."""
    if option.values not in (["flex"], ["alltoall_seq"]):
        return [option]
    line.remarks.append(f"{option.given} {option.value}: alltoall, which sends the same tokens")
    return [Option(option.given, option.name, ["alltoall"])]


def _recompute_modules(line: CommandLine, option: Option) -> list[Option]:
    """Parts of a layer that are recomputed here with what stands around them, or kept. The results
    are the same."""
    parts = [value for value in option.values if value in PARTS_OF_MLP]
    modules = ["mlp" if value in PARTS_OF_MLP else value for value in option.values]
    if parts:
        line.remarks.append(f"{option.given} {' '.join(parts)}: mlp, all of a layer's experts")
    if OF_LATENTS in modules:
        modules = [value for value in modules if value != OF_LATENTS]
        if not modules:
            raise ConfigError(
                f"{option.given} {OF_LATENTS}: queries, keys and values that are made of latents "
                "are kept; give core_attn, mlp or layernorm, or leave recomputation out"
            )
        line.remarks.append(f"{option.given} {OF_LATENTS}: what is made of latents is kept")
    return [Option(option.given, option.name, list(dict.fromkeys(modules)))]


def _moe_layer_recompute(line: CommandLine, option: Option) -> list[Option]:
    """The flag from before --recompute-modules had moe."""
    granularity = line.last("recompute-granularity")
    if granularity is not None and granularity.values == ["full"]:
        line.ignore(option, "--recompute-granularity full recomputes whole layers")
        return []
    modules = line.last("recompute-modules")
    line.remarks.append(f"{option.given}: --recompute-modules mlp, all of a layer's experts")
    if modules is not None:
        modules.values = list(dict.fromkeys([*modules.values, "mlp"]))
        return []
    if granularity is not None or line.last("recompute-activations") is not None:
        return [Option(option.given, "recompute-modules", ["core_attn", "mlp"])]
    return [
        Option(option.given, "recompute-granularity", ["selective"]),
        Option(option.given, "recompute-modules", ["mlp"]),
    ]


def _checkpoint_activations(line: CommandLine, option: Option) -> list[Option]:
    """The name of full recomputation in releases before 0.3; groups of one layer by default."""
    group = line.last("checkpoint-num-layers")
    line.options = [o for o in line.options if o.name != "checkpoint-num-layers"]
    values = {"granularity": "full", "method": "uniform"}
    if group is not None or line.last("recompute-num-layers") is None:
        values["num-layers"] = "1" if group is None else group.value
    line.remarks.append(
        f"{option.given}: the same as "
        + " ".join(f"--recompute-{name} {value}" for name, value in values.items())
    )
    return [Option(option.given, f"recompute-{name}", [value]) for name, value in values.items()]


MODEL_RULES: dict[str, Rule] = {
    "use-rotary-position-embeddings": _rotary,
    "no-position-embedding": _no_position_embedding,
    "rope-type": _rope_type,
    "enable-gpt-oss": _enable_gpt_oss,
    "retro-add-retriever": _retro_add_retriever,
    "spec": _spec,
    "hybrid-layer-pattern": _hybrid_pattern,
    "hybrid-override-pattern": _hybrid_pattern,
    "moe-router-pre-softmax": _pre_softmax,
    "moe-token-dispatcher-type": _dispatcher,
    "recompute-modules": _recompute_modules,
    "moe-layer-recompute": _moe_layer_recompute,
    "checkpoint-activations": _checkpoint_activations,
}
