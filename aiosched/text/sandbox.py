"""A Jinja2 environment for templates that nobody vouches for: they come with model files.

Jinja's own sandbox keeps a template away from Python's internals. It does not keep it from running
for ever or filling memory, so this environment adds a budget: loop turns, calls and text handled
all cost steps, and single values are bounded *before* they are built. It is a bound and not a
proof: a template that is set on it can still waste some seconds and some hundred megabytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sized
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
"""Loop turns and calls of one rendering; 64 characters or items handled count as one."""

MAX_CHARS = 1 << 24
"""Characters of a rendered text, and of any text or items of any list on the way."""

_MAX_BITS = 1 << 12  # of an integer
_AMPLIFIERS = frozenset(
    {"batch", "center", "expandtabs", "indent", "join", "ljust", "replace", "rjust", "round"}
    | {"slice", "to_bytes", "truncate", "wordwrap", "zfill"}
)
_TO_TEXT = frozenset(
    {"capitalize", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint"}
    | {"replace", "safe", "string", "striptags", "title", "tojson", "trim", "truncate", "upper"}
    | {"urlencode", "urlize", "wordcount", "wordwrap", "center"}
)
_FORBIDDEN = frozenset({"format_map", "translate"})
_UNSAFE_PERCENT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\*|\d{5})")
_UNSAFE_FORMAT = re.compile(r"\{[^{}]*(\{|\d{5})")

_steps_left: ContextVar[list[int]] = ContextVar("aiosched_template_steps_left")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An immutable sandbox whose templates have a budget; render with :meth:`render`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # Not optimized: constants are then folded while rendering, where there is a budget.
        super().__init__(optimized=False, finalize=self.check_output, **options)
        filters = {**self.filters, "tojson": tojson}
        self.filters = {name: self._bounded(name, f) for name, f in filters.items()}
        self.compiled = lru_cache(maxsize=64)(self.from_string)
        del self.globals["lipsum"]
        self.globals["namespace"] = TemplateNamespace
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Render the source text of a template.

        Raises:
            SecurityError: the template left the sandbox or its budget.
            Exception: whatever else a template does wrong.
        """
        compiled = self.compiled(template)
        token = _steps_left.set([MAX_STEPS])
        try:
            parts: list[str] = []
            size = 0
            for part in compiled.generate(variables):
                size += len(part)
                _limit(size)
                parts.append(part)
            return "".join(parts)
        finally:
            _steps_left.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        metered = _Meter().visit(tree)
        assert isinstance(metered, nodes.Template)
        return metered

    def tick(self, size: int) -> bool:
        """Charge one turn of a loop that writes ``size`` constant characters."""
        _charge(size)
        return True

    def join_text(self, *values: Any) -> str:
        """The ``~`` operator of metered templates."""
        text = "".join(str(self.check_output(value)) for value in values)
        _charged(text)
        return text

    def check_output(self, value: Any) -> Any:
        """Charge a text, or all that is in a list or mapping, before it is written.

        A list that holds a list twice, in a list that holds that twice, is small until written.
        """
        todo: list[Any] = [value] if isinstance(value, (list, tuple, dict, str)) else []
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                _charge(len(item))
                continue
            _charge(64 * len(item))
            parts = [*item, *item.values()] if isinstance(item, dict) else item
            todo += [part for part in parts if isinstance(part, (list, tuple, dict, str))]
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, float)):
            _check_growth(__obj.__name__, owner, *args, *kwargs.values())
        _charge()
        return _charged(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            if isinstance(left, Sized) or isinstance(right, Sized):
                _limit(_size(left) * _size(right))
            elif isinstance(left, int) and isinstance(right, int):
                _limit_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _limit_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(_UNSAFE_PERCENT, left)
            self.check_output(right)
        return _charged(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            if value.__name__ in _FORBIDDEN:
                raise SecurityError(f"{value.__name__} is not available to templates")
            _check_format(_UNSAFE_FORMAT, value.__self__.replace("{{", ""))
        return wrapped

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps the mark of filters that want the context or environment first
        def bounded(*args: Any, **kwargs: Any) -> Any:
            own = args[1:] if hasattr(function, "jinja_pass_arg") else args
            _check_growth(name, *own, *kwargs.values())
            if name == "format":
                _check_format(_UNSAFE_PERCENT, str(own[0]))
            if name in _TO_TEXT:
                self.check_output(own[0])
            return _charged(function(*args, **kwargs))

        return bounded


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: HTML is not escaped, as Jinja's own filter would."""
    if max(map(_size, (indent or 0, *(separators or ())))) > 64:
        raise SecurityError("tojson: an indent or separator of more than 64 characters")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class TemplateNamespace(Namespace):
    """``namespace()`` that takes no underscored names, the sandbox's sign of what is internal."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # as Jinja does, so that a name in the namespace may be "self"
        for name in dict(*rest, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Meter(NodeTransformer):
    """Charges each turn of a loop, and each item that its filter looks at, and bounds ``~``.

    It refers to methods of the environment by a node that no template can write or assign to.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        size += sum(len(const.value) for const in node.find_all(nodes.Const) if _is_text(const))
        self.generic_visit(node)
        tick = _call("tick", [nodes.Const(size)])
        node.body = [nodes.ExprStmt(tick, lineno=node.lineno), *node.body]
        if node.test is not None:
            node.test = nodes.And(_call("tick", [nodes.Const(0)]), node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("join_text", node.nodes)


def _is_text(const: nodes.Const) -> bool:
    return isinstance(const.value, str)


def _call(method: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _charge(size: int = 0) -> None:
    budget = _steps_left.get()
    budget[0] -= 1 + size // 64
    if budget[0] < 0:
        raise SecurityError(f"the template took more than {MAX_STEPS} steps")


def _charged(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple, dict)):
        _limit(len(value))
        _charge(len(value))
    return value


def _limit(size: int) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"the template made a value of more than {MAX_CHARS} characters")


def _limit_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise SecurityError(f"the template made an integer of more than {_MAX_BITS} bits")


def _size(value: Any) -> int:
    if isinstance(value, int):
        return max(1, value)
    return max(1, len(value)) if isinstance(value, Sized) else 1


def _check_growth(name: str, value: Any, *args: Any) -> None:
    """Bound what a function makes of ``value`` before it is called; refuse what cannot be."""
    if name in _FORBIDDEN:
        raise SecurityError(f"{name} is not available to templates")
    if name not in _AMPLIFIERS:
        _charge(_size(value) if isinstance(value, Sized) else 0)
    elif name == "replace" and len(args) == 2 and all(isinstance(s, str) for s in (value, *args)):
        _limit(len(value) + value.count(args[0]) * len(args[1]))
    else:
        size = _size(value) if isinstance(value, Sized) else 1
        _limit(size * max(map(_size, args), default=1))


def _check_format(unsafe: re.Pattern[str], text: str) -> None:
    if unsafe.search(text):
        raise SecurityError(f"a width of {MAX_RANGE} or more, or one that is computed")


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name with an underscore first: {name!r}")
