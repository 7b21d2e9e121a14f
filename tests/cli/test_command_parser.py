"""What is refused on a command line, and how."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.cli.foreign_flags import _LLAMA_NOTES, _NOTES, foreign_flag_note
from legato.cli.main import _asked_for, _parser, full_parser
from legato.core.config import engine_fields
from legato.core.config_fields import Field
from tests.cli.test_main import legato
from tests.profiles import examples

FIELDS = [field for field in engine_fields() if field.flag.behind is None]
VALUES = {
    "switch": [],
    "duration": ["1s"],
    "slack": ["5%"],
    "weights": ["a_b=1"],
    "classes": ["a_b:itl=1s"],
}


# Of vLLM 0.11 to 0.30, as its documentation lists them.
VLLM_FLAGS = (Path(__file__).parent / "vllm_flags.txt").read_text().split()


def serve_options() -> set[str]:
    parsers = _parser(_asked_for(["serve"]))._subparsers
    assert parsers is not None
    choices: Any = parsers._group_actions[0].choices
    return set(choices["serve"]._option_string_actions)


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The first of the two lines that are written."""
    with pytest.raises(SystemExit) as ended:
        full_parser().parse_args(args)
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch("legato .*--help (all )?lists the (flags|commands)", second)
    return first.removeprefix("legato: ")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("srve",), "did you mean serve?"),
        (("serve", "--max-num-sqs", "3"), "--max-num-sqs; did you mean max-num-seqs?"),
        (("serve", "--max_num_sqs=3"), "--max-num-sqs; did you mean max-num-seqs?"),
        (("serve", "--dtype", "bf16"), "did you mean bfloat16?"),
        (("serve", "--itl-slo", "100"), "100 of what? 100ms, or 100s?"),
        (("serve", "--itl-slo", "0.1:p99.9"), "0.1 of what?"),
        (("serve", "--slo-class", "gold:ttft=2"), "2 of what?"),
        (("serve", "--zzz"), "there is no flag --zzz"),
        (("serve", "--itl-slo", "0"), "argument --itl-slo: '0' is not at least 0.001ms"),
        (("serve", "--max-wait", "0s"), "argument --max-wait: '0s' is not at least 0.001ms"),
        (("serve", "--kv-cache-memory", "9999999T"), "'9999999T' is not at most 1024T"),
        (("chat", "--max-model-len", "0"), "argument --max-model-len: '0' is not at least 1"),
        (("serve", "--gpu-memory-utilization", "nan"), "'nan' is not at least 0.001"),
        (("serve", "--port", "70000"), "'70000' is not at most 65535"),
        (("serve", "--max-num-seqs", "many"), "'many' is not a whole number"),
        (("generate", "--temperature", "hot"), "'hot' is not a number"),
        (("serve", "--host", ""), "argument --host: it is empty; leave the flag out"),
        (("serve", ""), "argument MODEL: it is empty"),
        (("chat", "--url", " "), "argument --url: it is empty"),
        (("models", ""), "argument MODEL: it is empty"),
        (("serve", "--api-key-file", "/"), "'/' cannot be read: Is a directory"),
        (("serve", "--itl-slo"), "argument --itl-slo: expected one argument"),
        (("serve", "one", "two"), "unexpected: two"),
        (("serve", "-tp", "2"), "it is --tensor-parallel-size"),
        (("serve", "-c", "4096"), "there is no flag -c: it is --max-model-len"),
        (("serve", "-m", "x.gguf"), "it is the first argument, or --model"),
        (("serve", "-hf", "a/b"), "there is no flag -hf: it is the first argument, or --model"),
        (("serve", "x.gguf", "-ngl", "99"), "the whole model is on one device"),
        (("serve", "--ctx-size=4096"), "it is --max-model-len"),
        (("serve", "--n_gpu_layers", "9"), "the whole model is on one device"),
        (("chat", "--temp", "1"), "there is no flag --temp: a request says it"),
        (("serve", "--dtype", "fp16"), "did you mean float16?"),
        (("chat", "--device", "gpu"), "did you mean cuda?"),
        (("serve", "--kernels", "half"), "'half' is none of auto, amx, avx512, avx2, plain, torch"),
        (("serve", "x", "port", "80"), "unexpected: port 80; did you mean --port?"),
        (("serve", "x", "y", "itl_slo=1s"), "y itl_slo=1s; did you mean --itl-slo?"),
        (("serve", "-port", "80"), "there is no flag -port; did you mean --port?"),
        (("serve", "—port", "80"), "there is no flag —port; did you mean --port?"),
        # What is misspelt, and not what is missing for that.
        (("bench", "run", "--workloda", "chat"), "did you mean workload"),
    ],
)
def test_a_refusal_says_what_may_be_meant(
    args: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(capsys, *args)


def test_a_refusal_of_the_command_itself() -> None:
    done = legato("serve", "--itl-slo", "100")
    assert done.returncode == 2
    assert done.stderr == (
        "legato: argument --itl-slo: 100 of what? 100ms, or 100s?\n"
        "legato serve --help all lists the flags\n"
    )


@examples(50)
@given(field=st.sampled_from(FIELDS), data=st.data())
def test_underscores_may_stand_for_dashes(field: Field, data: st.DataObject) -> None:
    parts = field.option.removeprefix("--").split("-")
    spelt = "".join(part + data.draw(st.sampled_from("-_")) for part in parts)[:-1]
    value = [field.choices[-1]] if field.choices else VALUES.get(field.kind, ["1"])
    parser = _parser(_asked_for(["serve"]))
    plain = parser.parse_args(["serve", field.option, *value])
    assert parser.parse_args(["serve", f"--{spelt}", *value]) == plain


def test_values_keep_their_underscores() -> None:
    args = _parser(_asked_for(["serve"])).parse_args(["serve", "a_b", "--served_model_name=c_d"])
    assert args.positional_model == "a_b"
    assert args.served_model_names == ["c_d"]


def test_no_note_is_of_a_flag_that_there_is() -> None:
    assert [option for option in serve_options() if foreign_flag_note(option)] == []


def test_notes_name_flags_that_there_are() -> None:
    named = {
        word.strip(";,.")
        for note in (*_NOTES, *_LLAMA_NOTES)
        for word in note.split()
        if word[:2] == "--"
    }
    assert named <= serve_options()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}', "tive 4"),
        ('{"model": "[ngram]"}', "it is --speculative auto"),
        ('{"method":"suffix","num_speculative_tokens":32}', "it is --speculative auto"),
        (
            '{"model": "org/small", "num_speculative_tokens": 5}',
            "it is --speculative-model org/small --speculative 5",
        ),
        ('{"method":"eagle3","model":"org/eagle"}', "drafts by eagle3 are not supported; --spec"),
        ("ngram", "it is --speculative, with auto, off or a number of tokens"),
    ],
)
@pytest.mark.parametrize("joint", [" ", "="])
def test_what_drafts_is_read_of_the_configuration_of_vllm(
    config: str, told: str, joint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = f"--speculative-config{joint}{config}".split(joint, maxsplit=1)
    said = refusal(capsys, "serve", *(args if joint == " " else [joint.join(args)]))
    assert said.startswith("there is no flag --speculative-config: ")
    assert told in said


@pytest.mark.parametrize("flag", VLLM_FLAGS)
def test_flags_of_vllm_are_there_or_explained(flag: str) -> None:
    assert flag in serve_options() or foreign_flag_note(flag)


@pytest.mark.parametrize(
    "flag",
    [
        "--pipeline-parallel-size", "--pipeline_parallel_size", "--no-enable-expert-parallel",
        "--compilation-config.mode", "--hf-overrides.a.b+",
    ],
)  # fmt: skip
def test_flags_of_vllm_are_explained(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "serve", flag, "x")
    assert said.startswith(f"there is no flag {flag.replace('_', '-')}: ")


@pytest.mark.parametrize(
    "name", [name for names in _LLAMA_NOTES.values() for name in names.split() if "*" not in name]
)
def test_a_flag_of_llama_server_has_its_own_note(name: str) -> None:
    """Not that of a flag of vLLM's with the same name."""
    [note] = [note for note, names in _LLAMA_NOTES.items() if name in names.split()]
    assert foreign_flag_note(f"--{name}") == note


@pytest.mark.parametrize("command", ["serve", "chat", "fleet"])
def test_a_help_opens_on_one_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for rest in ("", " all"):
        with pytest.raises(SystemExit) as ended:
            full_parser().parse_args(f"{command} --help{rest}".split())
        assert ended.value.code == 0
        shown[rest] = capsys.readouterr().out
    lines = shown[""].splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert f"legato {command} --help all" in lines[-1]
    flags = re.findall("^  (--[a-z-]+) ", shown[""], re.MULTILINE)
    assert 9 <= len(flags) <= 12
    assert all(f"{flag} " in shown[" all"] for flag in flags)
    assert "--kernels" in shown[" all"]


def test_a_value_may_begin_with_a_dash_of_typography() -> None:
    parser = _parser(_asked_for(["chat"]))
    assert parser.parse_args(["chat", "--system", "—Hello"]).system == "—Hello"
