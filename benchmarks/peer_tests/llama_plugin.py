"""A plugin for pytest that points llama.cpp's tests at a server that runs already.

Their `utils.py` would start a server for each test, and download models. It needs nothing of
Legato.
"""

import os
import sys
import types
from typing import Any
from urllib.parse import urlsplit

_URL = urlsplit(os.environ["PEER_TESTS_URL"])
sys.modules["wget"] = types.ModuleType("wget")

import utils  # noqa: E402


def _start(server: Any, **_options: Any) -> None:
    server.server_host, server.server_port = _URL.hostname, _URL.port


utils.ServerProcess.start = _start
utils.ServerProcess.stop = lambda _server: None
utils.ServerPreset.load_all = staticmethod(lambda: None)
