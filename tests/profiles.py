"""How much the tests try: in CI a little; with `make test-thorough` twenty times as much.

Both are profiles of hypothesis, and what has no examples, a soak or a fuzzer, follows them too.
"""

from typing import Any

from hypothesis import HealthCheck, settings

_PER_CENT = 100
_THOROUGH = 20


def register() -> None:
    """Make the profiles known, and take the default one."""
    # What takes long on a busy machine is no fault.
    timeless: dict[str, Any] = {
        "deadline": None,
        "suppress_health_check": [HealthCheck.too_slow],
    }
    settings.register_profile("default", max_examples=_PER_CENT, **timeless)
    settings.register_profile("thorough", max_examples=_THOROUGH * _PER_CENT, **timeless)
    settings.load_profile("default")


def scaled(count: int) -> int:
    """`count` in the default profile, and in another as many times more as that has examples."""
    return count * settings.default.max_examples // _PER_CENT


def examples(count: int, **more: Any) -> settings:
    """The profile's settings with `scaled(count)` examples.

    Args:
        more: other settings.
    """
    return settings(max_examples=scaled(count), **more)
