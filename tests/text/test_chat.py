"""Chat templates render as those of Hugging Face do, and an untrusted one stays in its box."""

from __future__ import annotations

import json
import re
import time
from enum import StrEnum
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from aiosched.errors import InvalidRequest
from aiosched.text import sandbox
from aiosched.text.chat import render_chat

HI = [{"role": "user", "content": "hi <b>&"}]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(template: str, messages: Any = HI, **extra: Any) -> str:
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **extra)


def test_messages_are_written_in_the_models_format() -> None:
    text = "<|im_start|>user\nhi <b>&<|im_end|>\n"
    assert render(CHATML) == text + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == text


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{%- for m in messages if m.role != 'system' %}\n  {{ m | tojson }}\n{%- endfor %}\n",
        "{{ tools | tojson(indent=2) }}{{ {'a': 1, 'é': [none, true]} | tojson }}",
        "{% for m in messages %}{{ loop.index0 ~ '/' ~ loop.length }}"
        "{% if loop.last %}{% break %}{% endif %}{% else %}none{% endfor %}",
        "{% set ns = namespace(n=0, self=3) %}{% for m in messages * 3 %}{% set ns.n = ns.n + 1 %}"
        "{% if ns.n == 2 %}{% continue %}{% endif %}{{ ns.n }}{% endfor %}{{ ns.self }}",
        "{% generation %}{{ messages[-1]['content'].split('<')[0].strip() }}{% endgeneration %}",
        "{% macro show(m, sep=': ') %}{{ m.role + sep + m.content }}{% endmacro %}"
        "{{ show(messages[0]) }}{{ caller is defined }}{{ range(3) | list }}{{ [1, 'a'] }}",
        "{% for a in [[1, [2]], [3]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
        "{{ '%s is %d' % ('x', 3) }}{{ '{:>5}{{}}'.format('y') }}{{ dict(a=1).a }}{{ missing }}"
        "{{ messages | map(attribute='role') | join(',') }}{{ 'ab' | replace('a', 'c') | upper }}",
    ],
)
def test_a_template_gives_what_transformers_gives(template: str) -> None:
    messages = [{"role": "system", "content": "é"}, *HI, {"role": "user", "content": "x<y"}]
    tools = [{"type": "function", "function": {"name": "f<1>"}}]
    theirs, _ = render_jinja_template(
        [messages], chat_template=template, tools=tools, add_generation_prompt=True
    )
    assert render(template, messages, tools=tools) == theirs[0]


def test_the_tokens_of_begin_and_end_and_more_are_at_hand() -> None:
    template = "{{ bos_token }}{{ custom.x }}{{ tools is none }}{{ eos_token }}"
    assert render(template, custom={"x": 1}) == "<s>1True</s>"


def test_the_date_is_at_hand() -> None:
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))


def test_what_the_template_refuses_is_one_error_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "Expected an expression"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.x.y }}", "no attribute 'x'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("(" * 10 + "{{ " + "(" * 20_000, "RecursionError|Template|unexpected"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_a_broken_template_is_one_error(template: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        render(template)
    assert caught.value.field == "chat_template"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([HI[0], "hi"], "messages[1]"),
        ([HI[0], {"content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"image": object()}]}], "messages[0].content[0].image"),
    ],
)
def test_a_malformed_message_is_named_by_index_and_field(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(CHATML, messages)
    assert caught.value.field == field


def test_data_nested_without_end_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidRequest, match="nested"):
        render(CHATML, [{"role": "user", "content": loop}])


def test_tool_calls_need_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None}
    template = (
        "{{ messages[0].content }}|{{ messages[0].tool_calls[0].id }}|{{ 'name' in messages[0] }}"
    )
    assert render(template, [message]) == "|1|False"


def test_a_template_sees_plain_copies() -> None:
    class Role(StrEnum):
        USER = "user"

    class Text(str):
        def secret(self) -> str:
            return "out"

    messages = [{"role": Role.USER, "content": Text("x")}]
    assert render("{{ messages[0].role ~ messages[0].content }}", messages) == "userx"
    assert render("{{ messages[0].content.secret is defined }}", messages) == "False"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__globals__ }}",
        "{{ (messages | attr('__class__')).__init__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ self._TemplateReference__context.environment }}{{ self.__init__.__globals__.os.name }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '%s' | format(messages.__class__.__mro__) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_change_its_data(template: str) -> None:
    messages = [dict(HI[0])]
    try:
        text = render(template, messages)
    except InvalidRequest:
        text = ""
    assert text == ""
    assert messages == HI


