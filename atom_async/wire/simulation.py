"""A model that computes nothing but checks everything, and knows how long a step would take.

Its "KV" of a block is a running hash over all tokens of the sequence up to what is written of the block, so the
token sampled after position p is a function of tokens [0, p] if, and only if, every block the scheduler handed
out holds what it should. A wrong, stale or unwritten block changes the tokens or raises `PlanError`.
Independent of block size, chunking and sharing; `expected_tokens` is the closed form.

The time of a step follows the cost models of shared benchmarks for such simulators:

    decode-only      decode_fixed + experts + N * per_sequence + sum(KV) * per_mtoken
    prefill-carrying prefill_fixed + tokens * per_ktoken + sum(n * ctx) * per_gpair, plus the two decode terms

with `ctx` of a chunk of n tokens at prefix P being P + n/2, and `experts` the expected share of a
mixture-of-experts' weights that N tokens touch.
"""

from __future__ import annotations

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from .messages import NewSequence, SequenceLogprobs, StepPlan, StepResult, StepTimings, pack_ints, unpack_ints
from .sampling import SamplingParams

_TOKEN_BYTES = 4


class PlanError(Exception):
    """The plan is wrong: the scheduler's fault."""


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in milliseconds. The defaults cost nothing."""

    vocab_size: int = 32_000
    seed: int = 0
    num_kv_blocks: int = 65_536
    """Blocks the simulated device has room for, when no KV memory is set."""
    end_token_probability: float = 0.0
    """Chance of each token, once min_tokens are out, to be an end token of its request."""
    decode_fixed_ms: float = 0.0
    prefill_fixed_ms: float = 0.0
    prefill_ms_per_ktoken: float = 0.0
    prefill_ms_per_gpair: float = 0.0
    decode_ms_per_sequence: float = 0.0
    decode_ms_per_mtoken: float = 0.0
    experts_ms: float = 0.0
    experts_total: int = 1
    experts_active: int = 1
    start_delay_ms: float = 0.0
    """How long loading takes."""


def parse_options(text: str) -> SimulationOptions:
    """Raises ValueError naming the field that does not fit."""
    try:
        return msgspec.json.decode(text or "{}", type=SimulationOptions)
    except msgspec.MsgspecError as error:
        raise ValueError(f"--simulation: {error}") from error


def _next_token(state: int, position: int, sampling: SamplingParams, options: SimulationOptions) -> int:
    mix = state ^ (options.seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    if sampling.temperature > 0:
        mix = xxh3_64_intdigest(b"%d.%d.%d" % (mix, sampling.seed, position))
    ends = sampling.end_token_ids
    if ends:
        if options.end_token_probability and position >= sampling.min_tokens:
            draw = xxh3_64_intdigest(b"end.%d" % mix) / 2**64
            if draw < options.end_token_probability:
                return ends[0]
        token = mix % options.vocab_size
        while token in ends:
            token = (token + 1) % options.vocab_size
        return token
    return mix % options.vocab_size


def expected_tokens(prompt: list[int], sampling: SamplingParams, count: int, options: SimulationOptions) -> list[int]:
    """The first `count` tokens any correct schedule gives this prompt."""
    state = xxh3_64(pack_ints(prompt))
    output: list[int] = []
    for position in range(count):
        token = _next_token(state.intdigest(), position, sampling, options)
        output.append(token)
        state.update(pack_ints((token,)))
    return output


class _Sequence:
    __slots__ = ("blocks", "last_token", "position", "present", "prompt_len", "sampling", "total")

    def __init__(self, new: NewSequence) -> None:
        self.blocks = list(unpack_ints(new.blocks))
        self.position = -1
        """Tokens computed or present; -1 before the first chunk."""
        self.present = new.present_tokens
        self.total = new.total_len
        self.prompt_len = new.prompt_len
        self.sampling = new.sampling
        self.last_token = -1


class SimulatedModel:
    """Slot tables and KV states of one simulated rank."""

    def __init__(self, options: SimulationOptions, *, block_size: int, max_num_seqs: int, num_blocks: int) -> None:
        self.options = options
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._states: list[xxh3_64 | None] = [None] * num_blocks
        """Hash over the sequence up to the last token written into the block."""
        self._filled = [0] * num_blocks
        """Tokens written into the block."""
        self._sequences: dict[int, _Sequence] = {}
        self._last_step = 0

    def apply(self, plan: StepPlan) -> StepResult:
        """Runs the step. Raises PlanError for a plan that a real worker could not have run rightly."""
        if plan.step_id != self._last_step + 1:
            raise PlanError(f"step {plan.step_id} after step {self._last_step}")
        self._last_step = plan.step_id
        self._change_tables(plan)
        rows: list[int] = []
        tokens: list[int] = []
        prompt_logprobs: list[SequenceLogprobs] = []
        for slot in unpack_ints(plan.decode_slots):
            sequence = self._sequence(slot)
            if sequence.last_token < 0:
                raise PlanError(f"slot {slot} decodes before its prompt is computed")
            state = self._write(slot, sequence, sequence.position, pack_ints((sequence.last_token,)))
            rows.append(slot)
            tokens.append(self._sample(sequence, state))
        offset = 0
        chunks = zip(
            unpack_ints(plan.chunk_slots), unpack_ints(plan.chunk_starts), unpack_ints(plan.chunk_lengths), strict=True
        )
        for slot, start, length in chunks:
            sequence = self._sequence(slot)
            data = plan.chunk_tokens[offset * _TOKEN_BYTES : (offset + length) * _TOKEN_BYTES]
            offset += length
            self._check_chunk(slot, sequence, start, length, len(data) // _TOKEN_BYTES)
            state = self._write(slot, sequence, start, data)
            if sequence.sampling.prompt_logprobs >= 0:
                prompt_logprobs += self._prompt_logprobs(slot, sequence, start, data)
            if sequence.position == sequence.total:
                rows.append(slot)
                tokens.append(self._sample(sequence, state))
        if offset * _TOKEN_BYTES != len(plan.chunk_tokens):
            raise PlanError(f"{len(plan.chunk_tokens) // _TOKEN_BYTES} chunk tokens sent, {offset} described")
        return self._result(plan.step_id, rows, tokens, prompt_logprobs)

    def _result(
        self, step_id: int, rows: list[int], tokens: list[int], prompt_logprobs: list[SequenceLogprobs]
    ) -> StepResult:
        failed: list[tuple[int, str]] = []
        logprobs: list[SequenceLogprobs] = []
        for slot, token in zip(rows, tokens, strict=True):
            sequence = self._sequences[slot]
            if sequence.sampling.grammar is not None:
                failed.append((slot, "the simulated device cannot follow a grammar"))
            elif sequence.sampling.logprobs >= 0:
                logprobs.append(self._describe(slot, sequence.position, [token], sequence.sampling.logprobs))
        if failed:
            out = {slot for slot, _ in failed}
            kept = [(slot, token) for slot, token in zip(rows, tokens, strict=True) if slot not in out]
            rows, tokens = [slot for slot, _ in kept], [token for _, token in kept]
        timings = StepTimings(0, 0, 0, 0)
        return StepResult(step_id, pack_ints(rows), pack_ints(tokens), b"", timings, logprobs, prompt_logprobs, failed)

    def _describe(self, slot: int, start: int, ids: list[int], count: int) -> SequenceLogprobs:
        """Invented, in the right shape: each token the most likely, and its successors behind it."""
        vocab = self.options.vocab_size
        return SequenceLogprobs(
            slot=slot,
            start=start,
            ids=ids,
            logprobs=[-0.5] * len(ids),
            ranks=[1] * len(ids),
            top_ids=[[(token + n) % vocab for n in range(count)] for token in ids],
            top_logprobs=[[-0.5 - n for n in range(count)] for _ in ids],
        )

    def _prompt_logprobs(self, slot: int, sequence: _Sequence, start: int, data: bytes) -> list[SequenceLogprobs]:
        """Of the chunk's prompt tokens, without the prompt's first, which nothing precedes."""
        first = max(start, 1)
        ids = list(unpack_ints(data))[first - start : max(0, sequence.prompt_len - start)]
        return [self._describe(slot, first, ids, sequence.sampling.prompt_logprobs)] if ids else []

    def duration_s(self, plan: StepPlan) -> float:
        """Seconds the step takes, from the state before it is applied."""
        options = self.options
        decodes = unpack_ints(plan.decode_slots)
        context = sum(self._sequence(slot).position for slot in decodes)
        ms = len(decodes) * options.decode_ms_per_sequence + context * options.decode_ms_per_mtoken / 1e6
        if not plan.chunk_slots:
            touched = 1 - (1 - options.experts_active / options.experts_total) ** len(decodes)
            return (ms + options.decode_fixed_ms + options.experts_ms * touched) / 1e3
        tokens = pairs = 0.0
        for start, length in zip(unpack_ints(plan.chunk_starts), unpack_ints(plan.chunk_lengths), strict=True):
            tokens += length
            pairs += length * (start + length / 2)
        ms += options.prefill_fixed_ms + tokens * options.prefill_ms_per_ktoken / 1e3
        return (ms + pairs * options.prefill_ms_per_gpair / 1e9) / 1e3

    def _change_tables(self, plan: StepPlan) -> None:
        for slot in unpack_ints(plan.finished):
            if self._sequences.pop(slot, None) is None:
                raise PlanError(f"slot {slot} finished, but holds no sequence")
        for new in plan.new:
            if new.slot in self._sequences:
                raise PlanError(f"slot {new.slot} given to a new sequence before it was finished")
            if not 0 <= new.slot < self._max_num_seqs:
                raise PlanError(f"slot {new.slot} outside [0, {self._max_num_seqs})")
            if len(unpack_ints(new.blocks)) * self._block_size < new.present_tokens:
                raise PlanError(f"slot {new.slot}: {new.present_tokens} tokens present without blocks for them")
            self._sequences[new.slot] = _Sequence(new)
        for slot, block in zip(unpack_ints(plan.grown_slots), unpack_ints(plan.grown_blocks), strict=True):
            if not 0 <= block < len(self._states):
                raise PlanError(f"slot {slot} grows by block {block}, outside [0, {len(self._states)})")
            self._sequence(slot).blocks.append(block)

    def _sequence(self, slot: int) -> _Sequence:
        sequence = self._sequences.get(slot)
        if sequence is None:
            raise PlanError(f"slot {slot} holds no sequence")
        return sequence

    def _check_chunk(self, slot: int, sequence: _Sequence, start: int, length: int, sent: int) -> None:
        if sent != length or length < 1:
            raise PlanError(f"slot {slot}: a chunk of {length} tokens came with {sent}")
        if sequence.position < 0:
            if start != min(sequence.present, sequence.total - 1):
                raise PlanError(f"slot {slot}: first chunk at {start}, {sequence.present} tokens are present")
        elif start != sequence.position:
            raise PlanError(f"slot {slot}: a chunk at {start}, the sequence stands at {sequence.position}")
        if start + length > sequence.total:
            raise PlanError(f"slot {slot}: chunk [{start}, {start + length}) beyond {sequence.total} known tokens")

    def _write(self, slot: int, sequence: _Sequence, start: int, data: bytes) -> xxh3_64:
        """Computes tokens at [start, ...); returns the state after the last one."""
        block_size, position = self._block_size, start
        end = start + len(data) // _TOKEN_BYTES
        sequence.position = end
        if end > len(sequence.blocks) * block_size:
            raise PlanError(f"slot {slot}: token {end - 1} is beyond its {len(sequence.blocks)} blocks")
        if start < sequence.present:  # the last token of a prompt that is all there: computed, not written
            return self._state_at(slot, sequence, end)
        while position < end:
            offset = position % block_size
            stop = min(end, position - offset + block_size)
            state = self._state_at(slot, sequence, position)
            block = sequence.blocks[position // block_size]
            if offset == 0:
                state = state.copy()
                self._states[block] = state
            state.update(data[(position - start) * _TOKEN_BYTES : (stop - start) * _TOKEN_BYTES])
            self._filled[block] = stop - position + offset
            position = stop
        return state

    def _state_at(self, slot: int, sequence: _Sequence, position: int) -> xxh3_64:
        """What attention would read before `position`."""
        if position == 0:
            return xxh3_64()
        index, offset = divmod(position - 1, self._block_size)
        block = sequence.blocks[index]
        state = self._states[block]
        if state is None or self._filled[block] != offset + 1:
            raise PlanError(
                f"slot {slot}: position {position - 1} read from block {block} of {self._filled[block]} tokens"
            )
        return state

    def _sample(self, sequence: _Sequence, state: xxh3_64) -> int:
        position = sequence.position - sequence.prompt_len
        sequence.last_token = _next_token(state.intdigest(), position, sequence.sampling, self.options)
        return sequence.last_token
