"""The token ids for random prompts to a server."""

from legato.core.errors import ConfigError
from legato_lab.load.client import Client
from legato_lab.simulation.record import RefusedError, RequestError
from legato_lab.simulation.workload import LOWEST_TOKEN

MOST_TOKENS = 32_000
"""More ids change nothing, and with this bound runs on larger vocabularies have the same prompts.
"""


async def prompt_vocab_size(client: Client, wanted: int | None) -> int:
    """Return the bound below which token ids are valid in prompts.

    Args:
        wanted: None means `MOST_TOKENS`, or as many as the model has.

    Raises:
        ConfigError: the model has fewer than wanted, or takes no token ids.
        RefusedError: the server does not say, and is too busy for a trial.
    """
    told = client.model.vocab_size
    if told is None:
        return wanted or await vocab_size_by_trial(client, MOST_TOKENS)
    if wanted is not None and wanted > told:
        raise ConfigError(f"vocab_size {wanted}: {client.model.id} has {told} tokens only")
    return wanted or min(told, MOST_TOKENS)


async def vocab_size_by_trial(client: Client, most: int) -> int:
    """Try `most`, its half, its quarter ... and return the first that is valid.

    For servers that do not say. A server that refuses a token only checks it, so trying does no
    harm.

    Raises:
        ConfigError, RefusedError: as `prompt_vocab_size`.
    """
    vocab_size = most
    while True:
        try:
            await client.complete([vocab_size - 1], 1, [])
        except RefusedError:
            raise
        except RequestError as error:
            if vocab_size // 2 <= LOWEST_TOKEN:
                raise ConfigError(f"the server takes no token ids as a prompt: {error}") from error
            vocab_size //= 2
        else:
            return vocab_size
