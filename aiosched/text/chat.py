"""Chat templates: messages to the text that the model was trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from aiosched.errors import InvalidRequest

if TYPE_CHECKING:
    from aiosched.text.sandbox import BoundedEnvironment


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    **extra: Any,
) -> str:
    """Render a conversation by a Jinja2 chat template of the Hugging Face kind.

    The template is not trusted: it runs in a sandbox, with a budget of steps and of text, and sees
    copies of plain data. Compiled templates are kept.

    Args:
        template: Jinja2 source.
        messages: mappings with ``role``, a string, and ``content``: a string, a list of parts, or
            ``None`` beside tool calls. Further keys are handed on; those that are ``None`` are not.
        bos_token, eos_token: their text, which many templates write out.
        add_generation_prompt: end with what opens the assistant's answer.
        extra: further variables of the template, such as ``tools`` or ``documents``.

    Raises:
        InvalidRequest: a message is malformed (names index and field), or the template is, or it
            refuses these messages; the template's own words are in the error.
    """
    variables = {
        "tools": None,
        "documents": None,
        **{name: _plain(value, name) for name, value in extra.items()},
        "messages": _checked(messages),
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": add_generation_prompt,
    }
    from jinja2 import TemplateError

    try:
        return _environment().render(template, variables)
    except TemplateError as error:
        bound = f"a template that takes these messages: {error}"
    except Exception as error:  # a template can do anything Python's operators can
        bound = f"a template that takes these messages: {type(error).__name__}: {error}"
    raise InvalidRequest("chat_template", template, bound)


def prepare_template(template: str) -> None:
    """Import Jinja2 and compile ``template``, so that the first rendering does not take as long.

    What is wrong with the template is said when it is rendered.
    """
    with contextlib.suppress(Exception):
        _environment().compiled(template)


def _checked(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("messages", messages, "a list of at least one message")
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(where, message, "a mapping with role and content")
        for field in ("role", "content"):
            if field not in message and not (field == "content" and message.get("tool_calls")):
                raise InvalidRequest(f"{where}.{field}", None, "given")
        if not isinstance(message["role"], str) or not message["role"]:
            raise InvalidRequest(f"{where}.role", message["role"], "a string that is not empty")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise InvalidRequest(f"{where}.content", None, "given, unless there are tool calls")
        if not isinstance(content, (str, list, tuple, type(None))):
            raise InvalidRequest(f"{where}.content", content, "a string or a list of parts")
        # Templates test for a key, and write "None" for one that is there without a value.
        given = {key: value for key, value in message.items() if value is not None}
        checked.append(_plain(given, where))
    return checked


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Copy JSON-like data. Objects with methods of their own could be a way out of the sandbox."""
    if depth > 64:
        raise InvalidRequest(where, "…", "nested at most 64 deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (str, int, float)):  # an enum, say
        base = next(kind for kind in (str, int, float) if isinstance(value, kind))
        return base(value.value if hasattr(value, "value") else value)
    if isinstance(value, Mapping):
        return {
            _plain(key, where, depth + 1): _plain(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequest(where, value, "plain data: text, numbers, lists, mappings")


@cache
def _environment() -> BoundedEnvironment:
    """The one environment, made at first use: importing Jinja2 costs 40 ms."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    from aiosched.text.sandbox import BoundedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text for training; here it is its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
