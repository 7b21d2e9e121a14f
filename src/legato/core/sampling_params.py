"""How to choose a request's tokens and when to stop. Names and meanings are vLLM's."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from legato.core.errors import InvalidRequestError
from legato.core.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
"""Tokens beside the sampled one: `logprobs`, `top_logprobs` and `prompt_logprobs`."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Entries of `logprob_token_ids`."""
MAX_LOGIT_BIAS = 1024
"""Entries of `logit_bias`."""
MAX_STOP = 64
"""Strings in `stop`, and tokens in `stop_token_ids`."""
MAX_STOP_CHARS = 4096
"""Characters of all strings in `stop` together."""
MAX_ALLOWED_TOKEN_IDS = 2**14
"""Entries of `allowed_token_ids`: more would take the engine a millisecond to receive."""
MAX_BAD_WORDS = 1024
"""Entries of `bad_words`."""
MAX_BAD_WORDS_CHARS = 2**14
"""Characters of all `bad_words` together; all `bad_words_token_ids` have at most twice as many
tokens."""
MAX_N = 128
"""Completions of one prompt: `n`."""
MAX_REPETITION_PENALTY = 100.0
"""Above this, or below its inverse, logits leave the range of float32 and spoil the step."""
SEED_LIMIT = 2**63
"""Exclusive upper bound of `seed`; its negative is the lower bound."""
TOP_K_LIMIT = 2**31
"""Exclusive upper bound of `top_k`."""


class Filters(NamedTuple):
    """Which tokens may be drawn; each reader unpacks all, as of `Draw`."""

    top_p: float
    top_k: int
    min_p: float


class Draw(NamedTuple):
    """How a token is drawn from adjusted logits: fields of `SamplingParams`.

    Each sampler unpacks all of them, so that a new one fails at the first token of a sampler that
    does not read it yet.
    """

    temperature: float
    filters: Filters
    seed: int | None


STAGES: Mapping[str, tuple[str, ...]] = {
    # The front end resolves them; the engine gets a request without.
    "prompt": ("n", "truncate_prompt_tokens", "bad_words"),
    # `legato.executor.adjustments`, for logits on every device.
    "logits": (
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "allowed_token_ids", "bad_words_token_ids", "min_tokens"),
        "structured_outputs",
    ),
    # `SamplingParams.draw`, which the samplers of CPUs and GPUs unpack.
    "draw": ("temperature", *Filters._fields, "seed"),
    # The executors, for tokens that are known already.
    "scores": ("logprobs", "logprob_token_ids", "prompt_logprobs"),
    # The scheduler; min_tokens, too.
    "end": ("max_tokens", "stop_token_ids", "ignore_eos", "thinking_limit"),
    # The front end's text of the output.
    "text": (
        *("stop", "include_stop_str_in_output"),
        *("skip_special_tokens", "kept_special_tokens"),
    ),
}
"""Key a stage that may change an answer; value the fields of `SamplingParams` that it reads. A
field stands at its first stage after the prompt."""


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer over all floats
        return False


