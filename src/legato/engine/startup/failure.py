"""Why a process cannot start, in the words that its parent is told."""

import logging

from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.memory import describe_shortage, is_shortage
from legato.engine.process.messages import EngineFailed


def start_failure(error: Exception) -> EngineFailed:
    if isinstance(error, ConfigError | UnsupportedModelError):
        return EngineFailed(str(error), is_user_error=True)
    if is_shortage(error):
        return EngineFailed(describe_shortage(error), is_user_error=False)
    logging.error("the engine cannot start", exc_info=error)
    return EngineFailed(f"{type(error).__name__}: {error}", is_user_error=False)