R = "range(100000)"
DOUBLE = (
    "{{% set ns = namespace(s={0}) %}}"
    "{{% for _ in range(60) %}}{{% set ns.s = {1} %}}{{% endfor %}}"
)
FORK = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ range(1000000000) | list }}",
        f"{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
        f"{{% for a in {R} %}}{{% for b in {R} if false %}}{{% endfor %}}{{% endfor %}}",
        f"{{% for a in {R} %}}{{% set x = {R} | list %}}{{% endfor %}}",
        f"{{% for a in {R} recursive %}}{{{{ loop({R}) }}}}{{% endfor %}}",
        FORK,
        f"{{% for a in {R} %}}{{{{ 'x' * 1000 }}}}{{% endfor %}}",
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.zfill(width) }}",
        "{{ ('x' * 9999999) | replace('x', 'y' * 9999999) }}",
        "{{ ('x' * 9999999).replace('x', 'y' * 9999999) }}",
        "{{ ('x' * 9999999).join(range(99999) | map('string') | list) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ 1.5 | round(1000000000) }}",
        "{{ lipsum(n=100000) }}",
        "{{ 'x' | indent(1000000000, first=true) }}",
        "{{ 'a'.translate({97: 'x' * 9999999}) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        DOUBLE.format("'xy'", "ns.s ~ ns.s"),
        DOUBLE.format("'xy'", "ns.s + ns.s"),
        DOUBLE.format("'xy'", "'%s%s' % (ns.s, ns.s)"),
        DOUBLE.format("'xy'", "'{0}{0}'.format(ns.s)"),
        DOUBLE.format("'xy'", "[ns.s, ns.s] | join"),
        DOUBLE.format("3", "ns.s * ns.s"),
        DOUBLE.format("[1]", "[ns.s, ns.s]") + "{{ ns.s }}",
        DOUBLE.format("[1]", "[ns.s, ns.s]") + "{{ ns.s ~ '' }}",
        DOUBLE.format("[1]", "[ns.s, ns.s]") + "{{ ns.s | string }}",
        DOUBLE.format("[1]", "[ns.s, ns.s]") + "{{ ns.s | tojson }}",
        DOUBLE.format("[1]", "{{'a': ns.s, 'b': ns.s}}") + "{{ ns.s }}",
        "{% set s = 'x' * 9999999 %}{{ [s] * 9999 }}",
        "{{ ([[1] * 9999] * 9999) | tojson }}",
        f"{{% set s = 'x' * 999999 %}}{{% set t %}}{{% for _ in {R} %}}{{{{ s }}}}{{% endfor %}}"
        "{% endset %}",
        f"{{% set t %}}{{% for _ in {R} %}}{'x' * 99_999}{{% endfor %}}{{% endset %}}",
        f"{{% set t %}}{{% for _ in {R} %}}{{{{ '{'x' * 99_999}' }}}}{{% endfor %}}{{% endset %}}",
        "{{ [[1] * 9999] | tojson(indent=9999) }}",
    ],
)
def test_a_template_cannot_run_or_allocate_without_end(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=r"template (took|made|that)"):
        render(template, width=1_000_000_000)
    assert time.process_time() - start < 5


def test_a_long_conversation_is_within_the_budget() -> None:
    messages = [{"role": "user", "content": "x" * 1_000} for _ in range(3_000)]
    template = (
        "{% for m in messages %}{{ m.role ~ (m.content | trim | replace('y', '')) }}{% endfor %}"
    )
    assert len(render(template, messages)) == 3_000 * 1_004


def test_a_template_is_compiled_once() -> None:
    from aiosched.text.chat import _environment

    template = "{{ 'compiled once' }}"
    before = _environment().compiled.cache_info()
    render(template)
    render(template)
    after = _environment().compiled.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)


def test_tojson_writes_text_as_it_is() -> None:
    value = {"html": "<b>&'", "é": "世"}
    assert render("{{ v | tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
