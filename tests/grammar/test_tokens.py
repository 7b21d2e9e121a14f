"""llguidance's tokens are the model's, by the bytes that outputs get."""

from legato.grammar.matcher import compile_grammar
from legato.grammar.tokens import grammar_tokenizer, small_tokenizer
from legato.language.tokenizer.tokenizer import Tokenizer


def test_each_token_has_its_bytes(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    exact = grammar_tokenizer(vocabulary)
    assert exact.vocab_size == vocabulary.num_ids + 1
    assert exact.eos_token == vocabulary.num_ids
    for token_id in range(vocabulary.num_ids):
        assert exact.is_special_token(token_id) == (token_id in vocabulary.special_token_ids)
        if token_id not in vocabulary.special_token_ids:
            assert exact.decode_bytes([token_id]) == vocabulary.token_bytes(token_id)


def test_a_small_one_spells_the_same(tokenizer: Tokenizer) -> None:
    small = small_tokenizer(tokenizer.vocabulary)
    matcher = compile_grammar(small, 'start: "abc" <|im_end|>').matcher
    letters = [tokenizer.encode(letter)[0] for letter in "abc"]
    assert matcher.try_consume_tokens([*letters, 2]) == 4
    assert matcher.is_accepting()


def test_texts_that_a_grammar_forces_have_tokens(tokenizer: Tokenizer) -> None:
    exact = grammar_tokenizer(tokenizer.vocabulary)
    forcing = '%llguidance {"no_forcing": false}\nstart: "forced text" /[0-9]/'
    forced = compile_grammar(exact, forcing).matcher.compute_ff_tokens()
    assert "forced text".startswith(tokenizer.decode(forced))
    assert forced
