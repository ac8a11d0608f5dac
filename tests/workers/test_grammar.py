"""Grammars through the sampler, with the default model's tokenizer and random logits in place of a model."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom_async.model.resolve import ResolvedModel
from atom_async.text.grammar_check import check_grammar, choice_grammar
from atom_async.wire.sampling import Grammar
from tests.text import deep
from workers.grammar import GrammarError, LLGuidanceFactory, grammar_factory
from workers.sampling.constrained import forbidding

Make = Callable[..., Any]
MOST_TOKENS = 300
PADDING = 64
"""Rows of the logits beyond the tokenizer's vocabulary."""


class Vocabulary:
    """The tokenizer, and biases that make random logits come to an end."""

    def __init__(self, path: str, end_id: int) -> None:
        self.path = path
        self.tokenizer = tokenizers.Tokenizer.from_file(path)
        self.end_id = end_id
        self.known = self.tokenizer.get_vocab_size()
        self.size = self.known + PADDING
        texts = [self.tokenizer.decode([token], skip_special_tokens=False) for token in range(self.known)]
        closing = [bool(re.search(r'["}\])]', text)) for text in texts] + [False] * PADDING
        self.closing = torch.tensor(closing) * 9.0
        self.closing[end_id] = 12
        self.blank = torch.tensor([text.isspace() for text in texts] + [False] * PADDING) * 100.0

    def logits(self, seed: int, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.size, generator=torch.Generator().manual_seed(seed)) * 2 + self.closing

    def text(self, tokens: list[int]) -> str:
        kept = [token for token in tokens if token != self.end_id]
        decoded: str = self.tokenizer.decode(kept, skip_special_tokens=False)
        return decoded


@pytest.fixture(scope="module")
def vocabulary(default_model: ResolvedModel) -> Vocabulary:
    return Vocabulary(str(default_model.tokenizer_json), default_model.text.eos_ids[0])


@pytest.fixture(scope="module")
def factory(vocabulary: Vocabulary) -> Iterator[LLGuidanceFactory]:
    made = grammar_factory(vocabulary.path, vocabulary.size, [vocabulary.end_id])
    assert made is not None
    yield made
    made.close()


