"""Chat messages to the prompt text, by the model's own Jinja template.

The environment is the one that templates on the hub are written for (transformers'
`apply_chat_template`): immutable sandbox, trimmed blocks, loop controls, plain `tojson`,
`raise_exception`, `strftime_now`, and `{% generation %}` blocks, which only mark text and render as it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from atom_async.text.messages import Message, plain_messages
from atom_async.text.tool_prompt import messages_with_tools

# Ends in a space on purpose: whether it survives shows if the template trims what it is given.
_END_MARK = "\ue000end of the final message\ue000 "
_OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "documents"})


class ChatTemplateError(ValueError):
    """These messages cannot be rendered; the message is fit for the client."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML characters, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template, and a second one for requests with tools where the model has one."""

    def __init__(
        self, source: str, *, tool_source: str | None = None, special_tokens: Mapping[str, str | None] | None = None
    ) -> None:
        """`special_tokens`: `bos_token`, `eos_token` and the like, as templates name them.

        Raises ValueError for a template that does not parse.
        """
        self._plain = _Compiled(source)
        self._for_tools = _Compiled(tool_source) if tool_source is not None else self._plain
        self._special_tokens = {name: token for name, token in (special_tokens or {}).items() if token is not None}

    @property
    def supports_tools(self) -> bool:
        """Whether the template renders tools itself. Otherwise they are written into the messages
        (`tool_prompt`)."""
        return "tools" in self._for_tools.variables

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt; special tokens are part of it, so encode it without adding any.

        `continue_final_message` leaves the last message open for the model to go on with.
        `template_kwargs` are the template's own variables, such as Qwen3's `enable_thinking`.
        Raises ChatTemplateError.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError("add_generation_prompt and continue_final_message exclude each other")
        compiled = self._for_tools if tools else self._plain
        compiled.check_variables(template_kwargs)
        try:
            plain = plain_messages(messages)
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        plain = compiled.with_known_roles(plain)
        if not self.supports_tools and (tools or _mentions_tools(plain)):
            plain, tools = messages_with_tools(plain, tools), None
        if continue_final_message:
            _mark_end(plain)
        text = compiled.render(
            **{**self._special_tokens, **template_kwargs},
            messages=plain,
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
        return _cut_at_mark(text) if continue_final_message else text


class _Compiled:
    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error
        self._knows_developer = "developer" in source

    def check_variables(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name in _OWN_NAMES or name not in self.variables:
                settable = ", ".join(sorted(self.variables - _OWN_NAMES)) or "none"
                raise ChatTemplateError(
                    f"this model's chat template has no variable {name!r} to set; it has: {settable}"
                )

    def with_known_roles(self, messages: list[Message]) -> list[Message]:
        """OpenAI's `developer` is what older templates call `system`."""
        if self._knows_developer:
            return messages
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]

    def render(self, **variables: Any) -> str:
        try:
            return self._template.render(**variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error.message}") from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ChatTemplateError(f"the model's chat template cannot render these messages: {error}") from error


def _mentions_tools(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _mark_end(messages: list[Message]) -> None:
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise ChatTemplateError("continue_final_message needs a last message with text content")
    messages[-1]["content"] = content + _END_MARK


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_END_MARK.rstrip())
    if at < 0:
        raise ChatTemplateError("continue_final_message: the chat template does not render the last message as it is")
    trimmed = not text.startswith(_END_MARK, at)
    return text[:at].rstrip() if trimmed else text[:at]
