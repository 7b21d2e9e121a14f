"""With drafts, several tokens come at once, and answers are what they are without."""

import json
from itertools import accumulate, cycle
from typing import Any

import pytest

from tests.api.launch import ServerProcess
from tests.api.servers import DRAFTING, Servers

SENTENCE = (
    "The old clock in the hall struck nine, and nobody in the house, "
    "not even the grey cat below the stairs, took any notice of it. "
)
PROMPT = 4 * SENTENCE
STOPS = ("struck nine", "hall", "in the house, not", "grey cat be", "notice of it. The", ", and")


class Streamed:
    """An answer, put together from its chunks.

    Attributes:
        counts: tokens of each chunk.
        told: the usage so far, as each chunk had it.
    """

    def __init__(self, chunks: list[dict[str, Any]]) -> None:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        self.text = "".join(choice["text"] for choice in choices)
        self.token_ids = [token for choice in choices for token in choice["token_ids"]]
        self.counts = [len(choice["token_ids"]) for choice in choices]
        self.told = [c["usage"]["completion_tokens"] for c in chunks if c["choices"]]
        self.usage = chunks[-1]["usage"]
        self.ends = [choices[-1]["finish_reason"], choices[-1]["stop_reason"]]
        self.logprobs: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "text_offset": [],
        }
        for choice in choices:
            assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
            for name, values in self.logprobs.items():
                values += choice["logprobs"][name]


@pytest.fixture(scope="module")
def drafting(servers: Servers) -> ServerProcess:
    return servers.get(*DRAFTING)


@pytest.fixture(scope="module")
def plain(server: ServerProcess) -> ServerProcess:
    """Without drafts, and else the same."""
    return server


def streamed(server: ServerProcess, **fields: Any) -> Streamed:
    asked = {
        "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "logprobs": 2, "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **fields,
    }  # fmt: skip
    with server.http.stream("POST", "/v1/completions", json=asked) as response:
        response.raise_for_status()
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return Streamed([json.loads(line.removeprefix("data: ")) for line in lines])


def assert_same(one: Streamed, other: Streamed) -> None:
    assert (one.text, one.token_ids, one.ends) == (other.text, other.token_ids, other.ends)
    for name in ("tokens", "text_offset"):
        assert one.logprobs[name] == other.logprobs[name]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert one.usage[name] == other.usage[name]
    values = one.logprobs["token_logprobs"], other.logprobs["token_logprobs"]
    assert values[0] == pytest.approx(values[1], abs=1e-3)
    for answer in (one, other):
        assert answer.told == list(accumulate(answer.counts))
        assert answer.usage["completion_tokens"] == len(answer.token_ids)


def test_a_stream_brings_the_same_in_fewer_pieces(
    drafting: ServerProcess, plain: ServerProcess
) -> None:
    fast, slow = streamed(drafting), streamed(plain)
    assert_same(fast, slow)
    assert set(slow.counts) == {1}
    assert max(fast.counts) > 4
    assert fast.counts[0] == 1, "the prompt's own"


@pytest.mark.parametrize(
    ("stop", "include_stop_str_in_output"), list(zip(STOPS, cycle([False, True]), strict=False))
)
def test_a_stop_string_ends_it_at_the_same_token(
    drafting: ServerProcess, plain: ServerProcess, stop: str, include_stop_str_in_output: bool
) -> None:
    """In the middle of what comes at once, or across two of these."""
    before = drafting.metric("generation_tokens_total")
    fields = {"stop": [stop], "include_stop_str_in_output": include_stop_str_in_output}
    fast, slow = streamed(drafting, **fields), streamed(plain, **fields)
    assert slow.ends == ["stop", stop]
    assert_same(fast, slow)
    assert drafting.metric("generation_tokens_total") - before == len(fast.token_ids)


def test_a_stop_token_ends_it_at_the_same_token(
    drafting: ServerProcess, plain: ServerProcess
) -> None:
    whole = streamed(plain).token_ids
    token_id = next(token for token in whole[9:] if token not in whole[:9])
    fast, slow = (streamed(server, stop_token_ids=[token_id]) for server in (drafting, plain))
    assert slow.ends == ["stop", token_id]
    assert_same(fast, slow)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chat_has_the_same_log_probabilities(
    drafting: ServerProcess, plain: ServerProcess, is_streamed: bool
) -> None:
    asked = {
        "messages": [{"role": "user", "content": f"Say this again: {PROMPT}"}],
        "max_tokens": 40, "temperature": 0, "logprobs": True, "top_logprobs": 1,
        "stop": ["any notice"], "stream": is_streamed,
    }  # fmt: skip
    tokens = []
    for server in (drafting, plain):
        response = server.http.post("/v1/chat/completions", json=asked)
        if is_streamed:
            lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
            choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        else:
            choices = response.json()["choices"]
        entries = [e for c in choices if c.get("logprobs") for e in c["logprobs"]["content"]]
        tokens.append([entry["token"] for entry in entries])
    assert tokens[0] == tokens[1]
    assert tokens[0]


def test_drafts_are_shown(drafting: ServerProcess, plain: ServerProcess) -> None:
    accepted = drafting.metric("spec_decode_num_accepted_tokens_total")
    drafted = plain.metric("spec_decode_num_draft_tokens_total")
    streamed(drafting)
    streamed(plain, max_tokens=8)
    assert drafting.metric("spec_decode_num_accepted_tokens_total") > accepted
    assert plain.metric("spec_decode_num_draft_tokens_total") == drafted
