"""Every short life of small worlds: up to three requests, up to four blocks, every order of what can happen.

A life is a word over `a` (the next request arrives), `s` (a step is submitted), `c` (the oldest step completes),
`t` (time passes to the next deadline) and `x` (a request is aborted). After every letter all invariants are checked
(see `World`), and at its end everything must run out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from world import World

LONGEST = 6
CROWDS: dict[str, list[tuple[list[int], int, int]]] = {
    "one prefix": [([1, 2, 3], 1, 0), ([1, 2, 4], 1, 0), ([1, 2, 3, 5], 1, 0)],
    "equal prompts": [([1, 2], 2, 0), ([1, 2], 2, 0), ([1, 2], 1, 0)],
    "nested": [([1], 2, 0), ([1, 2, 3, 4], 0, 0), ([1, 2, 3], 1, 0)],
    "priorities": [([1, 2, 3], 1, 1), ([1, 2, 4], 1, 0), ([7, 8], 2, 0)],
    "strangers": [([1, 2, 3], 1, 0), ([4, 5], 2, 0), ([6], 3, 0)],
}
"""Prompt, max_tokens, priority of each."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"blocks": 4, "block_size": 1, "budget": 3, "max_num_seqs": 3},
    "one slot": {"blocks": 4, "block_size": 1, "budget": 2, "max_num_seqs": 1, "max_bypass_ms": 1000.0},
    "held": {"blocks": 4, "block_size": 1, "budget": 3, "max_num_seqs": 2, "coalesce_target_fill": 1.0}
    | {"prefill_decode_interval": 2, "coalesce_max_hold_ms": 2500.0, "coalesce_quiet_ms": 2500.0},
    "separate": {"blocks": 3, "block_size": 2, "budget": 3, "max_num_seqs": 2, "step_policy": "separate"}
    | {"max_decode_gap_ms": 2000.0, "prefix_wait_ms": 1500.0},
}


def words(length: int) -> Iterator[str]:
    """All words of this length that a life can have: at most three arrivals, no completion without a step."""

    def grow(word: str) -> Iterator[str]:
        if len(word) == length:
            yield word
            return
        for letter in "ascxt":
            arrived, flying = word.count("a"), word.count("s") - word.count("c")
            if (
                (letter == "a" and arrived == 3)
                or (letter in "sxt" and not arrived)
                or (letter == "s" and flying == 2)
                or (letter == "c" and flying == 0)
                or (letter in "xt" and letter in word)
            ):
                continue
            yield from grow(word + letter)

    yield from grow("")


def live(word: str, victim: int, crowd: list[tuple[list[int], int, int]], settings: dict[str, Any]) -> None:
    world = World(**settings)
    arrivals = iter(enumerate(crowd))
    for letter in word:
        if letter == "a":
            number, (prompt, max_tokens, priority) = next(arrivals)
            world.add(f"r{number}", prompt[: world.max_model_len - 1], max_tokens, priority=priority)
        elif letter == "s" and len(world.results) < 2:
            world.submit()
        elif letter == "c" and world.results:
            world.complete()
        elif letter == "x" and f"r{victim}" in world.scheduler.requests:
            world.abort(f"r{victim}")
        elif letter == "t" and world.scheduler.next_alarm() is not None:
            world.wait()
            world.expire()
    world.run(most_steps=200)
    assert world.scheduler.pool.owned == 0


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_every_short_life(crowd: str, settings: str) -> None:
    for word in words(LONGEST):
        for victim in range(word.count("a")) if "x" in word else (0,):
            try:
                live(word, victim, CROWDS[crowd], SETTINGS[settings])
            except BaseException as error:
                raise AssertionError(f"live({word!r}, {victim}, CROWDS[{crowd!r}], SETTINGS[{settings!r}])") from error
