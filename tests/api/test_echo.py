"""Where the tokens of an echoed prompt begin, by tokenizers that change the prompt's text."""

import json
from typing import Any

import pytest

from legato.api.arrival import Arrival
from legato.api.job import AnswerOptions, Job, JobPrompt
from legato.api.openai.chunks import InChunks
from legato.api.openai.completion_answer import CompletionFormat
from legato.core.outputs import FinishReason, RequestOutput, TokenLogprobs, TokenScores
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.token_ids import token_array
from legato.language.completion import CompletionDelta
from tests.language.tokenizer_families import family


def _echoed(name: str, prompt: str, *, in_tokens: bool) -> dict[str, Any]:
    """The choice of a request for one token, the prompt's last one again."""
    tokenizer = family(name)
    token_ids = tokenizer.encode(prompt)
    echoed = tokenizer.decode(token_ids) if in_tokens else prompt
    starts = [] if in_tokens else tokenizer.starts(prompt)
    job = Job(
        operation="text_completion",
        prompts=(JobPrompt(token_array(token_ids)),),
        params=SamplingParams(logprobs=0, prompt_logprobs=0, max_tokens=1),
        service=ServiceParams(),
        answer=AnswerOptions(echoed=(echoed,), echo_starts=(token_array(starts),)),
    )
    answer = CompletionFormat(tokenizer.vocabulary, job, answer_id="a", model="m")
    whole = InChunks(answer, job, Arrival("r", "a", 0.0, {})).whole()
    last = token_ids[-1]
    scores = [TokenLogprobs(token_id, -1.0, 1, ()) for token_id in token_ids[1:]]
    whole.take(
        0,
        CompletionDelta(
            output=RequestOutput(
                request_id="r",
                new_token_ids=(last,),
                prompt_logprobs=TokenScores.of(scores) if scores else None,
            ),
            index=0,
            text=tokenizer.token_bytes(last).decode(),
            token_ids=(last,),
            logprobs=(TokenLogprobs(last, -1.0, 1, ()),),
            finish_reason=FinishReason.LENGTH,
            stop_reason=None,
            received_s=0.0,
        ),
    )
    choice: dict[str, Any] = json.loads(b"".join(whole.pieces()))["choices"][0]
    return choice


@pytest.mark.parametrize("in_tokens", [False, True])
@pytest.mark.parametrize(
    "name", ["smollm2", "llama2", "llama2 legacy", "llama3", "gemma", "normalized"]
)
def test_offsets_of_an_echo(name: str, *, in_tokens: bool) -> None:
    choice = _echoed(name, "The quick  dog user", in_tokens=in_tokens)
    logprobs = choice["logprobs"]
    offsets = [*logprobs["text_offset"], len(choice["text"])]
    for token, start, end in zip(logprobs["tokens"], offsets, offsets[1:], strict=False):
        shown = choice["text"][start:end]
        assert shown == token or (shown == token[1:] and start == 0)


@pytest.mark.parametrize("prompt", ["ﬁ ﬁ user", "a\u00a0ﬁ"])
def test_offsets_of_a_prompt_that_is_normalized(prompt: str) -> None:
    """By NFKC, which makes two letters of a ligature."""
    choice = _echoed("unigram", prompt, in_tokens=False)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] == len(prompt)
    assert choice["text"].startswith(prompt)
