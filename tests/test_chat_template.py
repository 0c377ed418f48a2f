"""Chat templates: conversations as their templates say, and one line for what cannot be used.

Data flow: template, messages → `ChatTemplate.render` → text, or `UserError`.

Worked example: "{{ 1 / 0 }}" is refused as "here: the chat template is unusable (division by zero)".
"""

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
}


@pytest.mark.parametrize(("template", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_template_is_refused_in_one_line(template: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        ChatTemplate("here", template).render([Message("user", "Hi")])
    assert str(error.value).startswith(f"here: {message}")
    assert "\n" not in str(error.value)
