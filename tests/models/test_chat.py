"""Chat templates against transformers' own rendering, tokenizer objects, and names of repositories."""

import hashlib
import json
import pathlib
import re
import shutil
import sys

import pytest
from tokenizers import Tokenizer

import kvjax
import models

pytestmark = pytest.mark.usefixtures("quick_compile")  # tests/models/test_parity.py compiles as users do

pytest.importorskip("transformers", reason="templates are compared with transformers' rendering, which is not installed")

BUILTIN = models.builtin_directory()
# Short templates of our own, each in the manner and with the special tokens of a family.
LLAMA = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
FAMILIES = {
    "llama": (LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "qwen": (QWEN, {"bos_token": None, "eos_token": "<|im_end|>"}),
    "mistral": (MISTRAL, {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}),
}
USER = {"role": "user", "content": "What is 2 < 3 & \"so\"?\nSay 'it'."}
CHAT = [USER, {"role": "assistant", "content": "True."}, {"role": "user", "content": "Sure?"}]


def checkpoint(folder, **config):
    """A checkpoint directory with the built-in tokenizer and a tokenizer_config.json."""
    folder.mkdir()
    shutil.copy(BUILTIN / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return folder


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """Name, directory and transformers' tokenizer of a family."""
    import transformers

    template, tokens = FAMILIES[request.param]
    directory = checkpoint(tmp_path / request.param, chat_template=template, **tokens)
    return request.param, directory, transformers.PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("messages", [[USER], CHAT, CHAT[:2]], ids=["one", "turns", "open"])
def test_renders_as_transformers_does(family, messages):
    name, directory, theirs = family
    chat = models.ChatTemplate.from_directory(directory)
    ways = [{"add_generation_prompt": True}, {"add_generation_prompt": False}]
    if messages[-1]["role"] == "assistant":
        ways = [{"add_generation_prompt": False, "continue_final_message": True}]
    if name == "qwen":
        ways.append({"add_generation_prompt": True, "enable_thinking": False})
    for way in ways:
        assert chat.render(messages, **way) == theirs.apply_chat_template(messages, tokenize=False, **way)


ODD = [
    "{%- set ns = namespace(first=true) %}{% for m in messages %}{% if ns.first %}{{ m.content }}{% set ns.first = false %}"
    "{% endif %}{% break %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content | tojson(indent=2) }}{% endgeneration %}{% endfor %}",
    "{{ dict(a=1) | tojson }}{{ messages | tojson }}{{ tools is none }}{{ documents is none }}",
    "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}{% endfor %}",
    "{% for m in messages %}{{ m.content[0].text if m.content is not string else m.content }}{% endfor %}",
    "  {% if true %}\n   x{# comment #}\n  {% endif %}\n{{ strftime_now('%Y') }}{{ flag }}{{ many }}",
]


@pytest.mark.parametrize("template", ODD)
def test_renders_odd_templates_as_transformers_does(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": '<a> & "b" \u00e9'}, {"role": "assistant", "content": " c ", "thinking": "why"}]
    variables = {"flag": False, "many": (1, [2.5, None])}
    (theirs,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **variables)
    assert models.ChatTemplate(template).render(messages, **variables) == theirs


@pytest.mark.parametrize("template", ["<{{ messages[-1].content }}>", "<{{ messages[-1].content | trim }}>"])
def test_a_message_stays_open_as_in_transformers(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "assistant", "content": " c "}]
    (theirs,), _ = render_jinja_template([messages], chat_template=template, continue_final_message=True)
    way = {"add_generation_prompt": False, "continue_final_message": True}
    assert models.ChatTemplate(template).render(messages, **way) == theirs
    with pytest.raises(ValueError, match="the last message must be shown as it is"):
        models.ChatTemplate("nothing of content").render(messages, **way)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ raise_exception('no') }}",
        "{% include 'file' %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ 'x' * 'y' }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_fail_otherwise(template):
    with pytest.raises(ValueError, match="the chat template (refuses|cannot be rendered)"):
        models.ChatTemplate(template).render([USER])


def test_around_and_between_are_what_stands_around_and_between_messages(family):
    name, directory, theirs = family
    chat = models.ChatTemplate.from_directory(directory)
    (before, after), between = chat.around(), chat.between()
    expected = {
        "llama": (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
        ),
        "qwen": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n"),
        "mistral": ("<s>[INST] ", " [/INST]", "</s>[INST] "),
    }
    assert (before, after, between) == expected[name]
    whole = theirs.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert before + USER["content"] + after == whole
    talk = [USER, {"role": "assistant", "content": "An answer."}, {"role": "user", "content": "And then?"}]
    whole = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    said = " An answer." if name == "mistral" else "An answer."  # its template writes the space of an earlier answer
    assert before + USER["content"] + after + said + between + "And then?" + after == whole
    with pytest.raises(ValueError, match="a conversation needs a template that shows each turn once"):
        models.ChatTemplate("{{ messages[0]['content'] }}").between()


