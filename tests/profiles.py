"""How much the tests try: in CI a little; with `make test-thorough` eighty times as many examples.

Both are profiles of hypothesis, and soaks and fuzzers follow them: thorough ones are forty times as
long.
"""

from typing import Any

from hypothesis import HealthCheck, settings

_DEFAULT = 25
_THOROUGH = 2000
_THOROUGH_SOAK = 40
_PER_CENT = 100
_FEWEST = 10
"""The default profile makes no fewer examples of a test, unless the test needs fewer."""


def register() -> None:
    """Make the profiles known, and take the default one."""
    # What takes long on a busy machine is no fault.
    timeless: dict[str, Any] = {
        "deadline": None,
        "suppress_health_check": [HealthCheck.too_slow],
    }
    settings.register_profile("default", max_examples=_DEFAULT, **timeless)
    settings.register_profile("thorough", max_examples=_THOROUGH, **timeless)
    settings.load_profile("default")


def scaled(count: int) -> int:
    """`count` in the default profile, and forty times as many in the thorough one."""
    return count if settings.default.max_examples == _DEFAULT else count * _THOROUGH_SOAK


def examples(count: int, **more: Any) -> settings:
    """Settings of a test that needs `count` examples where another needs 100.

    The default profile makes a quarter of them: at least ten, or all where `count` is less.

    Args:
        more: other settings.
    """
    made = count * settings.default.max_examples // _PER_CENT
    return settings(max_examples=max(made, min(count, _FEWEST)), **more)
