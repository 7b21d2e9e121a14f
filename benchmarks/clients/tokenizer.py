"""The default model's tokenizer, as Hugging Face's tools read one."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.language.tokenizer.tokenizer import load_tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL))
    assert tokenizer.eos_token_id is not None
    end = tokenizer.backend.id_to_token(tokenizer.eos_token_id)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token=end).save_pretrained(
        folder
    )
