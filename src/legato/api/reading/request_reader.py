"""Parses bodies, and makes jobs for the engine or whole answers of them."""

from collections.abc import Callable, Iterator
from functools import partial

from legato.api.anthropic.message_body import MessageJobs
from legato.api.bodies.body_model import BodyParser, Kind, Serving
from legato.api.job import End, Part, Warned
from legato.api.ollama.described_model import DescribedModel
from legato.api.ollama.ollama_body import OllamaJobs
from legato.api.openai.chat_job import ChatJobs
from legato.api.openai.completion_body import CompletionJobs
from legato.api.openai.generate_body import GenerateJobs
from legato.api.openai.pooled_prompts import PooledPrompts
from legato.api.openai.tokenization_body import Tokenization
from legato.api.responses.response_body import ResponseJobs
from legato.checkpoint.defaults import ModelDefaults
from legato.language.conversation.prompt import ChatPrompts
from legato.language.forms.check import GrammarChecker
from legato.language.tokenizer.tokenizer import Tokenizer


class RequestReader:
    """Parses the bodies of requests to one model.

    A body can make it take any amount of time and memory: the caller must bound both.
    """

    def __init__(self, tokenizer: Tokenizer, defaults: ModelDefaults, serving: Serving) -> None:
        self._parser = parser = BodyParser(serving, tokenizer.max_token_chars)
        prompts = ChatPrompts(
            tokenizer,
            trusts_templates=serving.trust_request_chat_template,
            special_tokens=serving.message_special_tokens,
            check_fits=parser.check_fits,
        )
        forms = GrammarChecker(lambda: tokenizer.vocabulary)
        means = tokenizer, defaults, parser, prompts, forms
        chats, completions = ChatJobs(*means), CompletionJobs(*means)
        messages = MessageJobs(parser, chats)
        pooled, tokenization = PooledPrompts(*means), Tokenization(*means)
        ollama = OllamaJobs(parser, chats, completions, pooled)
        described = DescribedModel(*means)
        self._responses = ResponseJobs(parser, chats)
        self._by_kind: dict[Kind, Callable[[bytes], Iterator[Part | End]]] = {
            "chat": chats.read,
            "completions": completions.read,
            "embeddings": pooled.embeddings,
            "score": pooled.score,
            "rerank": pooled.rerank,
            "messages": messages.read,
            "count_tokens": messages.count_tokens,
            "generate": GenerateJobs(*means).read,
            "tokenize": tokenization.tokenize,
            "detokenize": tokenization.detokenize,
            "tokenizer_info": tokenization.info,
            "apply_template": tokenization.apply_template,
            "ollama_chat": ollama.chat,
            "ollama_generate": ollama.generate,
            "ollama_embed": ollama.embed,
            "ollama_embeddings": ollama.embeddings,
            "ollama_tags": described.tags,
            "ollama_ps": described.running,
            "ollama_show": described.show,
            "ollama_pull": described.pull,
            "props": described.props,
            "render_chat": partial(chats.read, is_rendered=True),
            "render_completions": partial(completions.read, is_rendered=True),
            "render_messages": partial(messages.read, is_rendered=True),
            "render_responses": self._responses.render,
        }

    def read(self, kind: Kind, body: bytes, stored: bytes | None = None) -> Iterator[Part | End]:
        """Yield the parts and the end, which is not `Refused`.

        Args:
            stored: the `Stored` that an earlier pass found the body to need.

        Raises:
            ApiError: the body asks for another model.
            InvalidRequestError: the body cannot be served.
            MemoryError: parsing needs more memory than allowed.
        """
        self._parser.begin()
        for part in self._parts(kind, body, stored):
            if isinstance(part, End) and (names := self._parser.ignored_names):
                yield Warned(f"ignored fields: {', '.join(names)}")
            yield part

    def _parts(self, kind: Kind, body: bytes, stored: bytes | None) -> Iterator[Part | End]:
        if kind == "responses":
            return self._responses.read(body, stored)
        if kind == "input_tokens":
            return self._responses.count_tokens(body, stored)
        return self._by_kind[kind](body)
