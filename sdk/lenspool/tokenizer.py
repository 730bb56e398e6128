"""Tokenizing on the client, exactly as the model's own tokenizer does, without transformers.

A worker publishes its tokenizer as a JSON blob: the state of the fast tokenizer, the special tokens and the chat
template. Text is encoded with the tokenizer's own special tokens (BOS where it adds one); a chat is rendered by the
template, which writes its special tokens itself, and encoded without adding any.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer

from lenspool.errors import InvalidJob


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's part in some templates; prints its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
    """Jinja as transformers sets it up, so that a template renders to the same text."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


@lru_cache(maxsize=8)
def from_bytes(data: bytes) -> Tokenizer:
    """Tokenizer of a blob's JSON bytes; parsing takes a moment, so a process does it once per model."""
    return Tokenizer(json.loads(data))


class Tokenizer:
    """A model's tokenizer, from the blob that its worker published.

    Parameters
    ----------
    blob
        `{"tokenizer": <tokenizer.json>, "chat_template": str | None, "special_tokens": {"bos_token": ...}}`.

    Attributes
    ----------
    has_template
        Whether chats can be rendered.
    takes_tools
        Whether the chat template writes out the tools that it is given.
    """

    def __init__(self, blob: Mapping[str, Any]) -> None:
        self._fast = FastTokenizer.from_str(blob["tokenizer"])
        self._fast.no_truncation()
        self._fast.no_padding()
        self._special = dict(blob.get("special_tokens") or {})
        template: str | None = blob.get("chat_template")
        environment = _environment()
        self._template = environment.from_string(template) if template else None
        self.has_template = self._template is not None
        names = jinja2.meta.find_undeclared_variables(environment.parse(template)) if template else set()
        self.takes_tools = "tools" in names

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that this tokenizer adds by itself, or without."""
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Of each token of `encode(text)` the characters that it stands for, `[start, stop)`; none of a special one."""
        return list(self._fast.encode(text, add_special_tokens=True).offsets)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=True))

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=False))

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as text by itself, special tokens included; a part of a character shows as U+FFFD."""
        return [self.text([int(t)]) for t in token_ids]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        next_turn: bool | None = None,
    ) -> str:
        """Text of a chat by the model's template.

        Parameters
        ----------
        tools
            Schemas of functions that the model may call, for a template that `takes_tools`.
        next_turn
            Whether the prompt of the assistant's next turn is appended; default: unless the last message is the
            assistant's own.

        Raises
        ------
        InvalidJob
            No chat template, or the template refuses these messages.
        """
        if self._template is None:
            raise InvalidJob("prompt", "the model has no chat template", "text or token ids")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise InvalidJob(f"prompt[{i}]", f"got {message!r}", 'messages like {"role": "user", "content": "Hi"}')
        if next_turn is None:
            next_turn = not messages or messages[-1]["role"] != "assistant"
        shown = list(tools) if tools else None
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=next_turn, tools=shown, **self._special
            )
        except jinja2.TemplateError as error:
            raise InvalidJob("prompt", f"the chat template refused the messages: {error}") from None

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat: `render`, then encoded with no further special tokens."""
        return self.encode(self.render(messages), special=False)
