"""The worker's tables of live sequences, and the ragged batch that a step plan makes of them.

Rows of a batch: first one for each decode, in plan order, then the tokens of each chunk, in plan order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom_async.wire.messages import NewSequence, StepPlan

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]


def ints(data: bytes) -> IntArray:
    """A view on packed int32."""
    return np.frombuffer(data, dtype="<i4")


@dataclass(slots=True)
class ChunkRows:
    """A run of prompt tokens in the batch."""

    slot: int
    first_row: int
    start: int
    """Position of its first token in the sequence."""
    length: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(slots=True)
class Batch:
    """One step's input. Arrays are on the host, tensors on the device."""

    decode_slots: IntArray
    chunks: list[ChunkRows]
    ids_T: torch.Tensor
    """int64 [T]."""
    positions_T: torch.Tensor
    """int64 [T]."""
    write_rows_N: torch.Tensor | None
    """Rows whose keys and values are written, int64; None: all of them."""
    write_places_N: torch.Tensor
    """Where to: block * block_size + offset, int64."""
    context_lengths: LongArray
    """Per sequence, decodes first: tokens to attend to, the step's own included."""
    block_tables: list[IntArray]
    """Per sequence: the blocks that hold its context."""
    sample_rows: LongArray
    """Rows whose logits are sampled from: decodes, then the last row of each sampling chunk."""
    sample_slots: IntArray
    sample_indices: list[int]
    """Per sample row: which output token of its sequence this is, from 0."""

    @property
    def num_decodes(self) -> int:
        return len(self.decode_slots)


class SequenceTables:
    """Per slot: block table, position, lengths; and on the device the last sampled token."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._blocks = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._position = np.zeros(max_num_seqs, dtype=np.int64)
        self._total = np.zeros(max_num_seqs, dtype=np.int64)
        self._present = np.zeros(max_num_seqs, dtype=np.int64)
        self._prompt_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._live = np.zeros(max_num_seqs, dtype=bool)
        self._last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def prompt_len(self, slot: int) -> int:
        return int(self._prompt_len[slot])

    def apply(self, plan: StepPlan) -> Batch:
        """Updates the tables as the plan says and lays out its batch.

        Raises ValueError for a plan that does not fit the tables.
        """
        for slot in ints(plan.finished):
            self._live[slot] = False
        for new in plan.new:
            self._enter(new)
        for slot, block in zip(ints(plan.grown_slots).tolist(), ints(plan.grown_blocks).tolist(), strict=True):
            self._blocks[slot, self._num_blocks[slot]] = block
            self._num_blocks[slot] += 1
        return self._lay_out(plan)

    def remember(self, slots: IntArray, tokens_N: torch.Tensor) -> None:
        """The tokens just sampled: the next inputs of these slots."""
        self._last_token[torch.from_numpy(slots.astype(np.int64)).to(self._device)] = tokens_N

    def _enter(self, new: NewSequence) -> None:
        slot = new.slot
        if self._live[slot]:
            raise ValueError(f"slot {slot} is given to a new sequence before its old one has finished")
        blocks = ints(new.blocks)
        self._blocks[slot, : len(blocks)] = blocks
        self._num_blocks[slot] = len(blocks)
        self._position[slot] = min(new.present_tokens, new.total_len - 1)
        self._present[slot] = new.present_tokens
        self._total[slot] = new.total_len
        self._prompt_len[slot] = new.prompt_len
        self._live[slot] = True

    def _lay_out(self, plan: StepPlan) -> Batch:
        decode_slots = ints(plan.decode_slots)
        chunks = self._chunks(plan, len(decode_slots))
        positions = np.concatenate(
            [self._position[decode_slots], *(np.arange(c.start, c.end, dtype=np.int64) for c in chunks)]
        )
        row_slots = np.concatenate([decode_slots, *(np.full(c.length, c.slot, dtype=np.int32) for c in chunks)])
        if not self._live[row_slots].all():
            raise ValueError("the plan computes a slot that holds no sequence")
        places = self._blocks[row_slots, positions // self._block_size].astype(np.int64)
        places = places * self._block_size + positions % self._block_size
        writable = positions >= self._present[row_slots]
        write_rows = None if writable.all() else self._tensor(np.flatnonzero(writable))
        sampling = [c for c in chunks if c.samples]
        slots = np.concatenate([decode_slots, np.array([c.slot for c in chunks], dtype=np.int32)])
        self._position[decode_slots] += 1
        for chunk in chunks:
            self._position[chunk.slot] = chunk.end
        sample_slots = np.concatenate([decode_slots, np.array([c.slot for c in sampling], dtype=np.int32)])
        lengths = self._position[slots]
        return Batch(
            decode_slots=decode_slots,
            chunks=chunks,
            ids_T=self._input_ids(decode_slots, plan),
            positions_T=self._tensor(positions),
            write_rows_N=write_rows,
            write_places_N=self._tensor(places[writable]),
            context_lengths=lengths,
            block_tables=[
                self._blocks[slot, : -(-length // self._block_size)]
                for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True)
            ],
            sample_rows=np.concatenate(
                [
                    np.arange(len(decode_slots), dtype=np.int64),
                    np.array([c.first_row + c.length - 1 for c in sampling], dtype=np.int64),
                ]
            ),
            sample_slots=sample_slots,
            sample_indices=(self._position[sample_slots] - self._prompt_len[sample_slots]).tolist(),
        )

    def _chunks(self, plan: StepPlan, first_row: int) -> list[ChunkRows]:
        chunks: list[ChunkRows] = []
        columns = (ints(plan.chunk_slots), ints(plan.chunk_starts), ints(plan.chunk_lengths))
        for slot, start, length in zip(*(column.tolist() for column in columns), strict=True):
            if start != self._position[slot]:
                raise ValueError(f"slot {slot}: a chunk at {start}, the sequence stands at {self._position[slot]}")
            chunks.append(ChunkRows(slot, first_row, start, length, samples=start + length == self._total[slot]))
            first_row += length
        return chunks

    def _input_ids(self, decode_slots: IntArray, plan: StepPlan) -> torch.Tensor:
        """Decodes take what this worker sampled itself, which may still be on its way to the engine."""
        decode_ids_N = self._last_token[self._tensor(decode_slots.astype(np.int64))]
        chunk_ids = ints(plan.chunk_tokens)
        if not len(chunk_ids):
            return decode_ids_N
        return torch.cat((decode_ids_N, self._tensor(chunk_ids.astype(np.int64))))

    def _tensor(self, array: LongArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
