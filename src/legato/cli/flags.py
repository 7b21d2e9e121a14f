"""The flags that several commands share.

Flags of the engine and of the server are made from the fields of their configurations. A flag's
destination is the name of its field. A flag that is not given leaves no trace in the namespace, so
that each default is written down once, at its field.
"""

import argparse
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from legato.api.config import ServerConfig
from legato.cli.values import (
    SLO_CLASS,
    byte_size,
    count_or_word,
    duration_s,
    filled,
    gap_bound,
    gap_promise,
    integer,
    lines_of,
    listed,
    number,
    slack,
    slo_class,
    weights,
)
from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, ModelConfig, engine_parts
from legato.core.config_fields import Config, Field, Kind, fields_of, written
from legato.core.errors import ConfigError
from legato.core.logs import LOG_FORMATS, LOG_LEVELS
from legato.core.sampling_params import SamplingParams


class AddItems(argparse.Action):
    """Adds a dict's items to those of earlier flags."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


class GapPromise(argparse.Action):
    """Sets a duration's field, that of its quantile, and one for the word auto if there is one."""

    def __init__(self, *args: Any, behind: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **{"type": gap_promise, **kwargs})
        self._dests = (self.dest, *behind)

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        for dest, value in zip(self._dests, values, strict=True):
            setattr(namespace, dest, value)


_BY_KIND: dict[Kind, dict[str, Any]] = {
    "switch": {"action": argparse.BooleanOptionalAction},
    "choice": {},
    "count": {"type": integer, "metavar": "N"},
    "number": {"type": number, "metavar": "X"},
    "duration": {"type": duration_s, "metavar": "TIME"},
    "size": {"type": byte_size, "metavar": "SIZE"},
    "text": {},
    "texts": {"type": listed, "action": "extend"},
    "names": {"nargs": "+", "action": "extend"},
    "classes": {"type": slo_class, "action": AddItems, "metavar": SLO_CLASS},
    "weights": {"type": weights, "action": AddItems},
    "count_or_word": {"type": count_or_word},
    "slack": {"type": slack, "metavar": "PERCENT|unbounded"},
}
"""argparse's settings for a kind of field, beside choices and description."""
_BOUND = re.compile(r"([<>]=?) (\S+)$")  # the end of msgspec's errors about a range
_RELATIONS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}

BRIEF = {
    "--host": "address to listen on; 0.0.0.0 for other machines",
    "--port": "port to listen on (8000)",
    "--api-key": "ask clients for this key",
    "--served-model-name": "the model's name in the API",
    "--max-model-len": "longest prompt plus output (the model's own)",
    "--quantization": "int8, int4, w8a8, w4a8, fp8 or gguf: smaller, faster",
    "--kv-cache-memory": "memory for cached tokens (1/4 of what is free)",
    "--max-num-seqs": "most requests running at once (64; 256 on a GPU)",
    "--num-threads": "threads of a CPU (one a core)",
    "--itl-slo": "longest gap between a stream's tokens, such as 100ms",
    "--config": "read flags from a YAML file",
    "--dry-run": "say what would happen here, and how fast; then end",
    "--device": "auto, cpu or cuda",
    "--kernels": "auto, amx, avx512, avx2, plain or torch",
    "--max-tokens": "most tokens to generate",
    "--temperature": "0 is greedy",
    "--seed": "makes the result reproducible",
    "--system": "what the model is told about its role",
    "--url": "a running server, such as http://127.0.0.1:8000",
    "--n": "completions of each prompt (1)",
}
"""Meaning of the flags that most people need, in the few words of a command's first screen."""

Groups = dict[str, argparse._ArgumentGroup]  # key: heading


def add_flags(
    parser: argparse.ArgumentParser, *configs: type[Config], only: Collection[str] = ()
) -> Groups:
    """Add the flags of configurations, under the headings that their fields name.

    Args:
        only: the names of the fields to add; empty means all.
    """
    fields = [field for config in configs for field in fields_of(config)]
    behind: dict[str, list[str]] = {}  # key the field whose flag sets them, too
    for field in fields:
        if field.flag.behind is not None:
            behind.setdefault(field.flag.behind, []).append(field.name)
    groups: Groups = {}
    alternatives: dict[str, argparse._ArgumentGroup] = {}  # key: `Flag.one_of`
    for field in fields:
        if field.flag.behind is not None or (only and field.name not in only):
            continue
        if field.group not in groups:
            groups[field.group] = parser.add_argument_group(
                field.group, argument_default=argparse.SUPPRESS
            )
        group, one_of = groups[field.group], field.flag.one_of
        if one_of is not None:
            if one_of not in alternatives:
                alternatives[one_of] = group.add_mutually_exclusive_group()
            group = alternatives[one_of]
        _add_flag(group, field, behind.get(field.name))
    return groups


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `engine_config`."""
    parser.set_defaults(loads_model=True)
    add_flags(parser, *engine_parts().values())


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the model as an argument without a flag, which `merge_model` reads."""
    parser.add_argument(
        "positional_model",
        type=filled,
        nargs="?",
        metavar="MODEL",
        help="the model; the same as --model",
    )


