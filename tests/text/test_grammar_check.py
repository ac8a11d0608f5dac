"""What is accepted as a grammar, and what the refusals say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom_async.text.grammar_check import check_grammar, choice_grammar
from atom_async.wire.sampling import Grammar
from tests.text import deep

GOOD = {
    "any object": Grammar("json_schema", '{"type": "object"}'),
    "annotations": Grammar("json_schema", '{"title": "t", "description": "d", "default": 1, "type": "integer"}'),
    "definitions": Grammar(
        "json_schema", '{"$defs": {"x": {"type": "string", "format": "date"}}, "$ref": "#/$defs/x"}'
    ),
    "one of, asked for": Grammar(
        "json_schema",
        '{"x-guidance": {"coerce_one_of": true}, "oneOf": [{"type": "object"}, {"required": ["a"]}]}',
    ),
    "regex": Grammar("regex", r"\d{3}-[a-z/]+"),
    "lark": Grammar("lark", 'start: "a" b\nb: /[0-9]+/'),
}
BAD = {
    "half a schema": (Grammar("json_schema", '{"type":'), "not valid JSON"),
    "a list": (Grammar("json_schema", "[1]"), "must be a JSON object"),
    "an unknown type": (Grammar("json_schema", '{"type": "strin"}'), "strin"),
    "what cannot be enforced": (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    "several of these": (Grammar("json_schema", '{"not": {}, "if": {}}'), "not"),
    "a format": (Grammar("json_schema", '{"type": "string", "format": "foo"}'), "foo"),
    "one of": (
        Grammar("json_schema", '{"oneOf": [{"type": "object"}, {"required": ["a"]}]}'),
        '"x-guidance": {"coerce_one_of": true}',
    ),
    "nothing fits": (Grammar("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}'), "nsatisfiable"),
    "nested too deeply": (Grammar("json_schema", '{"a":' * 100_000), "recursion"),
    "look-ahead": (Grammar("regex", "(?=a)b"), "look-around"),
    "an open group": (Grammar("regex", "a("), "unclosed group"),
    "no rule": (Grammar("lark", "start: b"), "unknown name"),
    "no start": (Grammar("lark", 'b: "a"'), "start"),
    "empty": (Grammar("lark", ""), "mpty"),
    "another kind": (Grammar("gbnf", "root ::= a"), "json_schema, regex, lark"),
    "half a surrogate pair": (Grammar("regex", "\ud800"), "surrogates"),
    "too long": (Grammar("regex", "a" * (1 << 20) + "b"), "1048577 bytes long; at most 1048576"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good(name: str) -> None:
    assert check_grammar(GOOD[name]) is None


@pytest.mark.parametrize("name", BAD)
def test_bad(name: str) -> None:
    grammar, said = BAD[name]
    message = check_grammar(grammar)
    assert message is not None
    assert said in message


@pytest.mark.parametrize("name", deep.TAKEN)
def test_the_longest_chain_of_references_is_taken(name: str) -> None:
    """Followed by recursion: a stack that overflows would end the process."""
    assert check_grammar(deep.TAKEN[name]()) is None


@pytest.mark.parametrize("name", deep.REFUSED)
def test_the_deepest_nesting_is_refused(name: str) -> None:
    message = check_grammar(deep.REFUSED[name]())
    assert message is not None
    assert 0 < len(message) < 1200


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_any_texts_make_a_choice(choices: list[str]) -> None:
    grammar = choice_grammar(choices)
    assert check_grammar(grammar) is None
    assert grammar.source.isascii()


@pytest.mark.parametrize(("choices", "said"), [([], "at least one"), (["\udfff"], "surrogates")])
def test_impossible_choices(choices: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choice_grammar(choices)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_any_document_gets_an_answer(document: object) -> None:
    """No document makes the check raise."""
    answer = check_grammar(Grammar("json_schema", json.dumps(document)))
    assert answer is None or len(answer) > 0


@pytest.mark.process
def test_checking_loads_no_torch() -> None:
    code = "import sys, atom_async.text.grammar_check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
