"""Chat templates: conversations as their templates say, and one line for what cannot be used.

Data flow: template, messages → `ChatTemplate.render` → text, or `UserError`.

Worked example: "{{ 1 / 0 }}" is refused as "here: the chat template is unusable (division by zero)".
"""

import time

import pytest

from inference_engine.chat_template import ChatTemplate, Message
from layers.errors import UserError
from tests.extras import NEEDS_JINJA

pytestmark = NEEDS_JINJA

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def test_a_chat_is_rendered_as_its_template_says() -> None:
    chat = [Message("system", "Be short."), Message("user", "Hi {{ 1 }}")]
    expected = "<|start|>system\nBe short.<|end|>\n<|start|>user\nHi {{ 1 }}<|end|>\n<|start|>assistant\n"
    assert ChatTemplate("here", CHATML).render(chat) == expected
    looped = (
        "{%- for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{{ bos_token }}{{ m.content | trim }}{%- endfor %}"
    )
    assert ChatTemplate("here", looped, bos="<s>").render(chat) == "<s>Hi {{ 1 }}"
    assert ChatTemplate("here", "{{ messages | tojson }}").render(chat[:1]).startswith('[{"role": "system"')


UNUSABLE = {
    "refusal": (
        "{{ raise_exception('roles must alternate') }}",
        "the chat template says: roles must alternate",
    ),
    "syntax": ("{% for m in %}", "the chat template is unusable ("),
    "undefined call": ("{{ nothing() }}", "the chat template is unusable ("),
    "underscores": ("{{ ''.__class__.__mro__ }}", "the chat template is unusable ("),
    "change": ("{{ messages.append(1) }}", "the chat template is unusable ("),
    "long range": ("{% for i in range(10 ** 9) %}x{% endfor %}", "the chat template is unusable ("),
    "nothing": ("", "the chat template makes a text of 0 characters"),
    "import": ("{% include 'secret' %}", "the chat template is unusable ("),
    "division": ("{{ 1 / 0 }}", "the chat template is unusable (division by zero)"),
    "nested loops": (
        "".join(f"{{% for a{depth} in [1] %}}" for depth in range(25)) + "x" + "{% endfor %}" * 25,
        "the chat template is unusable (too many statically nested blocks",
    ),
    "nested conditions": (
        "{% if true %}" * 120 + "x" + "{% endif %}" * 120,
        "the chat template is unusable (too many levels of indentation",
    ),
    "deep expression": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "the chat template is unusable ("),
    "deep sum": ("{{ " + "1 + " * 5000 + "1 }}", "the chat template is unusable ("),
}


