"""From a row of a source to a request: a column, or a Jinja template over all columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class UnusableRow(Exception):
    """A row from which no prompt can be made; the message has the reason."""


class PromptForm(Protocol):
    """The fields of `PromptsConfig` that define how a row becomes a prompt."""

    @property
    def column(self) -> str | None: ...

    @property
    def template(self) -> str | None: ...

    @property
    def chat(self) -> bool: ...

    @property
    def system(self) -> str | None: ...


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


@cache
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def check_template(template: str) -> None:
    """Raises ValueError if a template is invalid."""
    try:
        _compiled(template)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ValueError(f"expected a Jinja template, found: {error}" + (f", in line {line}" if line else "")) from None


def prompt_maker(form: PromptForm) -> Callable[[Mapping[str, Any]], str | list[dict[str, Any]]]:
    """Returns a function that makes a prompt, a text or messages, from a row, or raises `UnusableRow`."""

    def made(row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        content = _rendered(form.template, row) if form.template is not None else _content(form, row)
        if not form.chat:
            if not isinstance(content, str):
                raise UnusableRow(f"expected a text as the prompt, found {type(content).__name__}; a chat takes lists")
            return content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else _messages(content)
        return [{"role": "system", "content": form.system}, *messages] if form.system is not None else messages

    return made


def _content(form: PromptForm, row: Mapping[str, Any]) -> Any:
    names = [form.column] if form.column else (["messages", "prompt"] if form.chat else ["prompt"])
    for name in names:
        if name in row:
            return row[name]
    raise UnusableRow(f"expected a column {' or '.join(names)}, found {', '.join(row) or 'none'}")


def _rendered(template: str, row: Mapping[str, Any]) -> str:
    try:
        return _compiled(template).render(**row)
    except Exception as error:
        raise UnusableRow(f"the template cannot be filled: {error or type(error).__name__}") from error


def _messages(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not content:
        raise UnusableRow(f"expected a text or a list of messages, found {type(content).__name__}")
    for message in content:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UnusableRow("expected messages with role and content, found another value among them")
    # Parquet and Arrow give each message the fields of all messages.
    return [{name: value for name, value in message.items() if value is not None} for message in content]
