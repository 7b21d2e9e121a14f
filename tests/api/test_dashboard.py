"""The dashboard's page and its stream of records, without a browser."""

import json
import re
import time
from http.client import HTTPResponse

import httpx
import pytest

from tests.api.launch import ServerProcess, long_request
from tests.api.watch import watching
from tests.api.wire import connect


@pytest.mark.parametrize(
    ("path", "script"), [("/", "chat/chat.js"), ("/dashboard", "dashboard/main.js")]
)
def test_a_page_is_complete_and_asks_nobody_else(
    http: httpx.Client, path: str, script: str
) -> None:
    page = http.get(path, headers={"Accept": "text/html"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert not re.search(r"<script>|<style|\son\w+=|https?://|\sstyle=", page.text)
    paths = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert script in paths
    for path in paths:
        if path in ("dashboard", "docs"):
            continue
        asset = http.get(f"/{path}").raise_for_status()
        assert asset.headers["x-content-type-options"] == "nosniff"
        for module in re.findall(r'from "([^"]+)"', asset.text):
            http.get(f"/{path}/../{module}").raise_for_status()


def test_nothing_else_of_the_folder_is_served(http: httpx.Client) -> None:
    for path in ("/dashboard/", "/dashboard/index.html", "/dashboard/../page.py", "/dashboard/x"):
        assert http.get(path).status_code == 404


def test_a_request_is_told_in_lengths_and_times(server: ServerProcess) -> None:
    """From its arrival to its end, and neither what was asked nor what was answered."""
    headers = {"X-Request-Id": "watched"}
    request = {"prompt": "The zebra and the", "max_tokens": 6, "ignore_eos": True}
    with watching(server) as updates:
        first = next(updates)
        assert first["about"]["max_model_len"] == 8192
        assert first["about"]["version"] == server.http.get("/version").json()["version"]
        assert first["settings"] == server.http.get("/settings").json()
        answer = server.http.post("/v1/completions", json=request, headers=headers)
        records, told = [], ""
        while not any(record["kind"] == "ended" for record in records):
            update = next(updates)
            records += update["records"]
            told += json.dumps(update)
    sent, *records = records
    begun = [record for record in records if record["kind"] == "begun"]
    arrived, *middle, ended = [record for record in records if record["kind"] != "begun"]
    assert (sent["kind"], sent["request_id"]) == ("sent", arrived["request_id"])
    assert begun[0]["prefill_tokens"] == {arrived["request_id"]: 4}
    assert [step["step_id"] for step in begun] == [step["step_id"] for step in middle]
    assert arrived["num_prompt_tokens"] == 4
    assert arrived["request_id"] == ended["request_id"]
    assert "watched" in ended["request_id"]
    assert ended["num_output_tokens"] == 6
    assert sum(c["num_samples"] for step in middle for c in step["chunks"]) == 6
    assert "zebra" not in told
    assert answer.json()["choices"][0]["text"].strip() not in told
    assert update["num_dropped"] == 0


def test_who_comes_late_is_told_what_was(server: ServerProcess) -> None:
    """The steps of before, and whose they were that run still."""
    with server.http.stream("POST", "/v1/completions", json=long_request()) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(5):
            next(lines)
        with watching(server) as updates:
            first = next(updates)
            history = first["history"]
            [unfinished] = history["unfinished"]
            own = [
                chunk
                for step in history["steps"]
                for chunk in step["chunks"]
                if chunk["request_id"] == unfinished["request_id"]
            ]
            assert sum(chunk["num_samples"] for chunk in own) >= 5
            assert first["num_unfinished"] == 1
            totals = first["totals"]
            assert set(totals["refused"]) == {"invalid", "queue_full", "ttft_slo"}
            assert "history" not in next(updates)


def test_several_may_watch_and_leave(server: ServerProcess) -> None:
    with watching(server) as one, watching(server) as other:
        server.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
        for updates in (one, other):
            while not next(updates)["records"]:
                pass
    with (
        watching(server) as updates,
        server.http.stream("POST", "/v1/completions", json=long_request()) as response,
    ):
        lines = response.iter_lines()  # whose end would be that of the stream
        next(lines)
        while not next(updates)["stats"]["num_running"]:
            pass


def test_a_page_that_does_not_read_loses_records_and_is_told(server: ServerProcess) -> None:
    many = {"prompt": [1], "n": 128, "max_tokens": 1, "ignore_eos": True}
    with connect(server, receive_buffer_bytes=4096) as sock:
        sock.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        response = HTTPResponse(sock)
        response.begin()
        for _ in range(18):
            server.http.post("/v1/completions", json=many).raise_for_status()
        done_s = time.monotonic()
        lines = iter(response.readline, b"")
        updates = (json.loads(line.removeprefix(b"data: ")) for line in lines if line.strip())
        read = []
        while not read or read[-1]["now_s"] < done_s or read[-1]["records"]:
            read.append(next(updates))
    num_records = sum(len(update["records"]) for update in read)
    num_dropped = read[-1]["num_dropped"]
    assert read[0]["num_dropped"] == 0
    assert num_dropped
    # Each completion came and ended.
    assert num_records + num_dropped >= 18 * 128 * 2
