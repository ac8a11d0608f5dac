"""Draws the next token of every sequence of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from atom_async.wire.messages import NewSequence, SequenceLogprobs, unpack_ints
from atom_async.wire.sampling import SamplingParams
from workers.grammar import GrammarFactory
from workers.sampling.batch import Batch, IntArray
from workers.sampling.constrained import Constraints
from workers.sampling.draws import chunk_sums, draw, uniforms
from workers.sampling.logprobs import describe
from workers.sampling.penalties import TokenCounts, penalize_output, penalize_repetition
from workers.sampling.settings import ADJUSTING, Need, Settings
from workers.sampling.truncation import least_weights


@dataclass(slots=True)
class Sampled:
    """One step's draws, in the order of the slots that were asked for."""

    tokens: torch.Tensor
    """int64 [n] on the device; 0 for a failed slot."""
    token_ids: list[int]
    """The same on the host."""
    ended: list[int] = field(default_factory=list)
    """Slots whose grammar is complete with this token: nothing may follow."""
    logprobs: list[SequenceLogprobs] = field(default_factory=list)
    """For the slots that asked and did not fail; `start` is the position that was given."""
    failed: list[tuple[int, str]] = field(default_factory=list)
    """Slot and reason. The other rows are not affected."""


@dataclass(slots=True)
class _Sequence:
    sampling: SamplingParams
    prompt_len: int