def merge_model(args: argparse.Namespace) -> None:
    """Take the positional model; raises `ConfigError` if --model names another."""
    if args.positional_model is None:
        return
    is_other = getattr(args, "model", args.positional_model) != args.positional_model
    if is_other and "model" not in getattr(args, "configured", ()):
        raise ConfigError(f"two models were named: {args.positional_model} and {args.model}")
    args.model = args.positional_model


def brief(*options: str) -> dict[str, str]:
    """Return the meaning of some flags, for `CommandParser.open_with`."""
    return {option: BRIEF[option] for option in options}


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for a file of flags, which `CommandParser` reads."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML, whose keys are flags' names, alone or below the headings of this list; flags "
        "on the command line go first",
    )


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `configure_logging`."""
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="%(default)s")
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="auto",
        help="%(default)s: coloured lines on a terminal, elsewhere text; json is an object a line",
    )


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model and the cache, without those of the scheduler."""
    add_flags(parser, ModelConfig, CacheConfig)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `server_config`. Its gaps are bounded, unless --itl-slo says otherwise."""
    parser.set_defaults(bounds_gaps=True)
    groups = add_flags(parser, ServerConfig)
    for dest in ("api_keys", "admin_api_keys"):
        groups["server"].add_argument(
            f"--{dest.removesuffix('s').replace('_', '-')}-file",
            dest=dest,
            type=lines_of,
            action="extend",
            metavar="FILE",
            help="the keys of a file, one a line, so that no list of processes shows them",
        )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `with_sampling_flags` reads."""
    group = parser.add_argument_group("sampling", argument_default=argparse.SUPPRESS)
    group.add_argument("--max-tokens", type=integer, metavar="N", help="most tokens to generate")
    group.add_argument("--temperature", type=number, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=number, metavar="P", help="keep this much probability")
    group.add_argument("--top-k", type=integer, metavar="K", help="keep the K most likely tokens")
    group.add_argument("--min-p", type=number, metavar="P", help="drop what is P times less likely")
    group.add_argument("--seed", type=integer, metavar="N", help="makes the result reproducible")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the output here; may be repeated"
    )


def given_fields(args: argparse.Namespace, config: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the given flags that are fields of `config`; key the field's name."""
    given = vars(args)
    return {name: given[name] for name in config.__struct_fields__ if name in given}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Make the engine's configuration from the parsed flags.

    Raises:
        ConfigError: a value is out of range.
    """
    given: dict[str, Any] = {}
    for config in engine_parts().values():
        given |= given_fields(args, config)
    return EngineConfig.of(**given)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Make the server's configuration from the parsed flags.

    Raises:
        ConfigError: a value is out of range.
    """
    return ServerConfig(**given_fields(args, ServerConfig))


def with_sampling_flags(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Replace defaults by the given flags.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    return msgspec.structs.replace(defaults, **given_fields(args, SamplingParams))


def _add_flag(group: argparse._ArgumentGroup, field: Field, behind: Sequence[str] | None) -> None:
    settings = dict(_BY_KIND[field.kind])
    if behind is not None:
        parse = gap_promise if len(behind) == 1 else gap_bound
        settings = {"action": GapPromise, "behind": behind, "type": parse}
    if field.kind in ("count", "number", "duration", "size"):
        settings["type"] = _in_range(field, settings["type"])
    elif field.kind == "text" and field.default != "" and not field.flag.may_be_empty:
        settings["type"] = filled
    elif field.kind == "choice":
        settings["choices"] = field.choices
    if field.flag.metavar is not None:
        settings["metavar"] = field.flag.metavar
    text = field.description.replace("%", "%%")  # argparse formats the text
    group.add_argument(field.option, dest=field.name, help=text, **settings)


def _in_range(field: Field, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that names the bound in the flag's unit, and not the field's."""

    def parse_in_range(text: str) -> Any:
        parsed = parse(text)
        value = parsed[0] if isinstance(parsed, tuple) else parsed  # as `GapPromise`
        try:
            msgspec.convert(value, field.annotation)
        except msgspec.ValidationError as error:
            if (bound := _BOUND.search(str(error))) is None:
                raise argparse.ArgumentTypeError(str(error)) from None
            limit = written(field.kind, type(value)(bound[2]))
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {_RELATIONS[bound[1]]} {limit}"
            ) from None
        return parsed

    return parse_in_range
