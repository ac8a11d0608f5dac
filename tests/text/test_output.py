"""Text, token ids and logprobs of one sequence stay together, whatever is stopped, skipped or split."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from atom_async.text.output import TextAssembler, TextDelta
from atom_async.text.stop import StopMatcher
from atom_async.text.tokenizer import Tokenizer

Deltas = list[TextDelta[int]]


def run(
    assembler: TextAssembler[int], ids: list[int], cuts: list[int] | None = None, *, stop_token: int | None = None
) -> Deltas:
    """Pushes `ids` in pieces; a token's logprob is its index, so that order and loss can be seen."""
    edges = sorted({0, *(cut for cut in cuts or range(len(ids)) if cut <= len(ids)), len(ids)})
    deltas = [assembler.push([], [])]
    for begin, end in itertools.pairwise(edges):
        last = stop_token if end == len(ids) else None
        deltas.append(assembler.push(ids[begin:end], list(range(begin, end)), stop_token_id=last))
    return [*deltas, assembler.finish()]


def text_of(deltas: Deltas) -> str:
    return "".join(delta.text for delta in deltas)


def check_alignment(tokenizer: Tokenizer, ids: list[int], deltas: Deltas) -> list[int]:
    """Every token once, in order, with its own logprob, never before its text; returns their ids."""
    shown, count = "", 0
    for delta in deltas:
        shown += delta.text
        assert delta.logprobs == list(range(count, count + delta.token_count))
        assert delta.token_ids == ids[count : count + delta.token_count]
        for token, offset in zip(delta.token_ids, delta.text_offsets, strict=True):
            piece = tokenizer.token_text(token)
            assert offset <= len(shown)
            if "�" not in piece and token not in tokenizer.special_ids:
                assert shown.startswith(piece, offset) or piece.startswith(shown[offset:])
        count += delta.token_count
    return ids[:count]


def test_random_tokens_with_stops_stay_aligned(smol: Tokenizer) -> None:
    words = [smol.encode(word) for word in (" the", "é", "😀", "a", "b", "ab", "<|im_end|>", "\n\n", "日")]

    @settings(max_examples=400, deadline=None)
    @given(
        st.lists(st.one_of(st.sampled_from(words), st.integers(0, 49_151).map(lambda token: [token])), max_size=12),
        st.lists(st.sampled_from(["a", "ab", "b😀", "the", "é", "\n", "e a", "日本", "zz"]), max_size=3),
        st.booleans(),
        st.booleans(),
        st.lists(st.integers(0, 30), min_size=1, max_size=5),
    )
    def check(parts: list[list[int]], stops: list[str], include: bool, skip: bool, cuts: list[int]) -> None:
        ids = [token for part in parts for token in part]
        assembler: TextAssembler[int] = TextAssembler(smol, stop=stops, include_stop=include, skip_special_tokens=skip)
        deltas = run(assembler, ids, cuts)
        matcher = StopMatcher(stops, include_stop=include)
        full = smol.decode(ids, skip_special_tokens=skip)
        expected = matcher.push(full) + matcher.flush()
        assert text_of(deltas) == expected
        assert deltas[-1].finished_by_stop == matcher.matched
        shown = check_alignment(smol, ids, deltas)
        if matcher.matched is None:
            assert shown == ids
        else:
            # exactly the tokens that reach into the shown text, and what has no text before its end
            assert len(smol.decode(shown, skip_special_tokens=skip)) >= len(expected)
            assert len(smol.decode(shown[:-1], skip_special_tokens=skip).rstrip("�")) <= len(expected)

    check()


def test_stop_string_across_tokens_never_leaks(smol: Tokenizer) -> None:
    ids = smol.encode("Answer: 42\n\nQuestion: what else?")
    assembler: TextAssembler[int] = TextAssembler(smol, stop=["\n\nQuestion"])
    deltas = run(assembler, ids)
    assert text_of(deltas) == "Answer: 42"
    assert assembler.stopped_by == "\n\nQuestion"
    assert smol.decode([token for delta in deltas for token in delta.token_ids]) == "Answer: 42"


def test_stop_string_included_when_asked(smol: Tokenizer) -> None:
    ids = smol.encode("one two three")
    assembler: TextAssembler[int] = TextAssembler(smol, stop=["two"], include_stop=True)
    assert text_of(run(assembler, ids)) == "one two"


def test_held_back_text_is_released_at_the_end(smol: Tokenizer) -> None:
    ids = smol.encode("one two")
    assembler: TextAssembler[int] = TextAssembler(smol, stop=[" two three"])
    deltas = run(assembler, ids)
    assert text_of(deltas[:-1]) == "one"
    assert deltas[-1].text == " two"
    assert check_alignment(smol, ids, deltas) == ids


def test_logprobs_wait_for_their_text(smol: Tokenizer) -> None:
    ids = smol.encode("one two")
    assembler: TextAssembler[int] = TextAssembler(smol, stop=[" two three"])
    assert assembler.push(ids, [0, 1]).logprobs == [0]
    assert assembler.finish().logprobs == [1]


def test_stop_token_is_hidden_unless_asked_for(smol: Tokenizer) -> None:
    ids = [*smol.encode("done"), 2]

    def shown(**options: bool) -> tuple[str, int]:
        deltas = run(TextAssembler(smol, **options), ids, stop_token=2)  # type: ignore[arg-type]
        return text_of(deltas), sum(delta.token_count for delta in deltas)

    count = len(ids)
    assert shown() == ("done", count - 1)
    assert shown(skip_special_tokens=False) == ("done<|im_end|>", count)
    assert shown(include_stop=True, skip_special_tokens=False) == ("done<|im_end|>", count)
    assert shown(include_stop=True) == ("done", count)


def test_stop_token_that_is_text_is_hidden_too(smol: Tokenizer) -> None:
    ids = smol.encode("one two")
    hidden: TextAssembler[int] = TextAssembler(smol, skip_special_tokens=False)
    assert text_of(run(hidden, ids, stop_token=ids[-1])) == "one"
    included: TextAssembler[int] = TextAssembler(smol, include_stop=True)
    assert text_of(run(included, ids, stop_token=ids[-1])) == "one two"


def test_min_tokens_delays_stop_strings(smol: Tokenizer) -> None:
    ids = smol.encode("a b a b a b")
    assembler: TextAssembler[int] = TextAssembler(smol, stop=[" b"], min_tokens=2)
    assert text_of(run(assembler, ids)) == "a b a"


def test_a_character_of_several_tokens_brings_them_all(smol: Tokenizer) -> None:
    ids = smol.encode("😀")
    assembler: TextAssembler[int] = TextAssembler(smol)
    counts = [assembler.push([token]).token_count for token in ids]
    assert counts == [0] * (len(ids) - 1) + [len(ids)]


def test_without_logprobs_there_are_none(smol: Tokenizer) -> None:
    assembler: TextAssembler[int] = TextAssembler(smol)
    assert assembler.push(smol.encode("x")).logprobs is None
    assert assembler.finish().logprobs is None
