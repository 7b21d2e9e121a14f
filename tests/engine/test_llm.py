"""The Python API on the real model."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from legato import LLM, SamplingParams, StructuredOutputs
from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason
from legato.engine.errors import RequestFailedError
from legato.language.conversation.template import ConversationOptions
from legato.language.tokenizer.tokenizer import Tokenizer
from legato.llm.prompts import PromptReader
from tests.exact import EXACT_MODEL

EXACT: dict[str, Any] = {**EXACT_MODEL, "num_threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**EXACT, kv_cache_memory_bytes=2**28, max_model_len=2048)


def test_texts_and_tokens_are_the_same_prompt(llm: LLM) -> None:
    text, tokens = llm.generate(
        ["The sky is", {"prompt_token_ids": [504, 6376, 314]}], GREEDY, use_tqdm=False
    )
    assert text.prompt == "The sky is"
    assert text.prompt_token_ids == tokens.prompt_token_ids
    assert tokens.prompt is None
    assert text.outputs[0].text == tokens.outputs[0].text != ""


def test_one_conversation_or_several(llm: LLM) -> None:
    (one,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
    assert one.outputs[0].text == "The capital of France is Paris."
    assert one.outputs[0].finish_reason is FinishReason.STOP
    several = llm.chat([QUESTION, QUESTION], GREEDY, use_tqdm=False)
    assert [g.outputs[0].text for g in several] == [one.outputs[0].text] * 2


def test_settings_may_differ_by_prompt(llm: LLM) -> None:
    params = [
        GREEDY,
        SamplingParams(n=3, seed=1, max_tokens=5, logprobs=1),
        SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0.0),
    ]
    first, second, third = llm.generate(["One two three four"] * 3, params, use_tqdm=False)
    assert len(first.outputs) == len(third.outputs) == 1
    assert len({tuple(output.token_ids) for output in second.outputs}) == 3
    for output in second.outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert output.cumulative_logprob == pytest.approx(sum(e.logprob for e in output.logprobs))
    scored = third.outputs[0].prompt_logprobs
    assert scored is not None
    assert [entry.token_id for entry in scored] == third.prompt_token_ids[1:]
    assert all(len(entry.top) == 2 for entry in scored)


def test_prompt_logprobs_do_not_depend_on_chunks(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    prompt: Any = {"prompt_token_ids": list(range(1000, 1100))}
    small_chunks = LLM(
        **EXACT,
        kv_cache_memory_bytes=2**28,
        max_model_len=512,
        max_num_batched_tokens=7,
    )
    entries = []
    for one in (small_chunks, llm):
        scored = one.generate([prompt], params, use_tqdm=False)[0].outputs[0].prompt_logprobs
        assert scored is not None
        entries.append(scored)
    for small, large in zip(*entries, strict=True):
        assert small.token_id == large.token_id
        assert small.logprob == pytest.approx(large.logprob, abs=1e-3)


def test_prompt_logprobs_come_once_despite_preemption() -> None:
    """The cache holds all prompts, but not their outputs."""
    num_prompts, prompt_len, block_size = 6, 40, 4
    num_blocks = num_prompts * prompt_len // block_size + num_prompts
    bytes_per_token = 2 * 30 * 3 * 64 * 2
    llm = LLM(
        block_size=block_size,
        kv_cache_memory_bytes=num_blocks * block_size * bytes_per_token,
        max_model_len=100,
        admission_optimism=1.0,
    )
    prompts = [
        {"prompt_token_ids": list(range(1000 * i, 1000 * i + prompt_len))}
        for i in range(num_prompts)
    ]
    params = SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=0)
    generations = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert llm.stats.num_preemptions > 0
    for generation in generations:
        scored = generation.outputs[0].prompt_logprobs
        assert scored is not None
        assert [entry.token_id for entry in scored] == generation.prompt_token_ids[1:]
        assert len(generation.outputs[0].token_ids) == params.max_tokens


def test_what_is_to_be_scored_is_not_taken_from_the_cache(llm: LLM) -> None:
    """The same prompt a second time, while and after it is computed for others."""
    prompt: Any = {"prompt_token_ids": list(range(2000, 2200))}
    plain, scoring = GREEDY, SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0)
    generations = llm.generate([prompt] * 3, [plain, scoring, plain], use_tqdm=False)
    generations += llm.generate([prompt] * 2, [scoring, plain], use_tqdm=False)
    for generation in generations:
        assert generation.outputs[0].token_ids == generations[0].outputs[0].token_ids
    for scored in (generations[1], generations[3]):
        entries = scored.outputs[0].prompt_logprobs
        assert entries is not None
        assert [entry.token_id for entry in entries] == scored.prompt_token_ids[1:]
    assert [g.outputs[0].num_cached_tokens for g in generations] == [0, 0, 192, 0, 192]


def test_a_salt_keeps_prompts_apart(llm: LLM) -> None:
    prompt: Any = {"prompt_token_ids": list(range(6000, 6100))}
    salted: Any = {**prompt, "cache_salt": "a"}
    asked = [prompt, salted, salted, prompt]
    generations = llm.generate(asked, GREEDY, use_tqdm=False)
    assert [g.outputs[0].num_cached_tokens for g in generations] == [0, 0, 96, 96]


def test_penalties_count_what_was_cached(llm: LLM) -> None:
    """A repetition penalty looks at the whole prompt, computed or not."""
    params = SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.5, seed=3)
    prompt: Any = {"prompt_token_ids": [*range(3000, 3100), *range(3000, 3040)]}
    cold, warm = (llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for _ in range(2))
    assert warm.num_cached_tokens == 128
    assert warm.token_ids == cold.token_ids


def test_a_warm_hit_reads_what_was_written_in_the_models_own_dtype() -> None:
    """Where there are native kernels, these; rounding aside, the first token is as likely."""
    llm = LLM(kv_cache_memory_bytes=2**28, max_model_len=2048, quantization="none")
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
    noise: Any = {"prompt_token_ids": list(range(5000, 5300))}
    prompt: Any = {"prompt_token_ids": list(range(4000, 4200))}
    llm.generate([noise, prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    scored = []
    for tail in ([], [7, 8, 9]):
        longer: Any = {"prompt_token_ids": [*prompt["prompt_token_ids"], *tail]}
        (warm,) = llm.generate(longer, params, use_tqdm=False)
        assert warm.outputs[0].num_cached_tokens == 192
        scored.append(warm.outputs[0])
    for tail, warm_output in zip(([], [7, 8, 9]), scored, strict=True):
        token_ids = [*prompt["prompt_token_ids"], *tail]
        cold: Any = {"prompt_token_ids": token_ids, "cache_salt": f"{len(tail)} more"}
        (generation,) = llm.generate(cold, params, use_tqdm=False)
        assert generation.outputs[0].num_cached_tokens == 0
        (got,), (expected,) = warm_output.logprobs or [], generation.outputs[0].logprobs or []
        assert got.logprob == pytest.approx(expected.logprob, abs=0.1)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_what_was_evicted_comes_back_from_host_memory(dtype: Any, tolerance: float) -> None:
    """The cache holds one prompt of the three at a time, and the host all others."""
    block_bytes = 32 * 23_040 * (2 if dtype == "float32" else 1)
    llm = LLM(
        dtype=dtype,
        quantization="none",
        max_model_len=256,
        kv_cache_memory_bytes=8 * block_bytes,
        swap_space_bytes=24 * block_bytes,
    )
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)
    prompts: list[Any] = [
        {"prompt_token_ids": list(range(start, start + 180))} for start in (1000, 2000, 3000)
    ]
    cold, warm = (
        [llm.generate(p, params, use_tqdm=False)[0].outputs[0] for p in prompts] for _ in range(2)
    )
    assert [output.num_cached_tokens for output in cold] == [0, 0, 0]
    assert [output.num_cached_tokens for output in warm] == [160, 160, 160]
    for got, expected in zip(warm, cold, strict=True):
        assert got.token_ids == expected.token_ids or dtype != "float32"
        first, expected_first = (got.logprobs or [])[0], (expected.logprobs or [])[0]
        assert first.logprob == pytest.approx(expected_first.logprob, abs=tolerance)


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_two_threads_compute_what_one_does(dtype: Any, tolerance: float) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)
    prompt: Any = {"prompt_token_ids": list(range(7000, 7150))}
    outputs = []
    for num_threads in (1, 2):
        llm = LLM(
            dtype=dtype, max_model_len=256, kv_cache_memory_bytes=2**25, num_threads=num_threads
        )
        assert torch.get_num_threads() == num_threads
        outputs.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0])
    one, two = outputs
    assert two.token_ids == one.token_ids or dtype != "float32"
    assert two.logprobs is not None
    assert one.logprobs is not None
    assert two.logprobs[0].logprob == pytest.approx(one.logprobs[0].logprob, abs=tolerance)


def test_a_seed_gives_the_same_tokens_in_any_batch(llm: LLM) -> None:
    params = SamplingParams(seed=11, temperature=1.0, max_tokens=20)
    (alone,) = llm.generate("Once upon a time", params, use_tqdm=False)
    prompts = ["Noise", "Once upon a time", "More noise", "Even more"]
    batch = llm.generate(
        prompts, [GREEDY, params, SamplingParams(max_tokens=30), GREEDY], use_tqdm=False
    )
    assert batch[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM) -> None:
    num_served = llm.stats.num_prefix_cache_queries
    batches: list[tuple[Any, str]] = [
        (["fine", "too", {"prompt_token_ids": [1] * 3000}], "^prompt 2: .*maximum context length"),
        (["fine", {"prompt_token_ids": [10**6]}], "^prompt 1: prompt has token id 1000000"),
        (["fine", {"prompt_token_ids": []}, "fine"], "^prompt 1: the prompt is empty"),
        ([17, "fine"], "^prompt 0: a prompt is a text or token ids"),
        ({"prompt_token_ids": [1] * 3000}, "^this model's maximum context length"),
    ]
    for prompts, message in batches:
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: ") as refused:
        llm.chat([QUESTION, [{"role": "user", "content": "word " * 3000}]], GREEDY, use_tqdm=False)
    assert refused.value.code == "context_length_exceeded"
    assert llm.stats.num_prefix_cache_queries == num_served
    assert llm.stats.num_running == llm.stats.num_waiting == 0


def test_a_stream_that_is_closed_frees_its_request(llm: LLM) -> None:
    stream = llm.stream_chat(QUESTION, SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    assert llm.stats.num_running == 1
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats.num_running == 0
    assert llm.stats.kv_usage == 0.0


def test_the_tokenizer_is_transformers_own(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.tokenizer
    assert tokenizer.encode("The sky is") == [504, 6376, 314]
    assert tokenizer.decode([504, 6376, 314]) == "The sky is"
    (answer,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert prompt["input_ids"] == answer.prompt_token_ids


def test_a_template_is_given_what_chat_was(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m.content if m.content is string else m.content | length }}"
        "{% endfor %}|{{ tools | map(attribute='function.name') | join if tools }}|{{ mood }}"
    )
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the capital?"}]

    def rendered(**options: Any) -> str:
        (answer,) = llm.chat(
            [{"role": "user", "content": parts}],
            SamplingParams(max_tokens=1),
            use_tqdm=False,
            chat_template=template,
            **options,
        )
        text: str = llm.tokenizer.decode(answer.prompt_token_ids)
        return text

    assert (
        rendered() == rendered(chat_template_content_format="string") == "What is\nthe capital?||"
    )
    assert rendered(chat_template_content_format="openai") == "2||"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert rendered(tools=tools, chat_template_kwargs={"mood": "glad"}).endswith("?|f|glad")
    with pytest.raises(InvalidRequestError, match="must not contain messages") as refusal:
        rendered(chat_template_kwargs={"messages": []})
    assert refusal.value.param == "chat_template_kwargs"


def test_an_answer_can_be_continued(llm: LLM) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France"}]
    (rest,) = llm.chat(
        begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert rest.outputs[0].text.startswith(" is Paris")


def test_prompts_are_cut_and_words_forbidden(llm: LLM) -> None:
    plain, cut, other, several = llm.generate(
        [" The capital of France is", "Of no use: The capital of France is", *["The sky is"] * 2],
        [
            GREEDY,
            SamplingParams(temperature=0.0, max_tokens=12, truncate_prompt_tokens=5),
            SamplingParams(temperature=0.0, max_tokens=12, bad_words=("blue",)),
            SamplingParams(max_tokens=12, allowed_token_ids=(504, 6376, 314), n=2),
        ],
        use_tqdm=False,
    )
    assert cut.outputs[0].text == plain.outputs[0].text
    assert cut.prompt_token_ids == plain.prompt_token_ids
    assert "blue" not in other.outputs[0].text
    for output in several.outputs:
        assert {*output.token_ids} <= {504, 6376, 314}


def test_settings_that_leave_no_token_end_their_request_alone(llm: LLM) -> None:
    stuck = SamplingParams(
        max_tokens=5, allowed_token_ids=(504,), bad_words_token_ids=((504, 504, 504),)
    )
    with pytest.raises(RequestFailedError, match="settings forbid every token"):
        llm.generate("Once", stuck, use_tqdm=False)
    assert llm.stats.num_failed_steps == 0
    (after,) = llm.generate("Once", GREEDY, use_tqdm=False)
    assert len(after.outputs[0].token_ids) == 12


def test_without_a_tokenizer(llm: LLM) -> None:
    bare = LLM(**EXACT, kv_cache_memory_bytes=2**28, max_model_len=64, skip_tokenizer_init=True)
    prompt: Any = {"prompt_token_ids": [504, 6376, 314]}
    (silent,) = bare.generate(prompt, GREEDY, use_tqdm=False)
    (spoken,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert silent.outputs[0].token_ids == spoken.outputs[0].token_ids
    assert silent.outputs[0].text == ""
    ending = SamplingParams(stop_token_ids=silent.outputs[0].token_ids[2:3], temperature=0.0)
    (ended,) = bare.generate(prompt, ending, use_tqdm=False)
    assert ended.outputs[0].finish_reason is FinishReason.STOP
    with_text: list[tuple[Any, dict[str, Any], str]] = [
        ("The sky is", {}, "prompt"),
        (prompt, {"stop": "."}, "stop"),
        (prompt, {"bad_words": ["sky"]}, "bad_words"),
    ]
    for asked, settings, param in with_text:
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init") as refusal:
            bare.generate(asked, SamplingParams(**settings), use_tqdm=False)
        assert refusal.value.param == param
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        bare.chat(QUESTION, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        bare.get_tokenizer()


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLED = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "user", "content": [{"type": "text", "text": "What is the weather in Rome?"}]},
]


_READS_PARTS = (  # and no tools
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    "options",
    [{}, {"chat_template": _READS_PARTS, "chat_template_content_format": "openai"}],
    ids=["texts", "parts"],
)
def test_an_answer_with_calls_is_a_message(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60)
    (answer,) = llm.chat(CALLED, params, use_tqdm=False, tools=[WEATHER], **options)
    message = answer.outputs[0].message
    assert message is not None
    assert message.content is message.reasoning is None
    assert message.finish_reason == "tool_calls"
    [call] = message.tool_calls
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Rome"}')
    assert answer.outputs[0].message is message  # calls keep their ids


@pytest.mark.parametrize("content_format", ["auto", "openai"])
def test_an_image_in_a_message_is_named(llm: LLM, content_format: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(InvalidRequestError, match="'image_url' is not supported: images are not"):
        llm.chat(messages, GREEDY, chat_template_content_format=content_format)


def test_text_that_is_no_chat_with_tools_is_content(llm: LLM) -> None:
    (plain,) = llm.generate("The sky is", GREEDY, use_tqdm=False)
    assert plain.outputs[0].message is not None
    assert plain.outputs[0].message.content == plain.outputs[0].text != ""
    call = '<tool_call>{"name": "f", "arguments": {}}'
    form = SamplingParams(
        temperature=0.0, max_tokens=60, structured_outputs=StructuredOutputs(choice=[call])
    )
    (held,) = llm.chat(CALLED, form, use_tqdm=False, tools=[WEATHER])
    assert held.outputs[0].message is not None
    assert held.outputs[0].message.content == call


def test_reasoning_is_told_from_content(llm: LLM) -> None:
    template = "{{ messages[0].content }}\n<think>{# </think> #}"
    (answer,) = llm.chat(QUESTION, GREEDY, use_tqdm=False, chat_template=template)
    message = answer.outputs[0].message
    assert message is not None
    assert message.content is None
    assert message.reasoning == answer.outputs[0].text.strip() != ""


def test_marks_that_are_special_tokens_stay_in_a_chats_text(llm: LLM) -> None:
    pretrained = copy.deepcopy(llm.tokenizer)
    pretrained.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    tokenizer = Tokenizer(pretrained)
    mark = tokenizer.backend.token_to_id("[TOOL_CALLS]")
    template = "{{ tools }}{# [TOOL_CALLS] #}"
    prompts = PromptReader(tokenizer, llm.info)
    read = prompts.conversation(
        QUESTION, GREEDY, options=ConversationOptions(tools=[WEATHER], chat_template=template)
    )
    assert read.params.kept_special_tokens == (mark,)
    without = prompts.conversation(
        QUESTION, GREEDY, options=ConversationOptions(chat_template=template)
    )
    assert without.params == GREEDY
    assert without.syntax is None