class Sampler:
    """Everything that one sequence's tokens depend on besides its logits, kept by slot.

    Order, per row: log-probabilities of the raw logits are taken first; then the end tokens are masked while
    the output is shorter than min_tokens, the grammar's mask, logit_bias, repetition, presence and frequency
    penalty; then the largest logit wins (temperature 0, lowest id among equals), or temperature, top_k,
    top_p, min_p and a draw. At least one token is always kept. See `least_weights` for ties and for what
    the shares refer to, `uniforms` and `draw` for the draw: it is a function of the row, the seed and the
    position alone, whatever else is in the batch.

    Tokens count for penalties and grammars as soon as they are drawn.
    """

    def __init__(
        self, *, vocab_size: int, max_num_seqs: int, device: torch.device, grammar: GrammarFactory | None
    ) -> None:
        self._device = device
        self._settings = Settings(max_num_seqs, vocab_size, device)
        self._output = TokenCounts(vocab_size, max_num_seqs, device)
        self._seen = TokenCounts(vocab_size, max_num_seqs, device)
        self._constraints = Constraints(grammar, vocab_size, device)
        self._sequences: dict[int, _Sequence] = {}
        self._refused: dict[int, str] = {}

    @torch.inference_mode()
    def add(self, sequence: NewSequence) -> None:
        """A sequence enters. What is wrong with its settings is reported in `failed` by its first `sample`."""
        slot, sampling = sequence.slot, sequence.sampling
        self.remove(slot)
        self._sequences[slot] = _Sequence(sampling, sequence.prompt_len)
        try:
            needs = self._settings.add(slot, sampling)
            if sampling.grammar is not None:
                self._constraints.add(slot, sampling.grammar)
        except ValueError as error:
            self._settings.remove(slot)
            self._refused[slot] = str(error)
            return
        if Need.OUTPUT_PENALTY in needs:
            self._output.add(slot)
        if Need.REPETITION_PENALTY in needs:
            self._seen.add(slot)
        if sequence.history:
            self.observe(slot, np.array(unpack_ints(sequence.history), dtype=np.int32), 0)

    def remove(self, slot: int) -> None:
        """The sequence left. No effect for a free slot."""
        if self._sequences.pop(slot, None) is None:
            return
        self._refused.pop(slot, None)
        self._settings.remove(slot)
        self._constraints.remove(slot)
        self._output.remove(slot)
        self._seen.remove(slot)

    @torch.inference_mode()
    def observe(self, slot: int, token_ids: npt.NDArray[np.int32], start: int) -> None:
        """Known tokens at positions [start, start + n) of the whole sequence, each position told once:
        prompt, and after a preemption the output produced before it."""
        output = token_ids[max(self._sequences[slot].prompt_len - start, 0) :]
        self._seen.count(slot, token_ids)
        self._output.count(slot, output)
        self._constraints.feed(slot, output.tolist())

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
        """Draws one token per row.

        logits: float32 [n, vocab], one row per slot, changed in place. slots: distinct. positions[i]: index
        of the token being drawn in the output of slots[i], 0 for its first.
        """
        batch = Batch(self._settings, slots, positions, self._device)
        asked = batch.rows(Need.LOGPROBS)
        raw = batch.select(logits, asked) if len(asked) else None
        if raw is not None and batch.needs & ADJUSTING:
            raw = raw.clone()
        failed = self._adjust(logits, batch)
        best, tokens = logits.max(-1)
        for rows in batch.blocks(Need.RANDOM, logits.shape[1]):
            self._draw(logits, best, tokens, batch, rows)
        tokens.masked_fill_(~best.isfinite(), 0)
        on_host = torch.stack((tokens.double(), best.double())).cpu().numpy()
        token_ids = on_host[0].astype(np.int64).tolist()
        self._find_failures(on_host[1], batch, failed)
        result = Sampled(tokens, token_ids)
        self._count(tokens, batch)
        self._advance(batch, token_ids, result, failed)
        if raw is not None:
            self._log(raw, tokens, asked, batch, result, failed)
        self._report(batch, result, failed)
        return result

    @torch.inference_mode()
    def prompt_logprobs(
        self, slot: int, start: int, logits: torch.Tensor, token_ids: npt.NDArray[np.int32]
    ) -> SequenceLogprobs:
        """Log-probabilities of the prompt tokens at [start, start + m).

        logits: float32 [m, vocab]; row i is the distribution of token_ids[i], which the model computed at
        position start + i - 1.
        """
        k = max(self._sequences[slot].sampling.prompt_logprobs, 0)
        ids = token_ids.astype(np.int64)
        found = describe(logits, torch.from_numpy(ids).to(self._device), k)
        top_ids, top = found.top_ids.tolist(), found.top_logprobs.tolist()
        return SequenceLogprobs(slot, start, ids.tolist(), found.logprobs, found.ranks, top_ids, top)

    def _adjust(self, logits: torch.Tensor, batch: Batch) -> dict[int, str]:
        """Masks, biases and penalties, in place. Returns row -> message of the rows that cannot go on."""
        settings, failed = self._settings, {}
        if Need.MIN_TOKENS in batch.needs:
            self._mask_ends(logits, batch)
        if Need.GRAMMAR in batch.needs:
            rows = batch.rows(Need.GRAMMAR)
            failed = self._constraints.mask(logits, rows.tolist(), batch.slots[rows].tolist())
        if Need.BIAS in batch.needs:
            self._bias(logits, batch)
        for rows in batch.blocks(Need.REPETITION_PENALTY, logits.shape[1]):
            penalty = batch.column(settings.repetition, rows)[:, None]
            counts = self._seen.of(batch.slots[rows])
            batch.replace(logits, rows, penalize_repetition(batch.select(logits, rows), counts, penalty))
        for rows in batch.blocks(Need.OUTPUT_PENALTY, logits.shape[1]):
            presence = batch.column(settings.presence, rows)[:, None]
            frequency = batch.column(settings.frequency, rows)[:, None]
            counts = self._output.of(batch.slots[rows])
            batch.replace(logits, rows, penalize_output(batch.select(logits, rows), counts, presence, frequency))
        return failed

    def _mask_ends(self, logits: torch.Tensor, batch: Batch) -> None:
        rows = batch.rows(Need.MIN_TOKENS)
        rows = rows[batch.positions[rows] < self._settings.min_tokens[batch.slots[rows]]]
        if len(rows):
            logits[batch.entries(rows, self._settings.end_ids)] = -torch.inf

    def _bias(self, logits: torch.Tensor, batch: Batch) -> None:
        rows = batch.rows(Need.BIAS)
        values = torch.cat([self._settings.bias[slot] for slot in batch.slots[rows].tolist()])
        logits.index_put_(batch.entries(rows, self._settings.bias_ids), values, accumulate=True)

    def _draw(
        self, logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, batch: Batch, rows: IntArray
    ) -> None:
        """Replaces the entries of `tokens` for these rows, which are drawn at random."""
        settings = self._settings
        index = batch.index(rows)
        temperature = batch.column(settings.temperature, rows)[:, None]
        weights = (batch.select(logits, rows) - best[index, None]).div_(temperature).exp_()
        sums = chunk_sums(weights)
        if int(np.bitwise_or.reduce(batch.flags[rows])) & Need.TRUNCATION:
            columns = (batch.column(column, rows) for column in (settings.top_k, settings.top_p, settings.min_p))
            least = least_weights(weights, sums.sum(1), *columns)
            # A float32 mask, for the same reason as in the penalties.
            weights.mul_(torch.ge(weights, least[:, None], out=torch.empty_like(weights)))
            sums = chunk_sums(weights)
        uniform = uniforms(settings.seed[batch.slots[rows]], batch.positions[rows])
        tokens[index] = draw(weights, sums, torch.from_numpy(uniform).to(self._device))

    def _find_failures(self, best: npt.NDArray[np.float64], batch: Batch, failed: dict[int, str]) -> None:
        """`best`: the largest adjusted logit of each row, which shows every NaN and every infinity."""
        for row, slot in enumerate(batch.slots.tolist() if self._refused else ()):
            if slot in self._refused:
                failed.setdefault(row, self._refused[slot])
        for row in np.flatnonzero(~np.isfinite(best)).tolist():
            failed.setdefault(row, _why_not_finite(float(best[row])))

    def _count(self, tokens: torch.Tensor, batch: Batch) -> None:
        for need, counts in ((Need.OUTPUT_PENALTY, self._output), (Need.REPETITION_PENALTY, self._seen)):
            if need in batch.needs:
                rows = batch.rows(need)
                counts.count_sampled(batch.slots[rows], tokens[batch.index(rows)])

    def _advance(self, batch: Batch, token_ids: list[int], result: Sampled, failed: dict[int, str]) -> None:
        if Need.GRAMMAR not in batch.needs:
            return
        for row in batch.rows(Need.GRAMMAR).tolist():
            if row in failed:
                continue
            slot = int(batch.slots[row])
            ended, error = self._constraints.advance(slot, token_ids[row])
            if error:
                failed[row] = error
            elif ended:
                result.ended.append(slot)

    def _log(
        self,
        raw: torch.Tensor,
        tokens: torch.Tensor,
        rows: IntArray,
        batch: Batch,
        result: Sampled,
        failed: dict[int, str],
    ) -> None:
        wanted = [self._sequences[slot].sampling.logprobs for slot in batch.slots[rows].tolist()]
        found = describe(raw, tokens[batch.index(rows)], max(wanted))
        for i, (row, k) in enumerate(zip(rows.tolist(), wanted, strict=True)):
            if row not in failed:
                result.logprobs.append(
                    SequenceLogprobs(
                        slot=int(batch.slots[row]),
                        start=int(batch.positions[row]),
                        ids=[result.token_ids[row]],
                        logprobs=[found.logprobs[i]],
                        ranks=[found.ranks[i]],
                        top_ids=[found.top_ids[i, :k].tolist()],
                        top_logprobs=[found.top_logprobs[i, :k].tolist()],
                    )
                )

    def _report(self, batch: Batch, result: Sampled, failed: dict[int, str]) -> None:
        for row, message in sorted(failed.items()):
            result.failed.append((int(batch.slots[row]), message))
            if result.token_ids[row]:
                result.token_ids[row] = 0
                result.tokens[row] = 0


def _why_not_finite(best: float) -> str:
    if best == -np.inf:
        return "no token is left: the model, the grammar, min_tokens and logit_bias together exclude every one"
    return f"the model produced {'infinite' if best > 0 else 'NaN'} logits"
