"""Tool calls as a model writes them."""

import json
from typing import Any

from legato.text.message_syntax import ToolCallSyntax


def written(syntax: ToolCallSyntax, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls by their names and arguments, each in the syntax."""
    if syntax.name_end:
        return "".join(f"{syntax.begin}{name}[ARGS]{json.dumps(args)}" for name, args in calls)
    objects = [json.dumps({"name": name, syntax.arguments_key: args}) for name, args in calls]
    if syntax.is_list:
        return f"{syntax.begin}[{', '.join(objects)}]"
    if syntax.is_bare:
        return syntax.separator.join(objects)
    return "\n".join(f"{syntax.begin}\n{text}\n{syntax.end}" for text in objects)
