"""What is checked of the metadata of every GGUF file that a test writes."""

from pathlib import Path

from legato.checkpoint.gguf import ARCHITECTURES, open_gguf_checkpoint
from legato.checkpoint.gguf_file import GGUFFile
from legato.model.config_keys import key_use


def check_keys(path: Path) -> None:
    """Check that every key of a file is accounted for, and that a family reads what it becomes."""
    file, use = GGUFFile(path), open_gguf_checkpoint(path).keys
    assert use.unread == ()
    own = {key for key in file.metadata if not key.startswith("tokenizer.")}
    assert {*use.used, *use.without_effect} == own
    contents = ARCHITECTURES[file.architecture].config(file)
    contents.setdefault("model_type", "")
    assert key_use(contents).unread == ()
