"""What one request may hold, and what reading it may take: bounds that no flag changes.

Those of sampling are in `core/sampling_params.py` and `core/slo.py`, those that a flag changes in
`config.py`.
"""

MAX_JSON_VALUES = 2**20
"""Values in a body, those within lists and objects included."""
MAX_FIELDS = 128
"""Of one object that the API describes."""
MAX_MESSAGES = 2**14
"""Of one conversation."""
MAX_CONTENT_PARTS = 1024
"""Of one message."""
MAX_TOOLS = 128
"""Of one request; OpenAI's."""
MAX_TOOL_NAME_CHARS = 128
"""Of a tool in `tools`."""
MAX_TOOLS_CHARS = 2**18
"""Of all tools of a request, in JSON."""
MAX_TOOL_CALLS = 1024
"""Of one message."""
MAX_NAME_CHARS = 1024
"""Of a name or an id: a model's, a user's, a tool call's."""
MAX_TEMPLATE_CHARS = 2**18
"""Of a chat template in a request."""
MAX_TEMPLATE_VARIABLES = 64
"""In `chat_template_kwargs`."""
MAX_METADATA = 16
"""Entries of `metadata`; this and the next two are OpenAI's."""
MAX_METADATA_KEY_CHARS = 64
"""Of a key in `metadata`."""
MAX_METADATA_VALUE_CHARS = 512
"""Of a value in `metadata`."""
MAX_DETOKENIZED = 2**19
"""Token ids in a request to /detokenize."""

MAX_PIPELINED_BYTES = 64 * 2**10
"""Of requests that wait for the answer to one before them; then their connection is not read."""
MAX_PLAIN_BODY_BYTES = 16 * 2**10
"""Of a body that is read in the HTTP process, such as that of PATCH /settings."""
MAX_ANSWER_BYTES = 32 * 2**20
"""Of the answer to /tokenize or /detokenize."""

MAX_WHOLE_ANSWER_BYTES = 128 * 2**20
"""Of completions that are not streamed, and of a response: an estimate, before any is computed."""
MAX_UNREAD_BYTES = 64 * 2**20
"""Of a stream's tokens that wait for a client that reads too slowly, by an estimate."""

LARGE_BODY_BYTES = 32 * 2**10
"""From here on a body is read at a lower priority."""
MAX_WAITING_BYTES = 128 * 2**20
"""Of bodies that wait to be read; one more is refused with 429."""
MAX_READERS = 6
"""Processes that read small bodies; as many again read large and slow ones."""
READER_MEMORY_BYTES = 2**30
"""That reading one request may take."""
KEPT_MEMORY_BYTES = 256 * 2**20
"""With this much more memory than it began with, a process that reads is replaced."""
