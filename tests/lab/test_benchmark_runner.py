"""`python -m benchmarks`: which there are, how their flags are read, and what is written."""

import argparse
import ast
import inspect
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

import httpx
import msgspec
import numpy as np
import psutil
import pytest
from benchmarks.__main__ import main
from benchmarks.runner.catalog import Benchmark, benchmark, benchmarks
from benchmarks.runner.events import Event, stream
from benchmarks.runner.flags import add_out, add_rounds, add_server_flags
from benchmarks.runner.machine import Machine, Watch, commit
from benchmarks.runner.main import read_flags
from benchmarks.runner.raw_http import post
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Record, Run
from benchmarks.runner.servers import SERVE, servers

from legato_lab.simulation.record import RequestError

TINY = Benchmark(name="tiny", module="tests.lab.tiny", question="Is it small?", minutes=0.1)


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [one.name for one in benchmarks()]
    assert {"speed", "kept", "routing.kill", "overload"} <= {one.name for one in benchmarks()}
    for one in benchmarks():
        assert one.question.endswith((".", "?")), one.name
        assert one.minutes > 0


@pytest.mark.parametrize("name", [one.name for one in benchmarks()])
def test_each_has_what_the_runner_calls(name: str) -> None:
    pytest.importorskip("jsonschema_rs")
    module = import_module(benchmark(name).module)
    assert callable(module.measure)
    with pytest.raises(SystemExit) as ended:
        read_flags(benchmark(name), module.__doc__, module.add_flags, ["--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize("name", [one.name for one in benchmarks()])
def test_each_asks_for_flags_that_it_has(name: str) -> None:
    pytest.importorskip("jsonschema_rs")
    module = import_module(benchmark(name).module)
    parser = argparse.ArgumentParser()
    add_out(parser)
    module.add_flags(parser)
    asked = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("flags", "run.flags")
    }
    assert asked <= {action.dest for action in parser._actions} | set(parser._defaults)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sped"])
    assert "invalid choice: 'sped'" in capsys.readouterr().err


def test_a_module_runs_as_its_name_does() -> None:
    command = [sys.executable, "-m", "benchmarks.planning", "--help"]
    helped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert helped.stdout.startswith("usage: python -m benchmarks planning")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_servers_end_with_an_ended_benchmark(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "health").touch()
    command = [sys.executable, "-c", _SERVES, str(tmp_path)]
    heed = partial(signal.signal, number, signal.SIG_DFL)  # ignored where nohup runs tests
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as measuring:
        assert measuring.stdout is not None
        server = psutil.Process(int(measuring.stdout.readline()))
        try:
            measuring.send_signal(number)
            assert measuring.wait(timeout=30.0) == 128 + number
            assert not server.is_running()
        finally:
            for process in (measuring, server):
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.kill()


_SERVES = """
import sys, time, types
from benchmarks.runner.catalog import Benchmark
from benchmarks.runner.main import run
from benchmarks.runner.servers import server_process

def measure(run):
    command = f"{sys.executable} -m http.server {{port}} --directory {folder}"
    with server_process(command) as (process, _):
        print(process.pid, flush=True)
        time.sleep(60.0)

folder = sys.argv.pop()
sys.modules["tiny"] = types.SimpleNamespace(measure=measure, add_flags=lambda parser: None)
run(Benchmark(name="tiny", module="tiny", question="", minutes=0.1), [])
"""
"""A benchmark whose server serves a folder; it prints the server's process id."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 3, "--probes")
    add_server_flags(parser, ("--itl-slo", "100ms"))


def test_other_flags_are_the_servers() -> None:
    flags = read_flags(TINY, "", _add_flags, [])
    assert (flags.rounds, flags.server_flags) == (3, ["--itl-slo", "100ms"])
    words = ["--probes", "5", "--ttft-slo", "3s", "--shed-load"]
    flags = read_flags(TINY, "", _add_flags, words)
    assert (flags.rounds, flags.server_flags) == (5, words[2:])
    behind = read_flags(TINY, "", _add_flags, ["--rounds", "2", "--", "--max-num-seqs", "4"])
    assert (behind.rounds, behind.server_flags) == (2, ["--max-num-seqs", "4"])


def test_other_flags_are_refused_where_no_server_takes_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read_flags(TINY, "", lambda _: None, ["--shed-load"])
    assert "unknown: --shed-load" in capsys.readouterr().err


def test_flags_go_to_legatos_servers_alone() -> None:
    own, peer = servers({"Legato": SERVE}, ["vLLM=peer=serve {port} --a=b"], ["--seed", "a b"])
    assert own.command == f"{SERVE} --seed 'a b'"
    assert peer == ("vLLM", "peer", "serve {port} --a=b")


def test_sides_take_turns() -> None:
    assert list(turns("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_a_request_by_hand() -> None:
    text = post("/v1/completions", b"{}", Connection="close", X_Request_Id="7")
    head, body = text.decode().split("\r\n\r\n")
    assert body == "{}"
    assert {"Content-Length: 2", "Connection: close", "X-Request-Id: 7"} <= set(head.splitlines())


def test_all_is_written_beside_what_it_was_measured_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = argparse.Namespace(out=tmp_path / "out", rounds=2)
    run = Run(TINY, flags)
    assert not flags.out.exists()
    run.write({"itl_s": np.float64(0.5), "gaps_s": np.array([1.0, 2.0])})
    assert run.paths == [flags.out / "tiny.json"]
    record = msgspec.json.decode(run.paths[0].read_bytes(), type=Record)
    assert record.figures == {"itl_s": 0.5, "gaps_s": [1.0, 2.0]}
    assert record.flags == {"out": str(flags.out), "rounds": 2}
    assert record.question == TINY.question
    assert record.machine == Machine.here()
    assert record.commit == commit()
    assert record.before.seconds >= 1.0
    assert record.machine.processor in capsys.readouterr().out


def test_the_machine_has_a_processor() -> None:
    machine = Machine.here()
    assert machine.processor
    assert 1 <= machine.num_cores <= (os.cpu_count() or 1)


def test_own_work_is_not_that_of_others() -> None:
    """That of a process that has ended, too."""
    watch = Watch()
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
    load = watch.load()
    assert load.own > 0.1
    assert not any(str(os.getpid()) in name.split() for name in load.busiest)


_USAGE = {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
_EVENTS = (
    {"choices": [{"text": "a", "token_ids": [1]}], "usage": None},
    {"choices": [{"delta": {"content": "b"}}]},
    {"choices": [], "usage": _USAGE},
)


def _lines(*events: object) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def _answer(request: httpx.Request) -> httpx.Response:
    assert json.loads(request.content)["stream"] is True
    error = {"error": {"message": "it died"}}
    return {
        "/events": httpx.Response(200, text=_lines(*_EVENTS)),
        "/error": httpx.Response(200, text=_lines(error)),
        "/refused": httpx.Response(429, text="full"),
    }[request.url.path]


async def _events(path: str) -> list[Event]:
    transport = httpx.MockTransport(_answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        return [event async for event in stream(http, path, {})]


async def test_a_stream_is_read() -> None:
    *texts, last = await _events("/events")
    assert [event.added for event in texts] == ["a", "b"]
    assert last.usage is not None
    assert (last.usage.completion_tokens, last.usage.num_cached_tokens) == (2, 1)


@pytest.mark.parametrize(("path", "message"), [("/error", "it died"), ("/refused", "429: full")])
async def test_a_stream_that_fails_says_why(path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        await _events(path)
