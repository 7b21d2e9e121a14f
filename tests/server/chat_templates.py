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

KNOWING_TOOLS = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "named": MISTRAL_NAMED}
