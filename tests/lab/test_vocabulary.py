"""Which token ids prompts may hold, on a real server."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from legato.core.errors import ConfigError
from legato_lab.load.client import Address, Client, connect
from legato_lab.load.vocabulary import prompt_vocab_size, vocab_size_by_trial

VOCAB_SIZE = 49_152


def ask(address: Address, question: Callable[[Client], Awaitable[int]]) -> int:
    async def run() -> int:
        async with connect(address) as client:
            return await question(client)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("wanted", "taken"), [(None, 32_000), (2000, 2000), (VOCAB_SIZE, VOCAB_SIZE)]
)
def test_a_server_that_tells_is_believed(address: Address, wanted: int | None, taken: int) -> None:
    assert ask(address, lambda client: prompt_vocab_size(client, wanted)) == taken
    with pytest.raises(ConfigError, match="has 49152 tokens only"):
        ask(address, lambda client: prompt_vocab_size(client, VOCAB_SIZE + 1))


@pytest.mark.parametrize(
    ("most", "taken"), [(VOCAB_SIZE, VOCAB_SIZE), (VOCAB_SIZE + 1, 24_576), (10**6, 31_250)]
)
def test_a_server_that_does_not_tell_is_tried(address: Address, most: int, taken: int) -> None:
    assert ask(address, lambda client: vocab_size_by_trial(client, most)) == taken


def test_a_server_that_takes_no_tokens(address: Address) -> None:
    async def with_another_model(client: Client) -> int:
        client.model = type(client.model)("no-such-model")
        return await prompt_vocab_size(client, None)

    with pytest.raises(ConfigError, match="takes no token ids as a prompt: 404"):
        ask(address, with_another_model)
