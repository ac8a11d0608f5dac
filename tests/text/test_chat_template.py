"""Rendered chats, byte for byte those of transformers, and what is refused."""

import copy
import json
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_async.model.resolve import ResolvedModel
from atom_async.text.chat_template import ChatTemplate, ChatTemplateError
from atom_async.text.tokenizer import Tokenizer
from atom_async.text.tool_calls import ToolCall, make_parser, parse_whole

Message = dict[str, Any]
Render = Callable[..., str]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wéather <today> & 'tomorrow'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hi <b>there</b> & 'you' 😀 \n"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What now?"},
]


def tool_chat(arguments: Any) -> list[Message]:
    return [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny, 21 °C"},
    ]


@pytest.fixture(scope="module")
def oracle() -> Render:
    """transformers' own rendering of a template."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE
        from transformers import PreTrainedTokenizerFast

        theirs = PreTrainedTokenizerFast(tokenizer_object=Backend(BPE()), **SPECIAL)
    return lambda source, messages, **options: theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, **options
    )


@pytest.fixture(scope="module")
def sources(default_model: ResolvedModel) -> dict[str, str]:
    assert default_model.text.chat_template is not None
    return {**TEMPLATES, "smollm2": default_model.text.chat_template}


@pytest.mark.parametrize("name", [*TEMPLATES, "smollm2"])
@pytest.mark.parametrize("generation", [True, False])
def test_plain_chats(oracle: Render, sources: dict[str, str], name: str, generation: bool) -> None:
    ours = ChatTemplate(sources[name], special_tokens=SPECIAL)
    for messages in (CHAT, CHAT[1:], CHAT[1:2], CHAT[:2]):
        theirs = oracle(sources[name], messages, add_generation_prompt=generation)
        assert ours.render_chat(messages, add_generation_prompt=generation) == theirs


@pytest.mark.parametrize("name", ["llama3_like", "qwen_like"])
def test_tools(oracle: Render, sources: dict[str, str], name: str) -> None:
    """Clients send arguments as JSON text, templates expect objects."""
    ours = ChatTemplate(sources[name], special_tokens=SPECIAL)
    assert ours.supports_tools
    arguments = {"city": "Paris", "note": 'ü <&> "'}
    theirs = oracle(sources[name], tool_chat(arguments), tools=[TOOL], add_generation_prompt=True)
    assert ours.render_chat(tool_chat(json.dumps(arguments)), [TOOL]) == theirs
    assert oracle(sources[name], CHAT, tools=[TOOL]) == ours.render_chat(CHAT, [TOOL], add_generation_prompt=False)


@pytest.mark.parametrize("name", [*TEMPLATES, "smollm2"])
@pytest.mark.parametrize("start", ["The answer is", "trailing spaces  ", "line\n"])
def test_final_message_is_continued(oracle: Render, sources: dict[str, str], name: str, start: str) -> None:
    messages = [*CHAT[1:2], {"role": "assistant", "content": start}]
    ours = ChatTemplate(sources[name], special_tokens=SPECIAL)
    rendered = ours.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == oracle(sources[name], messages, continue_final_message=True)
    assert rendered.rstrip().endswith(start.rstrip())


def test_template_variables(oracle: Render) -> None:
    source = TEMPLATES["qwen_like"]
    ours = ChatTemplate(source)
    theirs = oracle(source, CHAT, add_generation_prompt=True, enable_thinking=False)
    assert ours.render_chat(CHAT, enable_thinking=False) == theirs
    assert theirs.endswith("</think>\n\n")
    with pytest.raises(ChatTemplateError, match=r"no variable 'thinkin' to set; it has: .*enable_thinking"):
        ours.render_chat(CHAT, thinkin=True)
    with pytest.raises(ChatTemplateError, match="no variable 'documents' to set"):
        ours.render_chat(CHAT, documents=[])


def test_reasoning_is_passed_on(oracle: Render) -> None:
    messages = [*CHAT[1:2], {"role": "assistant", "content": "4", "reasoning_content": "\n2 + 2\n"}]
    ours = ChatTemplate(TEMPLATES["qwen_like"])
    theirs = oracle(TEMPLATES["qwen_like"], messages)
    assert ours.render_chat(messages, add_generation_prompt=False) == theirs
    assert "2 + 2" in theirs


text = st.text(max_size=12)
chats = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": text}), min_size=1)


def test_random_chats(oracle: Render, sources: dict[str, str]) -> None:
    compiled = {name: ChatTemplate(source, special_tokens=SPECIAL) for name, source in sources.items()}

    @settings(max_examples=150, deadline=None)
    @given(chats, st.sampled_from(["smollm2", "qwen_like", "llama3_like"]), st.booleans())
    def check(messages: list[Message], name: str, generation: bool) -> None:
        theirs = oracle(sources[name], messages, add_generation_prompt=generation)
        assert compiled[name].render_chat(messages, add_generation_prompt=generation) == theirs

    check()


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render_chat([{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            r"messages\[0\]\.content\[0\]: a part of type 'image_url' is not supported",
        ),
        ([{"content": "x"}], r"messages\[0\]\.role is missing"),
    ],
)
def test_what_cannot_be_rendered_is_refused(messages: list[Message], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate("{{ messages[0].content }}").render_chat(messages)


def test_the_template_s_own_refusal_reaches_the_client() -> None:
    template = ChatTemplate(TEMPLATES["mistral_like"], special_tokens=SPECIAL)
    with pytest.raises(ChatTemplateError, match=r"refuses these messages: .*roles must alternate"):
        template.render_chat([*CHAT[1:2], {"role": "assistant", "content": "x"}, CHAT[2]][:2] + CHAT[1:2] * 2)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_hostile_or_broken_template_is_an_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source + "{{ messages[0].content }}").render_chat(CHAT)


def test_template_that_does_not_parse() -> None:
    with pytest.raises(ValueError, match="does not parse: line 2"):
        ChatTemplate("ok\n{% if %}")


def test_developer_is_system_where_the_template_knows_none() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}")
    assert template.render_chat([{"role": "developer", "content": "a"}, *CHAT[1:2]]).startswith("system:a ")
    knows = ChatTemplate("{# developer #}{{ messages[0].role }}")
    assert knows.render_chat([{"role": "developer", "content": "a"}]) == "developer"


def test_dates_come_from_today() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}").render_chat(CHAT)
    assert int(rendered) - datetime.now().year in (0, -1)


def test_separate_template_for_tools() -> None:
    template = ChatTemplate("plain", tool_source="{{ tools | length }} tools")
    assert template.supports_tools
    assert template.render_chat(CHAT) == "plain"
    assert template.render_chat(CHAT, [TOOL]) == "1 tools"


# Tools without a template for them ---------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(sources: dict[str, str]) -> ChatTemplate:
    return ChatTemplate(sources["smollm2"], special_tokens=SPECIAL)


def test_tools_are_written_into_the_system_message(smollm2: ChatTemplate) -> None:
    assert not smollm2.supports_tools
    before = copy.deepcopy(CHAT)
    rendered = smollm2.render_chat(CHAT, [TOOL])
    assert before == CHAT, "the client's messages are left alone"
    system = rendered.split("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert json.dumps(TOOL, ensure_ascii=False) in system
    assert rendered.endswith("<|im_start|>assistant\n")
    assert smollm2.render_chat(CHAT[1:], [TOOL]).startswith("<|im_start|>system\nYou are a helpful assistant.")


def test_earlier_calls_and_results_are_written_as_the_parser_reads_them(smollm2: ChatTemplate) -> None:
    chat = tool_chat('{"city": "Paris"}')
    chat += [{"role": "tool", "tool_call_id": "c2", "content": "windy"}, {"role": "user", "content": "And?"}]
    turns = smollm2.render_chat(chat, [TOOL]).split("<|im_start|>")[1:]
    assert [turn.split("\n")[0] for turn in turns] == ["system", "user", "assistant", "user", "user", "assistant"]
    _, calls = parse_whole(make_parser("hermes"), turns[2].removeprefix("assistant\n").removesuffix("<|im_end|>\n"))
    assert calls == [ToolCall("get_weather", '{"city": "Paris"}')]
    assert turns[3].count("<tool_response>") == 2


def test_tool_history_renders_when_no_tools_are_offered_any_more(smollm2: ChatTemplate) -> None:
    rendered = smollm2.render_chat(tool_chat("{}"))
    assert "You can call functions" not in rendered
    assert "sunny, 21 °C" in rendered


def test_rendered_prompt_is_encoded_without_additions(smollm2: ChatTemplate, smol: Tokenizer) -> None:
    ids = smol.encode(smollm2.render_chat(CHAT), add_special_tokens=False)
    assert ids[0] == smol.token_id("<|im_start|>")
    assert ids.count(2) == len(CHAT)