@pytest.mark.parametrize(("template", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_template_is_refused_in_one_line(template: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        ChatTemplate("here", template).render([Message("user", "Hi")])
    assert str(error.value).startswith(f"here: {message}")
    assert "\n" not in str(error.value)


TWICE = "{% set x = x ~ x %}"
LISTS = "{% set x = [x, x] %}"
ENDLESS = {
    "loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "loops over a text": "{% for i in 'a' * 99999 %}" * 3 + "{% endfor %}" * 3,
    "written loops": "{% for i in range(99999) %}" * 2 + "{{ 'long' * 99 }}" + "{% endfor %}" * 2,
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "recursive loop of many": (
        "{% set many = range(99999) | list %}{% for i in many recursive %}"
        "{{ loop(many) if loop.depth < 3 }}{% endfor %}"
    ),
    "power": "{{ 10 ** (10 ** 9) }}",
    "powers": "{% set x = 10 ** 999 %}{{ x ** 999 ** 2 }}",
    "product": "{{ 'a' * (10 ** 10) }}",
    "product of a list": "{{ ([1] * (10 ** 10)) | length }}",
    "number of times": "{{ (10 ** 10) * 'a' }}",
    "joined twice": "{% set x = 'ab' %}" + TWICE * 40 + "{{ x }}",
    "joined in a call": "{% set x = 'a' * 9999999 %}{{ (x ~ (x ~ x)) | length }}",
    "summed twice": "{% set x = 'ab' %}" + TWICE.replace("~", "+") * 40 + "{{ x }}",
    "lists of lists": "{% set x = [1] %}" + LISTS * 40 + "{{ x }}",
    "lists as json": "{% set x = [1] %}" + LISTS * 40 + "{{ x | tojson | length }}",
    "lists in a text": "{% set x = [1] %}" + LISTS * 40 + "{{ ('%s' % x) | length }}",
    "padded": "{{ 'a' | center(10000000000) }}",
    "padded by a method": "{{ 'a'.ljust(10000000000) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percents": "{{ '%9999999d%9999999d%9999999d' % (1, 2, 3) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "format map": "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "json indent": "{{ messages | tojson(indent=9999999) }}",
    "replace": "{% set x = 'a' * 99999 %}{{ x | replace('a', x) | length }}",
    "replace by a method": "{% set x = 'a' * 99999 %}{{ x.replace('', x) | length }}",
    "join": "{% set x = 'a' * 99999 %}{{ range(9999) | join(x) | length }}",
    "join by a method": "{% set x = 'a' * 99999 %}{{ x.join(x) | length }}",
    "indent": "{{ ('\\n' * 99999) | indent(99999) | length }}",
    "set block": "{% set b %}{% for i in range(9999) %}{{ 'a' * 999999 }}{% endfor %}{% endset %}x",
    "plain text": "{% set b %}{% for i in range(99999) %}" + "a" * 99999 + "{% endfor %}{% endset %}x",
    "lipsum": "{{ lipsum(999999) | length }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_takes_too_much_is_ended_soon(template: str) -> None:
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"^here: the chat template is unusable \([^\n]*\)$"):
        ChatTemplate("here", template).render([Message("user", "Hi")])
    assert time.monotonic() - begin < 8


def test_a_template_has_an_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from inference_engine import template_sandbox

    monkeypatch.setattr(template_sandbox, "_MAX_SECONDS", -1.0)
    with pytest.raises(UserError, match=r"unusable \(it takes more than -1 seconds"):
        ChatTemplate("here", CHATML).render([Message("user", "Hi")])


def test_what_is_bounded_is_jinja_s_otherwise() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = (
        "{% macro m(x, y=2) %}{{ x ~ '/' ~ (y ~ x) }};{% endmacro %}{{ m('a') }}{{ m(1.5, y=none) }}"
        "{% for k, v in {'a': 1, 'b': [2, 3]}.items() %}"
        "{{ loop.index }}{{ k }}{{ v }}{{ loop.last }}{% endfor %}"
        "{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}"
        "{% for i in missing %}no{% else %}none{% endfor %}"
        "{% for i in range(9) if i % 3 == 1 %}{{ i }}{% endfor %}"
        "{{ ['a', 'b'] | join(', ') }}{{ ', '.join(['a', 'b']) }}"
        "{{ 'abc' | replace('b', 'x') }}{{ 'a'.upper() }}"
        "{{ '%03d|%s' % (7, 'é') }}{{ '{} {a:>4}'.format(1, a='b') }}{{ [1] + [2] }}"
        "{{ 2 ** 10 * 1.5 + 10 ** 9 }}"
        "{{ messages | map(attribute='role') | list }}{{ messages[0].content | trim | indent(4) }}"
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.role ~ loop.index0 %}"
        "{% endfor %}{{ ns.x }}{{ undefined_name }}{{ none }}"
        "{{ true and 'x' ~ 1 }}{{ 'a' if not missing ~ '' }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map('replace', 'a', 'b') | list | length }}"
        "{% filter upper %}a{{ 1 ~ 'b' }}{% endfilter %}{% call(v) m2() %}{{ v ~ 'c' }}{% endcall %}"
    )
    template = "{% macro m2() %}<{{ caller(3) }}>{% endmacro %}" + template
    messages = [Message("system", "one\n two "), Message("user", "x" * 200_000)]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    values = [{"role": message.role, "content": message.content} for message in messages]
    assert ChatTemplate("here", template).render(messages) == plain.render(messages=values)
    assert len(ChatTemplate("here", CHATML).render(messages)) > 200_000
    many = [Message("user", str(turn)) for turn in range(1000)]
    last = "{% for m in messages %}{% if loop.index == messages | length %}x{% endif %}{% endfor %}"
    assert ChatTemplate("here", last).render(many) == "x"