_PENALTIES = f"[{1 / MAX_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]"
_MIN_TOKENS = "must be between 0 and max_tokens"
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", lambda n: 1 <= n <= MAX_N, f"must be between 1 and {MAX_N}"),
    ("temperature", lambda t: t >= 0.0 and _is_finite(t), "must be a finite number of at least 0"),
    ("top_p", lambda share: 0.0 < share <= 1.0, "must be in (0, 1]"),
    (
        "top_k",
        lambda k: -1 <= k < TOP_K_LIMIT,
        "must be -1, 0 (both: off) or at least 1, and below 2**31",
    ),
    ("min_p", lambda share: 0.0 <= share <= 1.0, "must be in [0, 1]"),
    ("seed", lambda n: n is None or -SEED_LIMIT <= n < SEED_LIMIT, "must fit in 64 bits"),
    (
        "repetition_penalty",
        lambda factor: 1 / MAX_REPETITION_PENALTY <= factor <= MAX_REPETITION_PENALTY,
        f"must be in {_PENALTIES}",
    ),
    ("presence_penalty", lambda bias: -2.0 <= bias <= 2.0, "must be in [-2, 2]"),
    ("frequency_penalty", lambda bias: -2.0 <= bias <= 2.0, "must be in [-2, 2]"),
    ("allowed_token_ids", lambda ids: ids is None or bool(ids), "must not be empty"),
    ("bad_words", lambda words: all(map(str.strip, words)), "must not contain an empty word"),
    ("bad_words_token_ids", all, "must not contain an empty word"),
    ("max_tokens", lambda n: n is None or 1 <= n < 2**63, "must be at least 1, and fit in 64 bits"),
    ("min_tokens", lambda count: count >= 0, _MIN_TOKENS),
    ("stop", all, "must not contain an empty string"),
    ("truncate_prompt_tokens", lambda n: n in (None, -1) or n >= 1, "must be -1 or at least 1"),
    *(
        (
            name,
            lambda n: n is None or 0 <= n <= MAX_LOGPROBS,
            f"must be between 0 and {MAX_LOGPROBS}",
        )
        for name in ("logprobs", "prompt_logprobs")
    ),
)
"""Names of fields, what holds of their values, and the words for that."""
_MOST_ENTRIES = {
    "logit_bias": MAX_LOGIT_BIAS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "stop": MAX_STOP,
    "stop_token_ids": MAX_STOP,
    "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
}
_MOST_CHARS = {"bad_words": MAX_BAD_WORDS_CHARS, "stop": MAX_STOP_CHARS}


