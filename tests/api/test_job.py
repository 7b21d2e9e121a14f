"""A job goes from its reader to the server in one frame."""

from legato.api.job import AnswerOptions, End, Job, JobPrompt, Part, Warned, packed
from legato.api.openai.generate_body import GenerateTerms
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.token_ids import token_array
from legato.engine.process.channel import FrameDecoder, pack_frame

PIECE_BYTES = 2**18


def a_job(num_prompts: int, num_tokens: int) -> Job:
    prompts = [token_array(range(i, i + num_tokens)) for i in range(num_prompts)]
    offsets = token_array(range(2 * num_tokens))
    return Job(
        operation="generate",
        prompts=tuple(JobPrompt(token_ids, offsets) for token_ids in prompts),
        params=SamplingParams(n=2, max_tokens=5),
        service=ServiceParams(tenant="a"),
        answer=AnswerOptions(
            is_streamed=True, echoed=("é",) * num_prompts, field_names={"prompt": "token_ids"}
        ),
        terms=packed(GenerateTerms(request_id="r", output_mode="text")),
    )


def test_many_prompts_come_as_they_were_sent_beside_other_messages() -> None:
    """Nothing of a message may hold the decoder's buffer, which the next bytes are added to."""
    sent = [Warned("x has no effect", "x"), a_job(1024, 1000), Warned("last"), a_job(1, 1)]
    data = b"".join(map(pack_frame, sent))
    decoder = FrameDecoder(Part | End)
    received = [
        message
        for start in range(0, len(data), PIECE_BYTES)
        for message in decoder.feed(data[start : start + PIECE_BYTES])
    ]
    assert received == sent
    assert received[1].terms_as(GenerateTerms) == GenerateTerms(request_id="r", output_mode="text")


def test_a_job_counts_its_choices_and_tokens() -> None:
    job = a_job(3, 4)
    assert (job.num_choices, job.num_prompt_tokens, job.max_tokens) == (6, 12, 5)


def test_a_truncated_prompt_keeps_the_offsets_of_its_end() -> None:
    prompt = JobPrompt.of([7, 8], [(0, 1), (1, 3), (3, 4)])
    assert (list(prompt.token_ids), list(prompt.offsets or ())) == ([7, 8], [1, 3, 3, 4])
