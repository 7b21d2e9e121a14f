"""What putting an engine together loads, and what it leaves to the front end."""

import subprocess
import sys

BUILD = """
import importlib
import sys
from legato.core.config import CacheConfig, EngineConfig, ModelConfig
from legato.engine.assembly import main
from legato.engine.assembly.builder import build_engine

build_engine(EngineConfig(
    model=ModelConfig(max_model_len=64), cache=CacheConfig(kv_cache_memory_bytes=2**24)
))
# The package `tokenizers` itself comes with transformers' configurations.
names = ("legato.text.tokenizer", "legato.text.gguf_tokenizer",
         "transformers.tokenization_utils_tokenizers")
print(*(name for name in names if name in sys.modules))
for name in names:
    importlib.import_module(name)  # or the names above mean nothing
"""


def test_the_engine_process_loads_no_tokenizer() -> None:
    found = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []
