"""Small chat templates that write and read tools as those of well-known models do."""

QWEN = """
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools><|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}
{%- elif enable_thinking is defined %}{{ '<think>\n' }}{% endif %}{% endif %}"""

LLAMA = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if tools and loop.last %}{{ 'Answer with {"name": name, "parameters": arguments}.\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<|python_tag|>' }}
{{- {"name": call.function.name, "parameters": call.function.arguments} | tojson }}{% endfor %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

MISTRAL = """
{%- for m in messages %}
{%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) }}{% endif %}
{%- if m.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{%- endfor %}{{ ']</s>' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.tool_call_id + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"""

MISTRAL_NAMED = """
{%- for m in messages %}
{%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{ '[INST]' + m.content + '[/INST]' }}{% endfor %}"""

NO_TOOLS = """
{%- for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

NO_SYSTEM = """
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}
{{- m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""As Gemma 2's: no system role, no tools, and turns that alternate."""


def _family(calls: str, *, reasoning: str = "", variable: str = "") -> str:
    """A template of a family's calls.

    Args:
        calls: what it writes of `m.tool_calls`.
        reasoning: what it writes of reasoning, and how it opens a thought.
        variable: the message's key of reasoning.
    """
    thought = f"{{{{ {reasoning} }}}}" if reasoning else ""
    key = variable or "reasoning_content"
    return (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{%- if tools and loop.last %}{{ tools | tojson }}{{ '\n' }}{% endif %}"
        f"{{%- if m.{key} %}}{thought}{{% endif %}}"
        "{{- m.content }}{%- if m.tool_calls %}" + calls + "{% endif %}{{ '<|im_end|>\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


_THINK = "'<think>\n' + m.reasoning_content + '\n</think>\n\n'"

QWEN_CODER = _family(
    r"""
{%- for call in m.tool_calls %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\n' }}
{{- value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}{% endfor %}""",
    reasoning=_THINK,
)

_GLM_CALLS = r"""
{%- for call in m.tool_calls %}{{ '\n<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{ '</arg_value>\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}"""
GLM = _family(_GLM_CALLS, reasoning="'<think>' + m.reasoning_content + '</think>\n'")
GLM_COMPACT = _family(
    "{#- Call as <tool_call>{function-name}<arg_key>{key}</arg_key>. #}"
    + _GLM_CALLS.replace(r"\n", ""),
    reasoning="'<think>' + m.reasoning_content + '</think>'",
)

MINIMAX = _family(
    r"""{{ '\n<minimax:tool_call>\n' }}
{%- for call in m.tool_calls %}{{ '<invoke name="' + call.function.name + '">\n' }}
{%- for key, value in call.function.arguments | items %}{{ '<parameter name="' + key + '">' }}
{{- value if value is string else value | tojson }}{{ '</parameter>\n' }}{% endfor %}
{{- '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}""",
    reasoning=_THINK,
)

DSML = _family(
    r"""{{ '\n\n<｜DSML｜function_calls>' }}
{%- for call in m.tool_calls %}{{ '\n<｜DSML｜invoke name="' + call.function.name + '">\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<｜DSML｜parameter name="' + key + '" string="' }}
{{- ('true' if value is string else 'false') + '">' }}
{{- value if value is string else value | tojson }}{{ '</｜DSML｜parameter>\n' }}{% endfor %}
{{- '</｜DSML｜invoke>' }}{% endfor %}{{ '\n</｜DSML｜function_calls>' }}""",
    reasoning="'<think>' + m.reasoning_content + '</think>'",
)
DSML_TOOLS = DSML.replace("function_calls>", "tool_calls>")

DEEPSEEK = _family(
    r"""{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
{{- '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}""",
    reasoning="'<think>' + m.reasoning_content + '</think>'",
)
DEEPSEEK_FENCED = _family(
    r"""{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}{{ '\n' if not loop.first }}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- '' + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜>' }}""",
    reasoning="'<think>\n' + m.reasoning_content + '\n</think>\n\n'",
)

KIMI = _family(
    r"""{{ '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson }}{{ '<|tool_call_end|>' }}{% endfor %}
{{- '<|tool_calls_section_end|>' }}""",
    reasoning="'<think>' + m.reasoning_content + '</think>'",
)

GEMMA = r"""
{%- macro written(value) %}
{%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is mapping %}{{ '{' }}{% for key, inner in value | dictsort %}
{{- (',' if not loop.first else '') + key + ':' + written(inner) }}{% endfor %}{{ '}' }}
{%- elif value is sequence %}{{ '[' }}{% for inner in value %}
{{- (',' if not loop.first else '') + written(inner) }}{% endfor %}{{ ']' }}
{%- else %}{{ value | tojson }}{% endif %}
{%- endmacro %}""" + _family(
    r"""
{%- for call in m.tool_calls %}{{ '<|tool_call>call:' + call.function.name }}
{{- written(call.function.arguments) }}{{ '<tool_call|>' }}{% endfor %}""",
    reasoning="'<|channel>thought\n' + m.reasoning_content + '\n<channel|>'",
)

GRANITE = _family(
    r"""{{ '<|tool_call|>[' }}
{%- for call in m.tool_calls %}{{ ', ' if not loop.first }}
{{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}{% endfor %}
{{- ']' }}"""
)

LFM = _family(
    r"""{{ '<|tool_call_start|>[' }}
{%- for call in m.tool_calls %}{{ (', ' if not loop.first else '') + call.function.name + '(' }}
{%- for key, value in call.function.arguments | items %}{{ ', ' if not loop.first }}
{{- key + '=' }}{{ "'" + value + "'" if value is string else value }}{% endfor %}
{{- ')' }}{% endfor %}{{ ']<|tool_call_end|>' }}""",
    reasoning="'<think>' + m.thinking + '</think>'",
    variable="thinking",
)

HARMONY = r"""
{%- for m in messages %}{{ '<|start|>' + m.role }}
{%- if m.role == 'assistant' %}
{%- if m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{{- '<|start|>assistant' }}{% endif %}
{%- if m.tool_calls %}{{ '<|channel|>commentary to=functions.' + m.tool_calls[0].function.name }}
{{- ' <|constrain|>json<|message|>' }}{{ m.tool_calls[0].function.arguments | tojson }}
{{- '<|call|>' }}
{%- else %}{{ '<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- else %}{{ '<|message|>' + m.content }}
{%- if tools and loop.last %}{{ tools | tojson }}{% endif %}{{ '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

FAMILIES = {
    "qwen_coder": QWEN_CODER,
    "glm": GLM,
    "glm_compact": GLM_COMPACT,
    "minimax": MINIMAX,
    "dsml": DSML,
    "dsml_tools": DSML_TOOLS,
    "deepseek": DEEPSEEK,
    "deepseek_fenced": DEEPSEEK_FENCED,
    "kimi": KIMI,
    "gemma": GEMMA,
    "granite": GRANITE,
    "lfm": LFM,
    "harmony": HARMONY,
}
"""Key a name in `known_syntaxes`, in small letters."""

KNOWING_TOOLS = {
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "named": MISTRAL_NAMED,
    **FAMILIES,
}

ONE_A_NOTATION = ("qwen", "llama", "mistral", "named", "qwen_coder", "gemma", "lfm", "harmony")
"""Names in `KNOWING_TOOLS`: one for each way to write a call."""
