"""Tool calls: each format read whole, in any pieces, and when it is wrong."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_async.text.tool_calls import (
    PARSERS,
    ParsedDelta,
    ToolCall,
    detect_parser,
    join_deltas,
    make_parser,
    parse_whole,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "limits": {"type": "array"},
                    "note": {"type": ["string", "null"]},
                    "ratio": {"type": "number"},
                },
            },
        },
    }
    for name in ("get_weather", "f")
]
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
BARE = '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'
CALL = ToolCall("get_weather", '{"city": "Paris", "days": 3}')


def whole(name: str, text: str) -> tuple[str, list[ToolCall]]:
    return parse_whole(make_parser(name, TOOLS), text)


@pytest.mark.parametrize(
    ("name", "text"), [("hermes", HERMES), ("qwen_xml", XML), ("qwen_xml", HERMES), ("json", BARE)]
)
def test_one_call(name: str, text: str) -> None:
    assert whole(name, text) == ("", [CALL])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"{HERMES}\n{HERMES}\n"),
        ("hermes", HERMES.removesuffix("\n</tool_call>") + HERMES),  # a closing tag forgotten
        ("hermes", f"<tool_call>[{BARE}, {BARE}]</tool_call>"),  # SmolLM2's own way
        ("hermes", f"<tool_call>{BARE}\n{BARE}</tool_call>"),
        ("hermes", HERMES.replace("}}", "}}}") * 2),
        ("qwen_xml", f"{XML}\n{XML}"),
        ("qwen_xml", XML.replace("<tool_call>\n", "").replace("</tool_call>", "") * 2),
        ("json", f"[{BARE}, {BARE}]"),
        ("json", f"{BARE}; {BARE}"),
        ("json", f"\n{BARE}\n{BARE}\n"),
    ],
)
def test_two_calls(name: str, text: str) -> None:
    assert whole(name, text) == ("", [CALL, CALL])


def test_content_around_calls_is_kept_and_layout_is_not() -> None:
    assert whole("hermes", f"Let me look.\n\n{HERMES}\n") == ("Let me look.", [CALL])
    assert whole("hermes", f"Before.\n{HERMES}\nAfter. ") == ("Before.\nAfter. ", [CALL])
    assert whole("hermes", f"\n{HERMES}\nAfter.") == ("After.", [CALL])


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', ToolCall("f", '{"a": 1}')),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ToolCall("f", '{"a": 1}')),
        ('{"name": "f", "arguments": null}', ToolCall("f", "{}")),
        ('{"name": "f"}', ToolCall("f", "{}")),
        ('{"name": "f", "arguments": {}, "id": 7}', ToolCall("f", "{}")),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', ToolCall("f", '{"a": 1}')),
        ('{"name": "f", "arguments": {"a": "}</tool_call>\\"{"}}', ToolCall("f", '{"a": "}</tool_call>\\"{"}')),
    ],
)
def test_json_variants(text: str, call: ToolCall) -> None:
    assert whole("hermes", f"<tool_call>{text}</tool_call>") == ("", [call])


def test_xml_values_follow_the_schema() -> None:
    values = {
        "city": "12",
        "days": "12",
        "exact": "True",
        "limits": "[1, 2]",
        "note": "null",
        "ratio": "many",
        "unknown": "5",
    }
    tags = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    ((call,),) = [whole("qwen_xml", f"<function=f>{tags}</function>")[1]]
    assert json.loads(call.arguments) == {
        "city": "12",
        "days": 12,
        "exact": True,
        "limits": [1, 2],
        "note": None,
        "ratio": "many",
        "unknown": "5",
    }


def test_xml_value_is_kept_to_the_letter() -> None:
    code = '\n  if a < b and "x":\n\treturn </b>\n'
    _, (call,) = whole("qwen_xml", f"<function=f>\n<parameter=city>\n{code}\n</parameter>\n</function>")
    assert json.loads(call.arguments) == {"city": code}


def test_xml_parameter_that_is_not_closed_ends_at_the_next() -> None:
    text = "<function=f>\n<parameter=city>\nRome\n<parameter=days>\n2\n</function>"
    assert whole("qwen_xml", text) == ("", [ToolCall("f", '{"city": "Rome", "days": 2}')])


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "none"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "plain text, a < b, [1] {2} ",
        "<tool_call>",
        "<tool_call> no call </tool_call>",
        '<tool_call>{"nam": "f"}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "f", ',
        "<tool_call>[]</tool_call>",
        "<tool_cal",
        "<<tool_call",
        '{"answer": 42}',
        '{"name": "Alice", "age": 3}',
        '["name", "f"]',
        "[1, 2]",
        "<function=",
        "<function= >",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    content, calls = whole(name, text)
    if not (calls and name != "json"):
        assert content == text
        assert not calls
    else:
        assert text == '<tool_call>{"name": "f", '
        assert calls == [ToolCall("f", "")]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "Par', '{"city": "Par'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"ci', '"{\\"ci'),
        ("json", '{"name": "f", "parameters": {"city": [', '{"city": ['),
        ("qwen_xml", "<function=f><parameter=city>Par", '{"city": "Par'),
        ("qwen_xml", "<function=f><parameter=city>Par</parameter>", '{"city": "Par"'),
    ],
)
def test_an_output_cut_short_leaves_its_arguments_open(name: str, text: str, arguments: str) -> None:
    """Nobody may take half a call for a whole one."""
    assert whole(name, text) == ("", [ToolCall("f", arguments)])


def test_a_call_that_breaks_after_its_name_loses_nothing() -> None:
    content, calls = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, oops</tool_call>')
    assert calls == [ToolCall("f", '{"a": 1}')]
    assert content == ", oops</tool_call>"


FRAGMENTS = (
    HERMES,
    XML,
    BARE,
    f"[{BARE}]",
    "Some text. ",
    "\n\n",
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=city>",
    "</parameter>",
    '{"name": "f", "arguments": ',
    '{"a": [1, "}"]}',
    "}",
    "{",
    '"',
    "\\",
    "é😀",
    "<",
    "x",
    ", ",
)
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), outputs, st.lists(st.integers(0, 200), max_size=8))
def test_any_split_gives_what_the_whole_gives(name: str, text: str, cuts: list[int]) -> None:
    parser = make_parser(name, TOOLS)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [parser.push(text[begin:end]) for begin, end in itertools.pairwise(edges)]
    deltas.append(parser.finish())
    assert join_deltas(deltas) == whole(name, text)
    check_order(deltas)
    assert parser.found_calls == any(delta.tool_calls for delta in deltas)


def check_order(deltas: list[ParsedDelta]) -> None:
    """Each call's name comes once, first; calls come one after another."""
    current = -1
    for delta in deltas:
        for piece in delta.tool_calls:
            if piece.name is not None:
                assert piece.index == current + 1
                current = piece.index
            assert piece.index == current


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.text(max_size=80))
def test_text_without_calls_comes_out_unchanged(name: str, text: str) -> None:
    assert whole(name, text) == (text, [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=6), json_values, max_size=3), min_size=1, max_size=3),
    st.sampled_from(["hermes", "json"]),
    st.booleans(),
)
def test_every_call_that_is_written_is_read(arguments: list[dict[str, object]], name: str, ascii_only: bool) -> None:
    written = [json.dumps({"name": "f", "arguments": value}, ensure_ascii=ascii_only) for value in arguments]
    text = "".join(f"<tool_call>{call}</tool_call>" for call in written) if name == "hermes" else ";".join(written)
    content, calls = whole(name, text)
    assert content == ""
    assert [json.loads(call.arguments) for call in calls] == arguments


def test_arguments_stream_as_they_are_written() -> None:
    parser = make_parser("hermes", TOOLS)
    first = parser.push('<tool_call>{"name": "f", "arguments": {"ci')
    assert [(call.index, call.name, call.arguments) for call in first.tool_calls] == [(0, "f", '{"ci')]
    second = parser.push('ty": "Rome"')
    assert [(call.index, call.name, call.arguments) for call in second.tool_calls] == [(0, None, 'ty": "Rome"')]


def test_detection_follows_the_template() -> None:
    assert detect_parser(None) == "hermes"
    assert detect_parser("{{ messages[0].content }}") == "hermes"
    assert detect_parser("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert detect_parser("{% if tools %}<tool_call><function=name>{% endif %}") == "qwen_xml"
    assert detect_parser('{% if tools %}{"name": …, "parameters": …}{% endif %}') == "json"
    with pytest.raises(ValueError, match="unknown tool-call parser 'x'; there are: hermes"):
        make_parser("x")