def test_system_message_and_variables(tmp_path):
    chat = models.ChatTemplate(*FAMILIES["qwen"])
    before, after = chat.around("Be brief.", enable_thinking=False)
    assert before == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert after == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    mistral = models.ChatTemplate(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(ValueError, match="refuses a conversation of system, user: Only user and assistant"):
        mistral.around("Be brief.")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0]['content'] | upper }}", "changes it or leaves it out"),
        ("{{ messages[0]['content'] | tojson }}", "changes it or leaves it out"),
        ("{{ messages[0]['content'] | replace('\n', ' ') }}", "changes it or leaves it out"),
        ("{{ messages[0]['role'] }}", "changes it or leaves it out"),
        ("{{ messages[0]['content'] }}|{{ messages[0]['content'] }}", "shows it 2 times"),
    ],
)
def test_templates_that_cannot_be_split(template, problem):
    with pytest.raises(ValueError, match=problem):
        models.ChatTemplate(template).around()


def test_malformed_conversations_are_refused():
    chat = models.ChatTemplate(QWEN)
    with pytest.raises(ValueError, match="at least one message"):
        chat.render([])
    with pytest.raises(ValueError, match="choose one"):
        chat.render(CHAT, continue_final_message=True)
    with pytest.raises(ValueError, match="refuses a conversation of user: .*endfor"):
        models.ChatTemplate("{% endfor %}").render([USER])


def test_an_identity_is_the_hash_of_the_template():
    assert models.ChatTemplate(QWEN).identity == hashlib.sha256(QWEN.encode()).hexdigest()[:12]
    assert models.ChatTemplate(QWEN).identity != models.ChatTemplate(LLAMA).identity


def test_templates_are_found_by_name_in_a_directory(tmp_path):
    assert models.ChatTemplate.from_directory(BUILTIN) is None
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    several = checkpoint(tmp_path / "several", chat_template=named)
    assert models.ChatTemplate.from_directory(several).template == "d"
    assert models.ChatTemplate.from_directory(several, "tool_use").template == "t"
    with pytest.raises(ValueError, match="no chat template 'rag', it has: default, tool_use"):
        models.ChatTemplate.from_directory(several, "rag")
    (several / "chat_template.jinja").write_text("file")
    (several / "special_tokens_map.json").write_text('{"bos_token": "<b>", "pad_token": null}')
    found = models.ChatTemplate.from_directory(several)
    assert (found.template, found.special_tokens) == ("file", {"bos_token": "<b>"})
    broken = checkpoint(tmp_path / "broken", chat_template=[{"name": "default"}])
    with pytest.raises(ValueError, match="must be text or a list of names and templates"):
        models.ChatTemplate.from_directory(broken)


def test_models_and_rendering_leave_transformers_alone_and_say_nothing(monkeypatch, capfd):
    files = pathlib.Path(models.__file__).parent.rglob("*.py")
    assert not [file for file in files if re.search(r"^\s*(import|from) transformers", file.read_text(), re.MULTILINE)]
    monkeypatch.setitem(sys.modules, "transformers", None)  # no import finds it
    assert models.ChatTemplate("{{ messages[0].content }}").render([USER]) == USER["content"]
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_of_transformers_is_taken_without_truncation(tmp_path):
    import transformers

    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(BUILTIN)
    ours = models.load_tokenizer(BUILTIN)
    text = "The special magic number for grumpy-lemon is: 7716845. Remember it."
    assert len(theirs(text, truncation=True, max_length=4).input_ids) == 4  # truncation stays on in its backend
    assert len(theirs.backend_tokenizer.encode(text).ids) == 4
    plain = models.as_tokenizer(theirs)
    assert isinstance(plain, Tokenizer) and plain.encode(text).ids == ours.encode(text).ids
    assert models.as_tokenizer(ours) is ours
    boundary = [kvjax.make("sentencekv", one, 5120).boundary for one in (ours, plain)]
    assert boundary[0].any() and (boundary[0] == boundary[1]).all()
    for wrong in ("gpt2", None, object()):
        with pytest.raises(ValueError, match=f"tokenizers.Tokenizer .*got {type(wrong).__name__}"):
            models.as_tokenizer(wrong)
