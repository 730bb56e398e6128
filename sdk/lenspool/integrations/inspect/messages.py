"""From inspect's chat messages to token ids, by the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ContentReasoning,
    ContentText,
)
from inspect_ai.tool import ToolInfo

from lenspool.errors import InvalidJob
from lenspool.tokenizer import Tokenizer

Message = dict[str, Any]


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[ChatMessage], tools: Sequence[ToolInfo]) -> list[int]:
    """Token ids of a chat, with the beginning of the assistant's next turn.

    Tools and their history go through the template where it takes tools, otherwise into the text (`in_words`). Of a
    model without a template the texts are joined by newlines.

    Raises
    ------
    InvalidJob
        Something other than text, or tools without a chat template.
    """
    if not tokenizer.has_template:
        if tools:
            raise InvalidJob("tools", "tool use needs a chat template, which the model has not", "no tools")
        return tokenizer.encode("\n".join(_text(m) for m in messages))
    if tokenizer.takes_tools:
        schemas = [_schema(tool) for tool in tools]
        text = tokenizer.render([_native(m) for m in messages], tools=schemas, next_turn=True)
    else:
        text = tokenizer.render(in_words(messages, tools), next_turn=True)
    return tokenizer.encode(text, special=False)


def _text(message: ChatMessage) -> str:
    """Text of a message; reasoning as models write it."""
    if isinstance(message.content, str):
        return message.content
    parts = []
    for part in message.content:
        if isinstance(part, ContentReasoning):
            parts.append(f"<think>\n{part.reasoning}\n</think>\n")
        elif isinstance(part, ContentText):
            parts.append(part.text)
        else:
            raise InvalidJob(f"input ({message.role})", f"holds {part.type}", "text")
    return "".join(parts)


def _answer(message: ChatMessageTool) -> str:
    return f"Error: {message.error.message}" if message.error else _text(message)


def _schema(tool: ToolInfo) -> dict[str, Any]:
    described = tool.model_dump(exclude_none=True, include={"name", "description", "parameters"})
    return {"type": "function", "function": described}


def _native(message: ChatMessage) -> Message:
    """A message as templates that take tools want it."""
    if isinstance(message, ChatMessageTool):
        told = {"name": message.function, "tool_call_id": message.tool_call_id}
        return {"role": "tool", "content": _answer(message), **{k: v for k, v in told.items() if v is not None}}
    out: Message = {"role": message.role, "content": _text(message)}
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        out["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.function, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return out


def in_words(messages: Sequence[ChatMessage], tools: Sequence[ToolInfo]) -> list[Message]:
    """Messages for a template that knows no tools: schemas, calls and results are written into the text.

    In the form of Hermes and Qwen: schemas in the system message, `<tool_call>` blocks in the assistant's, results as
    `<tool_response>` in the user's.
    """
    out: list[Message] = []
    for message in messages:
        role, text = message.role, _text(message)
        if isinstance(message, ChatMessageTool):
            result = {"name": message.function, "content": _answer(message)}
            role, text = "user", f"<tool_response>\n{json.dumps(result)}\n</tool_response>"
        elif isinstance(message, ChatMessageAssistant) and message.tool_calls:
            calls = [{"name": call.function, "arguments": call.arguments} for call in message.tool_calls]
            blocks = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
            text = "\n".join([*([text] if text else []), *blocks])
        if out and out[-1]["role"] == role == "user":
            out[-1]["content"] += f"\n{text}"
        else:
            out.append({"role": role, "content": text})
    if tools:
        if not out or out[0]["role"] != "system":
            out.insert(0, {"role": "system", "content": ""})
        schemas = "\n".join(json.dumps(_schema(tool)) for tool in tools)
        out[0]["content"] = f"{out[0]['content']}\n\n{_TOOLS.format(schemas)}".strip()
    return out


_TOOLS = """You may call these functions, whose signatures are given as JSON Schema:
<tools>
{}
</tools>
To call one, answer with its name and arguments as JSON within tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
