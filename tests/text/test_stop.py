"""Stop strings, against a search that looks at the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_async.text.stop import StopMatcher


def naive(text: str, stops: list[str]) -> tuple[str, str] | None:
    """(text before the stop, stop): the first to be complete, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return None


def could_become_a_stop(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    return max(
        (n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops)), default=0
    )


few_letters = st.text("ab.", max_size=12)
stop_lists = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(st.lists(few_letters, max_size=6), stop_lists, st.booleans())
def test_any_split_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
    expected = naive("".join(pieces), stops)
    if expected is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == "".join(pieces)
    else:
        before, stop = expected
        assert matcher.matched == stop
        assert shown == before + (stop if include else "")
        assert matcher.flush() == ""


@settings(max_examples=300, deadline=None)
@given(st.lists(few_letters, max_size=6), stop_lists)
def test_holds_back_only_what_could_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return
        assert len(seen) - len(shown) == could_become_a_stop(seen, stops)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("text E") == "text "
    assert matcher.push("ND more") == ""
    assert matcher.matched == "END"
    assert matcher.push("more") == ""


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
