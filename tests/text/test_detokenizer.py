"""Text that comes in pieces is the text that comes at once."""

import itertools

from corpus import TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_async.text.detokenizer import IncrementalDetokenizer
from atom_async.text.tokenizer import Tokenizer


def pieces_of(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """A random split, empty pieces included."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    edges = [0, *cuts, len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def test_any_split_gives_the_full_decode(smol: Tokenizer) -> None:
    """Any ids at all, valid UTF-8 or not, special tokens and unknown ids included."""

    @settings(max_examples=300, deadline=None)
    @given(st.data(), st.lists(st.integers(0, smol.vocab_size + 10), max_size=30), st.booleans())
    def check(data: st.DataObject, ids: list[int], skip: bool) -> None:
        detokenizer = IncrementalDetokenizer(smol, skip_special_tokens=skip)
        text = "".join(detokenizer.push(piece) for piece in pieces_of(data, ids)) + detokenizer.flush()
        assert text == smol.decode(ids, skip_special_tokens=skip)

    check()


def test_metaspace_drops_the_marks_of_the_first_token(metaspace: Tokenizer) -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 9), max_size=8), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        detokenizer = IncrementalDetokenizer(metaspace, skip_special_tokens=skip)
        assert detokenizer.push(ids) + detokenizer.flush() == metaspace.decode(ids, skip_special_tokens=skip)

    check()


def test_any_split_of_text_gives_it_back(any_tokenizer: Tokenizer) -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.data(), st.one_of(st.text(max_size=30), st.sampled_from(TEXTS)))
    def check(data: st.DataObject, text: str) -> None:
        ids = any_tokenizer.encode(text)
        detokenizer = IncrementalDetokenizer(any_tokenizer)
        pieces = [detokenizer.push(piece) for piece in pieces_of(data, ids)]
        full = any_tokenizer.decode(ids)
        assert "".join(pieces) + detokenizer.flush() == full
        if "�" not in full:  # SmolLM2's vocabulary lacks a few bytes of rare planes
            assert "�" not in "".join(pieces)

    check()


def test_no_half_character_is_shown(smol: Tokenizer) -> None:
    ids = smol.encode("a😀b")
    assert len(ids) > 3, "the emoji takes several tokens"
    detokenizer = IncrementalDetokenizer(smol)
    shown = [detokenizer.push([token]) for token in ids]
    assert [text for text in shown if text] == ["a", "😀", "b"]


def test_an_incomplete_character_ends_as_replacement(smol: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smol)
    first = smol.encode("😀")[0]
    assert detokenizer.push([first]) == ""
    assert detokenizer.in_character
    assert detokenizer.flush() == "�"


def test_space_before_the_first_word(spiece: Tokenizer) -> None:
    ids = spiece.encode("the cat", add_special_tokens=False)
    assert IncrementalDetokenizer(spiece).push(ids) == "the cat"
    assert IncrementalDetokenizer(spiece, continues_text=True).push(ids) == " the cat"


def test_broken_byte_run_keeps_its_whole_characters(spiece: Tokenizer) -> None:
    """The documented difference from the tokenizers library."""
    ids = [spiece.token_id(token) for token in ("<0xC3>", "<0xA9>", "<0xFF>")]
    detokenizer = IncrementalDetokenizer(spiece)
    assert detokenizer.push([i for i in ids if i is not None]) + detokenizer.flush() == "é�"
    assert spiece.decode([i for i in ids if i is not None]) == "���"
