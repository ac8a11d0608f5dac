"""The sequences of a batch that follow a grammar: masks before the draw, progress after it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

import numpy as np
import torch

from atom_async.wire.sampling import Grammar
from workers.grammar import GrammarError, GrammarFactory, GrammarMatcher


class _Constraint:
    """One slot's grammar; output tokens wait in `pending` while it is being compiled."""

    def __init__(self, compiling: Future[GrammarMatcher]) -> None:
        self._compiling = compiling
        self.pending: list[int] = []
        self.error = ""

    def matcher(self) -> GrammarMatcher | None:
        """Waits for the compilation. None after an error."""
        if self.error:
            return None
        try:
            matcher = self._compiling.result()
            if self.pending:
                matcher.advance(self.pending)
                self.pending = []
        except (GrammarError, CancelledError) as error:
            self.error = str(error) or "the grammar's compilation was cancelled"
            return None
        return matcher

    def advance(self, token: int) -> bool:
        """Whether the output is complete and nothing may follow."""
        matcher = self.matcher()
        if matcher is None:
            return False
        if not matcher.finished:
            # A finished one is asked again when the step after its end was already on its way.
            try:
                matcher.advance((token,))
            except GrammarError as error:
                self.error = str(error)
                return False
        return matcher.finished

    def cancel(self) -> None:
        self._compiling.cancel()


def forbidding(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 [n, words] of bits -> float32 [n, vocab_size]: 0 where a bit is set, -inf where not and past the
    last word. To be added: on a CPU that costs a fraction of filling by a boolean mask."""
    octets = torch.arange(256, dtype=torch.uint8, device=words.device)
    bits = (octets[:, None] >> torch.arange(8, dtype=torch.uint8, device=words.device)) & 1
    table = bits.float().log_()
    mask = table[words.view(torch.uint8).int()].flatten(1)
    if mask.shape[1] < vocab_size:
        mask = torch.nn.functional.pad(mask, (0, vocab_size - mask.shape[1]), value=-torch.inf)
    return mask[:, :vocab_size]


class Constraints:
    """By slot. `factory` is None when the model has no tokenizer.json."""

    def __init__(self, factory: GrammarFactory | None, vocab_size: int, device: torch.device) -> None:
        self._factory = factory
        self._vocab_size = vocab_size
        self._device = device
        self._by_slot: dict[int, _Constraint] = {}

    def add(self, slot: int, grammar: Grammar) -> None:
        """Starts to compile. Raises ValueError when this model takes no grammars."""
        if self._factory is None:
            raise ValueError("this model has no tokenizer.json, so no grammar can be enforced")
        self._by_slot[slot] = _Constraint(self._factory.compile(grammar))

    def remove(self, slot: int) -> None:
        constraint = self._by_slot.pop(slot, None)
        if constraint is not None:
            constraint.cancel()

    def feed(self, slot: int, token_ids: Sequence[int]) -> None:
        """Output that was produced before the sequence was preempted."""
        constraint = self._by_slot.get(slot)
        if constraint is not None:
            constraint.pending.extend(token_ids)

    def mask(self, logits: torch.Tensor, rows: Sequence[int], slots: Sequence[int]) -> dict[int, str]:
        """Sets what the grammars forbid to -inf, in place; row rows[i] of the logits belongs to slots[i].

        Returns row -> message for the sequences that cannot go on.
        """
        failed: dict[int, str] = {}
        good: list[tuple[int, GrammarMatcher]] = []
        for row, slot in zip(rows, slots, strict=True):
            matcher = self._by_slot[slot].matcher()
            if matcher is None:
                failed[row] = self._by_slot[slot].error
            else:
                good.append((row, matcher))
        if good and self._factory is not None:
            masked = [row for row, _ in good]
            messages = self._apply(self._factory, logits, masked, [matcher for _, matcher in good])
            failed.update({row: message for row, message in zip(masked, messages, strict=True) if message})
        return failed

    def _apply(
        self, factory: GrammarFactory, logits: torch.Tensor, rows: list[int], matchers: list[GrammarMatcher]
    ) -> list[str]:
        words = np.zeros((len(rows), factory.mask_words), dtype=np.int32)
        messages = factory.fill_masks(matchers, words)
        mask = forbidding(torch.from_numpy(words).to(self._device), self._vocab_size)
        logits.index_add_(0, torch.tensor(rows, device=self._device), mask)
        return messages

    def advance(self, slot: int, token: int) -> tuple[bool, str]:
        """The token drawn for this slot. Returns (ended, error)."""
        constraint = self._by_slot[slot]
        ended = constraint.advance(token)
        return ended, constraint.error
