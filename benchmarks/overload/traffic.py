"""What comes and when: chats, prompts and documents as text, at random and in bursts."""

import itertools
import json
import random
from pydoc_data import topics
from typing import Any

import msgspec

from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.language.tokenizer.tokenizer import load_tokenizer
from legato_lab.simulation.workload import WorkloadRequest

KINDS = {"chat": (5, 200), "prompt": (500, 2000), "document": (4000, 7000)}
"""Value the fewest and most tokens."""
_SHARES = (0.6, 0.3, 0.1)
_OUTPUT = (16, 400)
_MEAN_OUTPUT = 120


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        path, body: what is sent.
        leaves_after: tokens after which its client goes away; None where it stays to the end.
    """

    request: WorkloadRequest
    path: str
    body: bytes
    leaves_after: int | None


def kind_of(request: WorkloadRequest) -> str:
    """By the length of its prompt."""
    return next(kind for kind, (_, most) in KINDS.items() if request.num_prompt_tokens <= most)


def arrivals(
    *,
    seconds: float,
    rate_per_s: float,
    burst: int,
    burst_every_s: float,
    leaving: float,
    num_tenants: int,
    seed: int,
) -> list[Arrival]:
    """Requests in the order of their arrival: a Poisson process, and bursts beside it.

    Args:
        burst: requests that come at once.
        num_tenants: which take turns to send them; 1 names none.
        leaving: share of the clients that go away in the middle of their streams.
    """
    rng = random.Random(seed)
    texts = _Texts(rng)
    times_s = [k * burst_every_s for k in range(1, int(seconds / burst_every_s) + 1)] * burst
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        times_s.append(at_s)
        at_s += rng.expovariate(rate_per_s)
    names = [f"tenant-{i}" for i in range(num_tenants)] if num_tenants > 1 else [None]
    tenants = itertools.cycle(names)
    return [_arrival(rng, texts, at_s, leaving, next(tenants)) for at_s in sorted(times_s)]


def _arrival(
    rng: random.Random, texts: "_Texts", at_s: float, leaving: float, tenant: str | None
) -> Arrival:
    (kind,) = rng.choices(list(KINDS), _SHARES)
    num_prompt = rng.randint(*KINDS[kind])
    fewest, most = _OUTPUT
    num_output = min(most, fewest + int(rng.expovariate(1 / (_MEAN_OUTPUT - fewest))))
    text = texts.draw(num_prompt)
    asked = (
        {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
    )
    more: dict[str, Any] = {
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if tenant is not None:
        more["tenant"] = tenant
    return Arrival(
        request=WorkloadRequest(at_s, num_prompt, num_output, tenant=tenant),
        path="/v1/chat/completions" if kind == "chat" else "/v1/completions",
        body=json.dumps(asked | more).encode(),
        leaves_after=rng.randint(1, num_output // 2) if rng.random() < leaving else None,
    )


class _Texts:
    """Words of Python's help in an order of their own, so that no cache can help."""

    def __init__(self, rng: random.Random) -> None:
        words = " ".join(topics.topics.values()).split()
        rng.shuffle(words)
        self._rng = rng
        self._tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL))
        self._tokens = self._tokenizer.encode(" ".join(words))

    def draw(self, num_tokens: int) -> str:
        """About as many tokens, as the server counts them."""
        start = self._rng.randrange(len(self._tokens) - num_tokens)
        return self._tokenizer.decode(self._tokens[start : start + num_tokens])