@pytest.fixture(scope="module")
def generate(vocabulary: Vocabulary, factory: LLGuidanceFactory, new_sampler: Make, new_sequence: Make) -> Make:
    """Texts of `rows` sequences that follow one grammar, each run to its end."""

    def run(grammar: Grammar, *, rows: int = 6, bias: torch.Tensor | float = 0.0, seed: int = 0) -> list[str]:
        sampler = new_sampler(vocabulary.size, grammar=factory)
        outputs: dict[int, list[int]] = {slot: [] for slot in range(rows)}
        for slot in outputs:
            sampler.add(new_sequence(slot, grammar=grammar, seed=seed + slot, end_token_ids=(vocabulary.end_id,)))
        running = list(outputs)
        for position in range(MOST_TOKENS):
            logits = vocabulary.logits(seed + 1000 * position, len(running)) + bias
            result = sampler.sample(logits, running, [position] * len(running))
            assert result.failed == []
            for slot, token in zip(running, result.token_ids, strict=True):
                outputs[slot].append(token)
            over = {s for s in running if s in result.ended or outputs[s][-1] == vocabulary.end_id}
            running = [slot for slot in running if slot not in over]
            if not running:
                return [vocabulary.text(tokens) for tokens in outputs.values()]
        pytest.fail(f"no end after {MOST_TOKENS} tokens: {[vocabulary.text(outputs[s]) for s in running]}")

    return run


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, 3]}, "maxItems": 3},
        "score": {"type": "number"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "person": PERSON,
    "nested": {
        "type": "object",
        "properties": {"people": {"type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 1, "maxItems": 2}},
        "required": ["people"],
        "$defs": {"p": PERSON},
    },
    "either": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}]},
    "formats": {"type": "array", "prefixItems": [{"type": "string", "format": "date"}, {"const": {"x": [1]}}],
                "items": False, "minItems": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_parses_and_validates(name: str, generate: Make) -> None:
    schema = SCHEMAS[name]
    texts = generate(Grammar("json_schema", json.dumps(schema)))
    for text in texts:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    assert len(set(texts)) > 1


def test_json_does_not_run_away_in_whitespace(generate: Make, vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for text in generate(Grammar("json_schema", json.dumps(schema)), bias=vocabulary.blank):
        assert re.fullmatch(r'\{"a": ?-?\d+, ?"b": ?\[(true|false)(, ?(true|false))+\]\}', text)


@pytest.mark.parametrize("pattern", [r"[a-f]{3,8}", r"(yes|no)/\d{2}", r"\w{1,9}@\w{2,5}\.(com|org)", "é+\n[^x]?", ""])
def test_regex_matches_whole(pattern: str, generate: Make) -> None:
    for text in generate(Grammar("regex", pattern)):
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("name", deep.TAKEN)
def test_the_longest_chain_of_references_gets_an_answer(name: str, generate: Make, factory: LLGuidanceFactory) -> None:
    grammar = deep.TAKEN[name]()
    if name != "rules that may be left out":
        texts = generate(grammar, rows=2)
        assert all(text == "x" or isinstance(json.loads(text), str) for text in texts)
        return
    with pytest.raises(GrammarError, match=r"cannot be compiled: .* grammar.symbols.len[^\n]*$"):
        factory.compile(grammar).result()


def test_lark_arithmetic(generate: Make) -> None:
    grammar = Grammar("lark", 'start: term (("+" | "*") term)*\nterm: /[1-9][0-9]?/ | "(" start ")"')
    for text in generate(grammar):
        assert re.fullmatch(r"[0-9+*()]+", text)
        ast.parse(text, mode="eval")


def test_choice_with_every_awkward_character(generate: Make) -> None:
    choices = ["yes", "yes, but", 'a "quoted" \\ text\n', "naïve 😀", "\x7f\x00", "/re/ | x", "%json {}"]
    assert check_grammar(choice_grammar(choices)) is None
    texts = set(generate(choice_grammar(choices), rows=16))
    assert texts <= set(choices)
    assert len(texts) > 2


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(choices=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
def test_each_choice_is_accepted_to_its_end(
    choices: list[str], vocabulary: Vocabulary, factory: LLGuidanceFactory
) -> None:
    grammar = choice_grammar(choices)
    assert check_grammar(grammar) is None
    for choice in choices:
        if vocabulary.text(vocabulary.tokenizer.encode(choice).ids) != choice:
            continue  # this vocabulary lacks some control bytes
        matcher = factory.compile(grammar).result()
        matcher.advance(vocabulary.tokenizer.encode(choice, add_special_tokens=False).ids)
        longer = any(other != choice and other.startswith(choice) for other in choices)
        assert matcher.finished is not longer


class TestEnd:
    def test_ended_when_nothing_may_follow(
        self, vocabulary: Vocabulary, factory: LLGuidanceFactory, new_sampler: Make, new_sequence: Make
    ) -> None:
        """`ab` may go on to `abc`, so it needs the end token; `abc` may not."""
        a, b, c = (vocabulary.tokenizer.token_to_id(letter) for letter in "abc")
        for wanted, ended in (([a, b, c], [[], [], [0]]), ([a, b, vocabulary.end_id], [[], [], [0]])):
            sampler = new_sampler(vocabulary.size, grammar=factory)
            sampler.add(new_sequence(0, grammar=choice_grammar(["ab", "abc"]), temperature=0.0))
            for position, token in enumerate(wanted):
                logits = torch.zeros(1, vocabulary.size)
                logits[0, token] = 1
                result = sampler.sample(logits, [0], [position])
                assert (result.token_ids, result.ended) == ([token], ended[position])
            # The step after it may be on its way already.
            late = sampler.sample(torch.zeros(1, vocabulary.size), [0], [3])
            assert (late.token_ids, late.ended, late.failed) == ([vocabulary.end_id], [0], [])

    def test_no_end_token_before_it_is_complete(
        self, vocabulary: Vocabulary, factory: LLGuidanceFactory, new_sampler: Make, new_sequence: Make
    ) -> None:
        sampler = new_sampler(vocabulary.size, grammar=factory)
        sampler.add(new_sequence(0, grammar=Grammar("regex", "ab+"), temperature=0.0))
        logits = torch.zeros(1, vocabulary.size)
        logits[0, vocabulary.end_id] = 50
        drawn = [sampler.sample(logits.clone(), [0], [position]).token_ids[0] for position in range(3)]
        text = vocabulary.text(drawn)
        assert re.fullmatch("ab+", text)
        assert drawn[-1] == vocabulary.end_id


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), data=st.data())
def test_goes_on_after_a_preemption(
    seed: int,
    data: st.DataObject,
    vocabulary: Vocabulary,
    factory: LLGuidanceFactory,
    new_sampler: Make,
    new_sequence: Make,
) -> None:
    asked = {
        "grammar": Grammar("json_schema", json.dumps(PERSON)), "seed": seed, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    }  # fmt: skip
    prompt = [5, 6, 7]

    def run(preempt_at: int) -> tuple[list[int], list[int]]:
        sampler = new_sampler(vocabulary.size, grammar=factory)
        sampler.add(new_sequence(0, prompt_len=3, history=prompt[:1], **asked))
        sampler.observe(0, np.array(prompt[1:], dtype=np.int32), 1)
        output: list[int] = []
        ended: list[int] = []
        while not ended and len(output) < MOST_TOKENS:
            if len(output) == preempt_at:
                known = prompt + output
                cut = data.draw(st.integers(0, len(known) - 1))
                sampler.remove(0)
                sampler.add(new_sequence(0, prompt_len=3, total_len=len(known), history=known[:cut], **asked))
                sampler.observe(0, np.array(known[cut:], dtype=np.int32), cut)
            result = sampler.sample(vocabulary.logits(seed + len(output), 1), [0], [len(output)])
            assert result.failed == []
            output += result.token_ids
            ended = result.ended
        return output, ended

    undisturbed = run(-1)
    assert undisturbed[1] == [0]
    assert run(data.draw(st.integers(1, len(undisturbed[0]) - 1))) == undisturbed


class TestVocabularySizes:
    def test_padding_is_never_drawn(self, vocabulary: Vocabulary, generate: Make) -> None:
        bias = torch.zeros(vocabulary.size)
        bias[vocabulary.known :] = 1000
        for text in generate(Grammar("regex", "(.|\n){4,9}"), bias=bias):
            assert re.fullmatch("(.|\n){4,9}", text)

    def test_a_model_with_fewer_rows_than_the_tokenizer(
        self, vocabulary: Vocabulary, new_sampler: Make, new_sequence: Make
    ) -> None:
        rows = 30_011
        small = grammar_factory(vocabulary.path, rows, [vocabulary.end_id])
        assert small is not None
        sampler = new_sampler(rows, grammar=small)
        sampler.add(new_sequence(0, grammar=Grammar("regex", "[a-z]{40}")))
        drawn = [sampler.sample(torch.zeros(1, rows), [0], [position]).token_ids[0] for position in range(3)]
        assert re.fullmatch("[a-z]+", vocabulary.text(drawn))
        small.close()

    @settings(max_examples=60, deadline=None)
    @given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5), vocab=st.integers(1, 200))
    def test_bits_of_the_mask(self, words: list[int], vocab: int) -> None:
        array = np.array([words, words[::-1]], dtype=np.int32)
        expected = np.zeros((2, max(vocab, array.shape[1] * 32)), dtype=bool)
        expected[:, : array.shape[1] * 32] = np.unpackbits(array.view(np.uint8), axis=1, bitorder="little")
        mask = forbidding(torch.from_numpy(array), vocab).numpy()
        assert mask.tolist() == np.where(expected[:, :vocab], 0, -np.inf).tolist()


