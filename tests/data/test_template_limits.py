"""Chat templates that would never end, or fill the memory, are refused by name."""

from __future__ import annotations

import json
import resource
import time
from functools import partial
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moemesh.data.chat import ChatTemplate
from moemesh.data.records import BadRecordError, Where
from moemesh.data.template_limits import LimitedEnvironment, TemplateLimitError, sizes_of
from tests.data.templates import TEMPLATES, written

HERE = Where("chat.jsonl", "line", 7, 90)
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
GROWING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}STEP{% endfor %}{{ END }}"


def growing(start: str, step: str, end: str = "ns.x | length") -> str:
    text = GROWING.replace("START", start).replace("STEP", step)
    return text.replace("END", end)


ENDLESS: dict[str, str] = {
    "a power": "{{ 9**(9**9) }}",
    "a product": growing("3", "{% set ns.x = ns.x * ns.x %}", "1"),
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width that is given": "{{ '%*d' % (10**9, 1) }}",
    "a precision": "{{ '%.1000000000f' | format(1.0) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format of a format": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "format with a bracket": "{{ '{a[}]:>{w}}'.format(a={'}': 1}, w=10**9) }}",
    "format_map": "{{ '{a:{w}}'.format_map({'a': 1, 'w': 10**9}) }}",
    "places of a format": "{{ ('%(x)s' * 10**5) % {'x': 'a' * 10**6} }}",
    "a text": "{{ 'a' * 10**10 }}",
    "a list": "{{ 10**9 * [0] }}",
    "a sum of lists": "{{ ([range(99999) | list] * 10**4) | sum(start=[]) }}",
    "joined": growing("'a'", "{% set ns.x = ns.x ~ ns.x %}"),
    "added": growing("'a'", "{% set ns.x = ns.x + ns.x %}"),
    "added to literals": growing("['a']", "{% set ns.x = ns.x + ['b'] + ns.x %}"),
    "written": growing("'a'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "a list of itself": growing("['a']", "{% set ns.x = [ns.x, ns.x] %}", "ns.x"),
    "its JSON": growing("['a']", "{% set ns.x = [ns.x, ns.x] %}", "ns.x | tojson | length"),
    "loops": "{% for i in R %}{% for j in R %}{% for k in R %}{% endfor %}{% endfor %}{% endfor %}",
    "a condition": "{% for i in R if R | map('string') | list | length == 0 %}{% endfor %}",
    "literal text": "{% for i in R %}{% for j in R %}" + "a" * 999 + "{% endfor %}{% endfor %}",
    "a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "text of a macro": "{% macro m() %}" + "a" * 10**5 + "{% endmacro %}"
    "{% for i in R %}{{ m() }}{% endfor %}",
    "center": "{{ 'x' | center(10**10) }}",
    "mapped": "{{ ['x'] | map('center', 10**9) | list }}",
    "a block": "{% filter center(1000000000) %}x{% endfilter %}",
    "a method": "{{ 'x'.ljust(10**10) }}",
    "a keyword": "{{ 'x'.center(width=10**10) }}",
    "bytes": "{{ 'x'.encode().ljust(10**10) }}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big') }}",
    "indent": "{{ 'a' | indent(10**9) }}",
    "JSON": "{{ [1] | tojson(indent=1000000000) }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "the filter replace": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "join": "{{ (['a' * 10**6] * 10**6) | join }}",
    "the method join": "{{ ''.join(['a' * 10**6] * 10**6) }}",
    "translate": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "tabs": "{{ ('\\t' * 10**6).expandtabs(10**6) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "round": "{{ 1.5 | round(10**9) }}",
    "wordwrap": "{{ ('a b ' * 10**4) | wordwrap(1, wrapstring='x' * 10**6) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_without_an_end(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("moemesh.data.template_limits.SECONDS", 0.15)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    source = ENDLESS[name].replace("in R ", "in range(99999) ").replace("if R ", "if range(99999) ")
    template = ChatTemplate(source + "{{ messages[1].content }}", {}, "folder")
    reason = (
        r"line 7, byte 90: the chat template \(folder\) fails: "
        r"it (makes|takes|computes a number|formats)"
    )
    with pytest.raises(BadRecordError, match=reason):
        template.render({"messages": TALK}, HERE)
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024


def test_the_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moemesh.data.template_limits.SECONDS", 0.0)
    with pytest.raises(BadRecordError, match="takes more than 0 seconds"):
        ChatTemplate("{% for i in messages %}{% endfor %}", {}, "x").render(
            {"messages": TALK}, HERE
        )


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_the_plain_sandbox(name: str) -> None:
    options = {"trim_blocks": True, "lstrip_blocks": True}
    plain = ImmutableSandboxedEnvironment(**options)
    limited = LimitedEnvironment(**options)
    to_json = partial(json.dumps, ensure_ascii=False)
    plain.filters["tojson"] = to_json
    limited.add_filter("tojson", to_json)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": ["ü"]}}}]
    talk = [*TALK, {"role": "user", "content": "long " * 10_000}, *TALK[1:]]
    values = {"messages": talk, "tools": tools, "bos_token": "<s>", "eos_token": "</s>"}
    limited.begin(sizes_of([talk, tools]))
    source = written(name, blocks=False)
    assert limited.from_string(source).render(values) == plain.from_string(source).render(values)


def test_operators_are_those_of_jinja() -> None:
    source = (
        "{{ 1 + 2 + messages | length }} {{ ('a' + x) + ('b' + x) }} {{ [1] + y + [2] + y }} "
        "{{ x ~ 1 ~ none ~ y }} {{ 2 ** 10 }} {{ '%s-%03d' % (x, 7) }} {{ '{}'.format(10**8) }} "
        "{{ 'a,b'.split(',') | map('upper') | join('+') }} {{ 1700000000 | default(3) }} "
        "{% for i in y if i > 3 %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}"
    )
    values = {"messages": TALK, "x": "ü", "y": [3, 4, 5]}
    expected = ImmutableSandboxedEnvironment().from_string(source).render(values)
    assert LimitedEnvironment().from_string(source).render(values) == expected


def test_the_limit_grows_with_the_conversation(tmp_path: Path) -> None:
    content = "x" * (1 << 22)
    source = "{% for i in range(12) %}{{ messages[0].content }}{% endfor %}"
    talk = [{"role": "assistant", "content": content}]
    assert len(ChatTemplate(source, {}, "x").render({"messages": talk}, HERE).text) == 12 << 22
    environment = LimitedEnvironment()
    with pytest.raises(TemplateLimitError, match=r"more than 16,777,216 characters"):
        environment.from_string(source).render(messages=talk)


def test_a_template_of_many_brackets_is_broken() -> None:
    from moemesh.data.tokenizer import DataError

    with pytest.raises(DataError, match="the chat template is broken"):
        ChatTemplate("{{ " + "(" * 100_000 + " }}", {}, "x")
