"""Tool calls that a model wrote into its text, by inspect's conventions."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from inspect_ai.model._call_tools import parse_tool_call, tool_parse_error_message
from inspect_ai.tool import ToolCall, ToolInfo

_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def find_calls(text: str, tools: Sequence[ToolInfo]) -> tuple[str, list[ToolCall]]:
    """Text without the calls in it, and the calls.

    Calls are `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or one bare object of this form (also with
    `parameters`). What stands in such a block and is no call becomes one with a `parse_error`, which inspect tells the
    model; text that a length limit cut off in a block too.
    """
    blocks = _BLOCK.findall(text)
    if blocks:
        return _BLOCK.sub("", text).strip(), [_call(block, list(tools)) for block in blocks]
    start, end = _bare(text, {tool.name for tool in tools})
    if end:
        return (text[:start] + text[end:]).strip(), [_call(text[start:end], list(tools))]
    return text, []


def _bare(text: str, names: set[str]) -> tuple[int, int]:
    """Where the first JSON object stands, if it is a call; (0, 0) if not."""
    start = text.find("{")
    if start < 0:
        return 0, 0
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return 0, 0
    named = isinstance(value, dict) and isinstance(value.get("name"), str)
    return (start, end) if named and (value["name"] in names or _arguments(value) is not None) else (0, 0)


def _arguments(call: dict[str, Any]) -> Any:
    return call.get("arguments", call.get("parameters"))


def _call(block: str, tools: list[ToolInfo]) -> ToolCall:
    id = f"call_{uuid.uuid4().hex[:12]}"
    try:
        call = json.loads(block)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError('no JSON object with "name" and "arguments"')
    except (ValueError, RecursionError) as error:
        message = tool_parse_error_message(block, error)
        return ToolCall(id=id, function="unknown", arguments={}, parse_error=message)
    arguments = _arguments(call)
    written = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return parse_tool_call(id, call["name"], written, tools)