class TestFailures:
    def test_a_grammar_that_does_not_compile_fails_alone(
        self, vocabulary: Vocabulary, factory: LLGuidanceFactory, new_sampler: Make, new_sequence: Make
    ) -> None:
        sampler = new_sampler(vocabulary.size, grammar=factory)
        for slot, pattern in enumerate(["a+", "a(", "b"]):
            sampler.add(new_sequence(slot, grammar=Grammar("regex", pattern), temperature=0.0))
        sampler.add(new_sequence(3, temperature=0.0))
        for _ in range(2):
            result = sampler.sample(torch.zeros(4, vocabulary.size), range(4), [0] * 4)
            ((slot, message),) = result.failed
            assert slot == 1
            assert message.startswith("the grammar cannot be compiled: ")
            assert "unclosed group" in message
        assert vocabulary.text([result.token_ids[0]]).strip("a") == ""

    def test_output_that_does_not_fit_fails_alone(
        self, vocabulary: Vocabulary, factory: LLGuidanceFactory, new_sampler: Make, new_sequence: Make
    ) -> None:
        a, z = (vocabulary.tokenizer.token_to_id(letter) for letter in "az")
        sampler = new_sampler(vocabulary.size, grammar=factory)
        for slot, before in enumerate([a, z]):
            sampler.add(new_sequence(slot, prompt_len=1, history=[z, before], grammar=Grammar("regex", "a{9}")))
        result = sampler.sample(torch.zeros(2, vocabulary.size), [0, 1], [1, 1])
        ((slot, message),) = result.failed
        assert slot == 1
        assert message.startswith("the grammar cannot go on: ")
        assert "doesn't satisfy the grammar" in message

    def test_a_grammar_too_costly_to_follow_fails_alone(
        self, vocabulary: Vocabulary, factory: LLGuidanceFactory, new_sampler: Make, new_sequence: Make
    ) -> None:
        """Accepted, since it is well-formed, but ambiguous beyond llguidance's limits."""
        sampler = new_sampler(vocabulary.size, grammar=factory)
        branches = "\n".join(f'r{i}: "a" r{i} "b" | "a" r{i} | "a"' for i in range(2500))
        start = " | ".join(f"r{i}" for i in range(2500))
        sampler.add(new_sequence(0, grammar=Grammar("lark", f"start: {start}\n{branches}")))
        sampler.add(new_sequence(1, grammar=Grammar("regex", "a+")))
        result = sampler.sample(torch.zeros(2, vocabulary.size), [0, 1], [0, 0])
        assert [slot for slot, _ in result.failed] == [0]
        assert "Too many items" in result.failed[0][1]
        assert vocabulary.text([result.token_ids[1]]).strip("a") == ""

    def test_without_a_tokenizer(self, new_sampler: Make, new_sequence: Make) -> None:
        assert grammar_factory("", 100, [0]) is None
        sampler = new_sampler(100)
        sampler.add(new_sequence(0, grammar=Grammar("regex", "a")))
        result = sampler.sample(torch.zeros(1, 100), [0], [0])
        assert result.failed == [(0, "this model has no tokenizer.json, so no grammar can be enforced")]

    def test_a_tokenizer_that_cannot_be_read(self, new_sampler: Make, new_sequence: Make) -> None:
        broken = grammar_factory("/nonexistent/tokenizer.json", 100, [0])
        sampler = new_sampler(100, grammar=broken)
        sampler.add(new_sequence(0, grammar=Grammar("regex", "a")))
        result = sampler.sample(torch.zeros(1, 100), [0], [0])
        assert result.failed[0][1].startswith("the tokenizer cannot be used for grammars: ")


def test_many_at_once_and_leaving_early(
    vocabulary: Vocabulary, factory: LLGuidanceFactory, new_sampler: Make, new_sequence: Make
) -> None:
    """More compilations than threads, some of the same grammar, some cancelled."""
    sampler = new_sampler(vocabulary.size, max_num_seqs=40, grammar=factory)
    for slot in range(40):
        sampler.add(new_sequence(slot, grammar=Grammar("regex", f"x{{{1 + slot % 7}}}"), temperature=0.0))
    for slot in range(0, 40, 2):
        sampler.remove(slot)
    slots = list(range(1, 40, 2))
    result = sampler.sample(torch.zeros(20, vocabulary.size), slots, [0] * 20)
    assert result.failed == []
    assert all(set(vocabulary.text([token])) == {"x"} for token in result.token_ids)
