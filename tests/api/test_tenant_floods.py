"""Many tenants at once at a server that sheds load: the client chooses the tenant."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.api.launch import running_server
from tests.api.wire import connect, post, read_response

_NUM_AT_ONCE = 60


def test_a_flood_of_two_tenants_ends_no_engine(tmp_path: Path, calibration_dir: Path) -> None:
    """One forecast divided by zero; three engines died of it, and with them the server."""
    flags = ("--ttft-slo", "2s", "--shed-load", "--calibration-dir", str(calibration_dir))
    with running_server(tmp_path, *flags) as server:
        engine = server.engine.pid

        def complete(number: int) -> tuple[int, bytes]:
            body = {"prompt": [1000 + number] * 300, "max_tokens": 20, "ignore_eos": True}
            if number % 2:
                body["tenant"] = "b"
            with connect(server) as sock:
                sock.sendall(post("/v1/completions", body))
                return read_response(sock)

        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            answers = [*pool.map(complete, range(_NUM_AT_ONCE))]
        assert {status for status, _ in answers} <= {200, 429}
        whole = [json.loads(body)["usage"] for status, body in answers if status == 200]
        assert whole, "some are admitted"
        assert all(usage["completion_tokens"] == 20 for usage in whole)
        assert server.engine.pid == engine
        assert server.metric("num_engine_restarts_total") == 0
        assert server.metric("num_contained_errors_total") == 0
        assert server.http.get("/health").json()["status"] == "ok"
        assert "Traceback" not in server.log.read_text()