class ThinkingLimit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many tokens a request may think, by the marks of its model's family.

    Tokens between the marks count, over all thoughts of the output; the marks themselves do not.

    Attributes:
        budget: most tokens of thinking; None only counts them.
        begins: the sequences of tokens that begin a thought.
        ends: each of these tokens ends a thought.
        forced: tokens that end the first thought at the budget; all but the first `num_said` are
            marks and what follows them.
        num_said: the tokens at the start of `forced` that are thinking, too, and count.
        forced_again: the same for later thoughts, without words.
        breaks: tokens with a line break: close to the budget, a thought ends at one of them.
        calls: first and last token of a section of tool calls, in which no thought begins.
        is_open: whether the prompt ends within a thought.
    """

    budget: int | None = None
    begins: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    forced: tuple[int, ...] = ()
    num_said: int = 0
    forced_again: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()
    calls: tuple[int, int] | None = None
    is_open: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings of one request; validated on construction.

    Attributes:
        n: completions to return for the prompt, in [1, 128].
        temperature: softmax temperature; 0 is greedy.
        top_p: keep the fewest most likely tokens whose probability reaches this, in (0, 1].
        top_k: keep this many most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt
            or the output (Keskar et al., 2019, arXiv:1909.05858), in [0.01, 100].
        presence_penalty: subtracted once from the logit of each token in the output, in [-2, 2].
        frequency_penalty: subtracted per occurrence in the output, in [-2, 2].
        logit_bias: added to the logits; key token id, value bias in [-100, 100].
        allowed_token_ids: no other tokens are sampled, at most 16384; None allows all.
        bad_words: forbidden words, at most 1024: a word's last token is not sampled after its
            other tokens, with and without a space in front; other tokens that spell it may come.
        bad_words_token_ids: forbidden words as tokens; the front end adds those of `bad_words`.
        seed: of the random numbers, which no batch changes; other batches may round logits
            otherwise.
        max_tokens: most tokens to generate; None means up to the model's context.
        min_tokens: end-of-sequence and stop tokens are not sampled before this many.
        stop: strings that end the output, at most 64.
        stop_token_ids: token ids that end the output, at most 64.
        include_stop_str_in_output: keep the stop string that ended the output in the text.
        ignore_eos: go on past the end-of-sequence token.
        truncate_prompt_tokens: keep this many of the prompt's last tokens, at least 1; -1 keeps as
            many as fit into the context beside `max_tokens`.
        logprobs: return the log probabilities of this many most likely tokens beside the sampled
            one, in [0, 20].
        logprob_token_ids: return the log probabilities of these tokens, at most 128, and of the
            sampled one, instead of the most likely ones; with `logprobs` only.
        prompt_logprobs: the same for each prompt token but the first, in [0, 20].
        skip_special_tokens: leave special tokens out of the text.
        kept_special_tokens: ids of special tokens that stay in the text even so.
        structured_outputs: the form that the output must have.
        thinking_limit: how many tokens may be thinking; the front end makes it of a chat's budget.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[int, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    thinking_limit: ThinkingLimit | None = None

    def __post_init__(self) -> None:
        # As in vLLM, these may be a list or None, and the first two also a single value.
        for name in ("stop", "stop_token_ids", "bad_words"):
            msgspec.structs.force_setattr(self, name, _as_tuple(getattr(self, name)))
        words = tuple(map(tuple, self.bad_words_token_ids or ()))
        msgspec.structs.force_setattr(self, "bad_words_token_ids", words)
        if self.allowed_token_ids is not None:
            allowed = tuple(dict.fromkeys(self.allowed_token_ids))
            msgspec.structs.force_setattr(self, "allowed_token_ids", allowed)
        if self.logprob_token_ids is not None:
            listed = tuple(dict.fromkeys(self.logprob_token_ids)) or None
            msgspec.structs.force_setattr(self, "logprob_token_ids", listed)
        self._check()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def draw(self) -> Draw:
        return Draw(self.temperature, Filters(self.top_p, self.top_k, self.min_p), self.seed)

    @property
    def may_adjust_logits(self) -> bool:
        """Whether logits may be changed before temperature and filters apply."""
        return any(getattr(self, name) not in (default, {}) for name, default in _ADJUSTING)

    @property
    def needs_values(self) -> bool:
        """Whether sampling a token needs the values of all earlier tokens on the host."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.bad_words_token_ids)
            or self.logprobs is not None
            or self.prompt_logprobs is not None
            or self.structured_outputs is not None
        )

    @property
    def num_shown_logprobs(self) -> int | None:
        """Tokens beside the sampled one whose log probabilities are returned; None for none."""
        if self.logprobs is None or self.logprob_token_ids is None:
            return self.logprobs
        return len(self.logprob_token_ids) + 1  # the sampled one is among them

    def _check(self) -> None:
        for name, limit in _MOST_ENTRIES.items():  # first: the errors of values list the entries
            _require_at_most(limit, name, len(getattr(self, name) or ()))
        num_tokens = sum(map(len, self.bad_words_token_ids))
        _require_at_most(2 * MAX_BAD_WORDS_CHARS, "bad_words_token_ids", num_tokens, "tokens")
        for name, limit in _MOST_CHARS.items():
            num_chars = sum(map(len, getattr(self, name)))
            _require_at_most(limit, name, num_chars, "characters")
        for name, holds, rule in _RULES:
            value = getattr(self, name)
            _require(holds(value), name, rule, value)
        for value in (self.logit_bias or {}).values():
            _require(-100.0 <= value <= 100.0, "logit_bias", "values must be in [-100, 100]", value)
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            *("min_tokens", _MIN_TOKENS, self.min_tokens),
        )
        ids, has_logprobs = self.logprob_token_ids, self.logprobs is not None
        _require(not ids or has_logprobs, "logprob_token_ids", "goes with logprobs only", ids)


def check_stages(names: Iterable[str]) -> None:
    """Raise `TypeError` unless each field of `SamplingParams` stands in one stage."""
    placed = sorted(name for stage in STAGES.values() for name in stage)
    if wrong := set(placed).symmetric_difference(names):
        raise TypeError(f"STAGES does not say what reads {', '.join(sorted(wrong))}")
    assert len(placed) == len(set(placed)), "a field stands in two stages"


check_stages(SamplingParams.__struct_fields__)
_ADJUSTING = [
    (field.name, field.default)
    for field in msgspec.structs.fields(SamplingParams)
    if field.name in STAGES["logits"]
]
"""Fields that change logits, with their defaults."""


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str | int) else tuple(value)


def _require(condition: bool, param: str, rule: str, value: object) -> None:
    if not condition:
        raise InvalidRequestError(f"{param} {rule}, got {value!r}", param=param)


def _require_at_most(limit: int, param: str, number: int, unit: str = "entries") -> None:
    _require(number <= limit, param, f"has over {limit} {unit}", number)
