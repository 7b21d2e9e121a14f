"""Bounds on one request's size and reading cost that no flag changes.

Bounds of sampling are in `core/sampling_params.py` and `core/slo.py`; bounds with a flag are in
`config.py`.
"""

MAX_JSON_VALUES = 2**20
"""Values in a body, including those within lists and objects."""
MAX_FIELDS = 128
"""Fields of one object that the API describes."""
MAX_MESSAGES = 2**14
"""Messages of one conversation."""
MAX_ROLE_CHARS = 64
"""Length of a message's role."""
MAX_CONTENT_PARTS = 1024
"""Parts of one message's content."""
MAX_TOOLS = 128
"""Tools of one request; OpenAI's limit."""
MAX_TOOL_NAME_CHARS = 128
"""Length of a tool's name in `tools`."""
MAX_TOOLS_CHARS = 2**18
"""Length of all tools of a request, in JSON."""
MAX_TOOL_CALLS = 1024
"""Tool calls of one message."""
MAX_NAME_CHARS = 1024
"""Length of a name or an id: a model's, a user's, a tool call's."""
MAX_TEMPLATE_CHARS = 2**18
"""Length of a chat template in a request."""
MAX_TEMPLATE_VARIABLES = 64
"""Variables in `chat_template_kwargs`."""
MAX_METADATA = 16
"""Entries of `metadata`; this and the next two are OpenAI's."""
MAX_METADATA_KEY_CHARS = 64
"""Length of a key in `metadata`."""
MAX_METADATA_VALUE_CHARS = 512
"""Length of a value in `metadata`."""
MAX_REPEATED_FIELD_BYTES = 2**19
"""A field that a response repeats, in JSON: `instructions`, `tools`, `text` and others."""
MAX_REPEATED_BYTES = 2**20
"""All such fields of a response. Each of its first and last events has them, and the store."""
MAX_DETOKENIZED = 2**19
"""Token ids in a request to /detokenize."""

MAX_PIPELINED_BYTES = 64 * 2**10
"""Requests waiting for an earlier answer on their connection; above it, reading stops."""
MAX_PLAIN_BODY_BYTES = 16 * 2**10
"""A body that the HTTP process parses itself, such as that of PATCH /settings."""
MAX_ANSWER_BYTES = 32 * 2**20
"""The answer to /tokenize or /detokenize."""

MAX_WHOLE_ANSWER_BYTES = 128 * 2**20
"""Completions that are not streamed, and a response: estimated before the first token."""
MAX_UNREAD_BYTES = 64 * 2**20
"""A stream's tokens that wait for a slow client, estimated."""

LARGE_BODY_BYTES = 32 * 2**10
"""Larger bodies are read at a lower priority."""
MAX_WAITING_BYTES = 128 * 2**20
"""Bodies that wait to be read; one more is refused with 429."""
MAX_READERS = 6
"""Processes that read small bodies, or fewer, one a processor; as many read large and slow ones."""
READER_MEMORY_BYTES = 2**30
"""Memory that reading one request may take."""
TEMPLATE_MEMORY_BYTES = 2**28
"""Memory that compiling the model's chat template may take, and one short message by it."""
KEPT_MEMORY_BYTES = 32 * 2**20
"""A reader process that has grown by more is replaced."""
