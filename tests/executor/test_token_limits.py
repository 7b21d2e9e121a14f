"""No output has a bad word or a token that is not allowed; else it is what it would have been."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from legato.executor.sampler import NO_TOKEN, sample
from tests.executor.sampling_reference import forbidden, make_row
from tests.profiles import examples

VOCAB_SIZE = 6
NUM_TOKENS = 40

tokens = st.integers(0, VOCAB_SIZE - 1)
words = st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=8).map(tuple)
alphabets = st.none() | st.lists(tokens, min_size=2, max_size=VOCAB_SIZE).map(tuple)


@given(words, alphabets, st.integers(0, 2**16), st.sampled_from([0.0, 1.0, 2.0]))
@examples(60)
def test_only_what_is_forbidden_comes_otherwise(
    bad: tuple[tuple[int, ...], ...],
    allowed: tuple[int, ...] | None,
    seed: int,
    temperature: float,
) -> None:
    """Of a model whose next token depends on the last two, so that words come up again."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.randn(VOCAB_SIZE + 1, VOCAB_SIZE + 1, VOCAB_SIZE, generator=generator)
    output = [VOCAB_SIZE, VOCAB_SIZE]  # no token, twice: as if behind a prompt
    for _ in range(NUM_TOKENS):
        logits = model[output[-2], output[-1]][None]
        so_far = tuple(output[2:])
        row = make_row(
            output=so_far,
            seed=seed,
            temperature=temperature,
            bad_words_token_ids=bad,
            allowed_token_ids=allowed,
        )
        token = sample(logits, [row]).item()
        barred = {*forbidden(row.params, [*so_far], VOCAB_SIZE)}
        if token == NO_TOKEN:
            assert len(barred) == VOCAB_SIZE
            break
        free = sample(logits, [make_row(output=so_far, seed=seed, temperature=temperature)]).item()
        if not barred or (temperature == 0.0 and free not in barred):
            assert token == free
        output.append(int(token))
    text = "".join(map(str, output[2:]))
    assume(text)
    assert not any("".join(map(str, word)) in text for word in bad)
    assert allowed is None or {*text} <= {*map(str, allowed)}
