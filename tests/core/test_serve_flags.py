"""Flags that are printed make the configuration that they are of."""

import argparse
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.cli.flags import add_engine_flags, add_server_flags, engine_config
from legato.core.config import EngineConfig, engine_fields
from legato.core.config_fields import Field
from legato.core.errors import ConfigError
from legato.core.ranges import LEAST_S, MOST_S
from legato.core.serve_flags import command_line, serve_flags
from legato.core.slo import LEAST_QUANTILE, MOST_QUANTILE, SloClass
from tests.profiles import examples

_FIELDS = {field.name: field for field in engine_fields()}
_NEEDS: dict[str, dict[str, Any]] = {
    "shed_load": {"ttft_slo_s": 2.5},
    "itl_slo_quantile": {"itl_slo_s": 0.5},
}
"""Key a field's name, value what it makes no sense without."""

_seconds = st.floats(LEAST_S, MOST_S)
_promise = st.none() | _seconds
_quantiles = st.floats(LEAST_QUANTILE, MOST_QUANTILE)
_classes = st.builds(SloClass, itl_s=_promise, tpot_s=_promise, ttft_s=_promise) | st.builds(
    SloClass, itl_s=_seconds, itl_quantile=_quantiles
)


_NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,63}", fullmatch=True)
_ADDRESSES = st.integers(1, 65_535).map("127.0.0.1:{}".format)
_COUNTS = st.integers(1, 2) | st.integers(1, 2**62)
_OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    "switch": st.booleans(),
    "count": _COUNTS,
    "size": _COUNTS,
    "duration": _seconds,
    "slack": st.floats(0.0, 10.0) | st.just(math.inf),
    # A blank text is a shell's unset variable, and argparse drops "--".
    "text": st.text().filter(lambda text: text.strip() not in ("", "--")),
    "texts": st.lists(_ADDRESSES, min_size=1, max_size=3).map(tuple),
    "weights": st.dictionaries(_NAMES, st.floats(0.001, 1000.0), max_size=3),
    "classes": st.dictionaries(st.text(min_size=1), _classes, max_size=3),
}


_SERVED = EngineConfig.of(bounds_gaps=True)
"""What `legato serve` runs without flags."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    add_server_flags(parser)
    return parser


def _values(field: Field) -> st.SearchStrategy[Any]:
    """Of the field's type; few are out of its range."""
    match field.kind:
        case "choice":
            return st.sampled_from(field.choices)
        case "number":
            return _quantiles if field.flag.behind else st.floats(0.0, 1.0)
        case "count_or_word":
            return st.integers(1, 64) | st.sampled_from(field.choices)
    return _OF_KIND[field.kind]


def _go_together(settings: dict[str, Any]) -> bool:
    try:
        EngineConfig.of(**settings)
    except ConfigError:
        return False
    return True


@st.composite
def _configs(draw: st.DrawFn, name: str) -> EngineConfig:
    """Settings with this field other than by default, and with the fields that it needs."""
    needed = _NEEDS.get(name, {})
    values = _values(_FIELDS[name]).filter(lambda value: value != _FIELDS[name].default)
    value = draw(values.filter(lambda value: _go_together({name: value, **needed})))
    settings = {name: value, **needed}
    others = sorted(_FIELDS.keys() - settings.keys())
    for other in draw(st.lists(st.sampled_from(others), unique=True)):
        more = {**settings, other: draw(_values(_FIELDS[other]))}
        if _go_together(more):
            settings = more
    return EngineConfig.of(**settings)


@pytest.mark.parametrize("name", _FIELDS)
@examples(30)
@given(data=st.data())
def test_flags_make_the_configuration_again(name: str, data: st.DataObject) -> None:
    config = data.draw(_configs(name))
    flags = serve_flags(config)
    assert bool(flags) is (config != _SERVED)
    assert engine_config(_parser().parse_args(flags)) == config


def test_flags_are_as_one_would_type_them() -> None:
    config = EngineConfig.of(
        kv_cache_memory_bytes=3 * 2**29,
        itl_slo_s=0.1145,
        itl_slo_quantile=0.999,
        ttft_slo_s=90.0,
        slo_classes={"gold": SloClass(itl_s=0.05, ttft_s=1.5), "rest": SloClass()},
        enable_prefix_caching=False,
    )
    assert command_line(serve_flags(config)) == (
        "legato serve --kv-cache-memory 1536M --no-enable-prefix-caching --itl-slo 114.5ms:p99.9 "
        "--ttft-slo 90s --slo-class gold:itl=50ms,ttft=1.5s --slo-class rest:"
    )


def test_gaps_that_nothing_bounds_are_said() -> None:
    """Seen: `--itl-slo off` was lost, and the printed command bounded gaps."""
    assert serve_flags(EngineConfig()) == ["--itl-slo", "off"]
    assert serve_flags(EngineConfig.of(tpot_slo_s=0.05)) == [
        *("--itl-slo", "off", "--tpot-slo", "50ms")
    ]


def test_what_is_by_default_is_not_said() -> None:
    assert engine_config(_parser().parse_args([])) == _SERVED
    assert serve_flags(_SERVED) == []
    assert command_line(["--model", "a b"]) == "legato serve --model 'a b'"
