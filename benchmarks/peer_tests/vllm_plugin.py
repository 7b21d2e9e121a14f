"""A plugin for pytest that points vLLM's tests at a server that runs already.

It stands in for everything that these tests import of vLLM itself: `RemoteOpenAIServer` is the
running server, each tokenizer is its model's, and the rest is mocked. Tests that ask no server are
left out: they are about vLLM's own Python. It needs nothing of Legato.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import anthropic
import openai
import pytest
import transformers

URL = os.environ["PEER_TESTS_URL"]
_MOCKED = ("vllm", "torch", "lm_eval")
_ASKING = ("server", "client")
_KEY = {"api_key": "none", "max_retries": 0}

_tokenizer = transformers.AutoTokenizer.from_pretrained(os.environ["PEER_TESTS_TOKENIZER"])
for _name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
    setattr(transformers, _name, MagicMock())
transformers.AutoTokenizer.from_pretrained.return_value = _tokenizer


class RemoteOpenAIServer:
    """vLLM's helper, which would start a server. Flags and models of the tests are ignored."""

    DUMMY_API_KEY = "none"
    url_root = URL
    uds = None

    def __init__(self, *_args: Any, **_flags: Any) -> None:
        pass

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **_KEY, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **_KEY, **options)

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=URL, **_KEY, **options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=URL, **_KEY, **options)


class _Mock(types.ModuleType):
    """A module that has any name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=f"{self.__name__}.{name}")
        if name.endswith(("Error", "Exception")):
            found = type(name, (Exception,), {})
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _MOCKED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Mock(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        match module.__name__:
            case "vllm.tokenizers":
                module.get_tokenizer = lambda *_args, **_options: _tokenizer
            case "vllm.platforms":
                module.current_platform.is_rocm.return_value = False
                module.current_platform.is_xpu.return_value = False
                module.current_platform.is_cpu.return_value = False
            case "vllm.envs":
                module.VLLM_USE_RUST_FRONTEND = False
            case "vllm.config":
                module.ModelConfig.return_value.get_vocab_size.return_value = len(_tokenizer)
            case "vllm.version":
                module.__version__ = os.environ["PEER_TESTS_VERSION"]


sys.meta_path.insert(0, _Finder())
_utils = _Mock("tests.utils")
_utils.RemoteOpenAIServer = RemoteOpenAIServer
_utils.RemoteLaunchRenderServer = RemoteOpenAIServer
sys.modules["tests.utils"] = _utils
sys.modules["tests.conftest"] = _Mock("tests.conftest")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asking = [item for item in items if _asks(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


def _asks(item: pytest.Item) -> bool:
    return any(word in name for name in getattr(item, "fixturenames", ()) for word in _ASKING)
