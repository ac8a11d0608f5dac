"""The model of one rank, step by step: the `Runner` on torch."""

from __future__ import annotations

import time

import numpy as np
import torch

from atom_async.wire.messages import (
    NewSequence,
    SequenceLogprobs,
    StepPlan,
    StepResult,
    StepTimings,
    WorkerInit,
    WorkerLoaded,
    pack_ints,
)
from atom_async.wire.model import ModelSpec

from .attention import AttentionBackend, choose_attention, create_attention
from .batch import Batch, ChunkRows, IntArray, SequenceTables, ints
from .grammar import grammar_factory
from .kv import KvPool, bytes_per_block, cpu_kv_bytes, gpu_kv_bytes
from .loading import create_reader
from .loading.reader import TensorReader
from .loop import Progress
from .models import check_variant
from .models.build import Builder
from .models.decoder import Decoder
from .parallel import ParallelGroup
from .sampler import Sampled, Sampler
from .warmup import decode_plan, largest_lengths, prompts_plan

LOGIT_ROWS = 256
"""Prompt log-probabilities are computed for so many rows at a time, to bound the logits in memory."""
WARMUP_TOKENS = 32
SAMPLER_COPIES = 4
"""Tensors of the logits' size that sampling may hold at once, on a GPU; an upper bound for the memory plan."""


class ModelRunner:
    """Satisfies `workers.loop.Runner`. Every rank runs every step; rank 0 samples and tells the others."""

    def __init__(self, init: WorkerInit, group: ParallelGroup) -> None:
        check_variant(init.model)
        self._init = init
        self._group = group
        self._device = torch.device("cuda", init.rank) if init.device == "cuda" else torch.device("cpu")
        self._dtype: torch.dtype = getattr(torch, init.dtype)
        self._attention_name = choose_attention(
            self._device, dtype=self._dtype, head_dim=init.model.head_dim, block_size=init.block_size
        )
        if init.threads and self._device.type == "cpu":
            torch.set_num_threads(init.threads)
        self.capabilities = ("logprobs", "prompt_logprobs", "grammar", f"device:{self._device.type}")
        self._decoder: Decoder
        self._pool: KvPool
        self._attention: AttentionBackend
        self._tables = self._make_tables()
        self._sampler: Sampler | None = None
        self._watched: dict[int, _Watched] = {}
        """Slots whose prompt tokens the sampler, or somebody asking for their log-probabilities, must see."""

    def _make_tables(self) -> SequenceTables:
        init = self._init
        return SequenceTables(
            max_num_seqs=init.max_num_seqs,
            max_model_len=init.max_model_len,
            block_size=init.block_size,
            device=self._device,
        )

    # Start ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self, progress: Progress) -> WorkerLoaded:
        """Raises OSError or ValueError for files that do not hold this model."""
        init = self._init
        reader = create_reader(init)
        builder = Builder(
            init.model,
            reader,
            self._group,
            dtype=self._dtype,
            device=self._device,
            max_model_len=init.max_model_len,
        )
        self._decoder = builder.build(lambda done, total: progress("load", done, total))
        if self._group.rank == 0:  # the only rank that reads every tensor, biases of row-parallel layers included
            _check_all_read(reader, init.model)
            grammars = grammar_factory(init.tokenizer_json, init.model.vocab_size, init.end_token_ids)
            self._sampler = Sampler(
                vocab_size=init.model.vocab_size,
                max_num_seqs=init.max_num_seqs,
                device=self._device,
                grammar=grammars,
            )
        size = bytes_per_block(init.model, init.tp_size, init.block_size, self._dtype)
        return WorkerLoaded(
            rank=init.rank,
            max_kv_blocks=(init.kv_cache_bytes or self._kv_bytes(size)) // size,
            bytes_per_block=size,
            device_name=self._device_name(),
            attention_backend=self._attention_name,
        )

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"

    def _kv_bytes(self, block_bytes: int) -> int:
        if self._device.type == "cpu":
            return cpu_kv_bytes(self._init.tp_size)
        init = self._init
        lengths = largest_lengths(
            init.max_num_batched_tokens, max_model_len=init.max_model_len, max_num_seqs=init.max_num_seqs
        )
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self.allocate(sum(-(-length // init.block_size) for length in lengths))
        self._try([prompts_plan(lengths, init.block_size)])
        step_bytes = torch.cuda.max_memory_allocated(self._device) - before
        del self._pool, self._attention
        torch.cuda.empty_cache()
        sampler_bytes = SAMPLER_COPIES * init.max_num_seqs * init.model.vocab_size * torch.float32.itemsize
        return max(0, gpu_kv_bytes(init.gpu_memory_utilization, self._device, step_bytes + sampler_bytes))

    def allocate(self, num_blocks: int) -> None:
        self._pool = KvPool(self._init, num_blocks, self._dtype, self._device)
        self._attention = create_attention(self._attention_name, self._pool, self._init.model.head_dim**-0.5)

    def warmup(self) -> None:
        """A small prompt and a decode after it, so that the first request does not pay for first calls."""
        room = min(len(self._pool.keys_BKHD[0]) * self._init.block_size, self._init.max_model_len)
        tokens = max(1, min(WARMUP_TOKENS, room) - 1)
        plans = [prompts_plan([tokens], self._init.block_size)]
        if room > tokens and tokens % self._init.block_size:
            plans.append(decode_plan())
        self._try(plans)

    @torch.inference_mode()
    def _try(self, plans: list[StepPlan]) -> None:
        """Plans through model and head, with tables that are forgotten afterwards."""
        tables = self._make_tables()
        for plan in plans:
            batch = tables.apply(plan)
            hidden_TE = self._decoder.forward(batch, self._attention)
            self._decoder.logits(hidden_TE[: self._init.max_num_seqs])

    # Steps ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Raises ValueError for a plan that does not fit what the worker knows."""
        begin = time.perf_counter()
        batch = self._tables.apply(plan)
        self._tell_sampler(plan, batch)
        prepared = time.perf_counter()
        hidden_TE = self._decoder.forward(batch, self._attention)
        prompt_logprobs = self._prompt_logprobs(batch, hidden_TE, plan)
        logits_NV = self._sample_logits(batch, hidden_TE)
        forwarded = time.perf_counter()
        sampled = self._sample(batch, logits_NV)
        done = time.perf_counter()
        timings = StepTimings(0, _us(prepared - begin), _us(forwarded - prepared), _us(done - forwarded))
        return _result(plan.step_id, batch, sampled, prompt_logprobs, timings)

    def _sample_logits(self, batch: Batch, hidden_TE: torch.Tensor) -> torch.Tensor | None:
        if not len(batch.sample_rows):
            return None
        if len(batch.sample_rows) != len(hidden_TE):
            hidden_TE = hidden_TE[torch.from_numpy(batch.sample_rows).to(self._device)]
        return self._decoder.logits(hidden_TE)

    def _sample(self, batch: Batch, logits_NV: torch.Tensor | None) -> Sampled | None:
        if logits_NV is None:
            return None
        sampled: Sampled | None = None
        if self._sampler is not None:
            sampled = self._sampler.sample(logits_NV, batch.sample_slots.tolist(), batch.sample_indices)
            tokens_N = sampled.tokens
        else:
            tokens_N = torch.empty(len(logits_NV), dtype=torch.int64, device=self._device)
        self._tables.remember(batch.sample_slots, self._group.broadcast(tokens_N))
        return sampled

    def _tell_sampler(self, plan: StepPlan, batch: Batch) -> None:
        """Sequences that left and entered, and the prompt tokens of those whose sampling depends on them."""
        for slot in ints(plan.finished).tolist():
            self._watched.pop(slot, None)
            if self._sampler is not None:
                self._sampler.remove(slot)
        for new in plan.new:
            if self._sampler is not None:
                self._sampler.add(new)
            if new.sampling.needs_history or new.sampling.prompt_logprobs >= 0:
                self._watched[new.slot] = _Watched(new)
        if self._sampler is None or not self._watched:
            return
        tokens, offset = ints(plan.chunk_tokens), 0
        for chunk in batch.chunks:
            watched = self._watched.get(chunk.slot)
            if watched is not None and watched.history:
                self._sampler.observe(chunk.slot, tokens[offset : offset + chunk.length], chunk.start)
            offset += chunk.length

    # Prompt log-probabilities --------------------------------------------------------------------

    def _prompt_logprobs(self, batch: Batch, hidden_TE: torch.Tensor, plan: StepPlan) -> list[SequenceLogprobs]:
        """For each watched chunk: its tokens, each by the logits of the position before it."""
        found: list[SequenceLogprobs] = []
        if not self._watched:
            return found
        tokens, offset = ints(plan.chunk_tokens), 0
        for chunk in batch.chunks:
            watched = self._watched.get(chunk.slot)
            if watched is not None and watched.logprobs:
                ids = tokens[offset : offset + chunk.length]
                found += self._describe_chunk(chunk, watched, ids, hidden_TE)
            offset += chunk.length
        return found

    def _describe_chunk(
        self, chunk: ChunkRows, watched: _Watched, ids: IntArray, hidden_TE: torch.Tensor
    ) -> list[SequenceLogprobs]:
        """Row r gives the logits for the token after it, which the next chunk may bring: its row is kept."""
        rows_TE = hidden_TE[chunk.first_row : chunk.first_row + chunk.length]
        first = chunk.start
        if watched.carried_1E is not None:
            rows_TE = torch.cat((watched.carried_1E, rows_TE))
        else:
            first += 1
            ids = ids[1:]
        watched.carried_1E = rows_TE[-1:].clone()
        ids = ids[: max(0, watched.prompt_len - first)]
        parts: list[SequenceLogprobs] = []
        for begin in range(0, len(ids), LOGIT_ROWS):
            some = ids[begin : begin + LOGIT_ROWS]
            logits_NV = self._decoder.logits(rows_TE[begin : begin + len(some)])
            if self._sampler is not None:
                parts.append(self._sampler.prompt_logprobs(chunk.slot, first + begin, logits_NV, some))
        return parts


class _Watched:
    """What must be known of a sequence while its prompt is computed."""

    __slots__ = ("carried_1E", "history", "logprobs", "prompt_len")

    def __init__(self, new: NewSequence) -> None:
        self.history = new.sampling.needs_history
        self.logprobs = new.sampling.prompt_logprobs >= 0
        self.prompt_len = new.prompt_len
        self.carried_1E: torch.Tensor | None = None
        """Hidden state of the last computed prompt position."""


def _check_all_read(reader: TensorReader, model: ModelSpec) -> None:
    """Raises ValueError for files that hold more than the model: they are another one's."""
    tied = {"lm_head.weight", "output.weight"} if model.tie_word_embeddings else set()
    if unread := [name for name in reader.unread() if name not in tied]:
        raise ValueError(f"the files hold tensors that this model does not have: {', '.join(unread[:5])}")


def _result(
    step_id: int,
    batch: Batch,
    sampled: Sampled | None,
    prompt_logprobs: list[SequenceLogprobs],
    timings: StepTimings,
) -> StepResult:
    slots, tokens = batch.sample_slots, np.empty(0, dtype=np.int32)
    if sampled is not None:
        tokens = np.asarray(sampled.token_ids, dtype=np.int32)
        if sampled.failed:
            good = ~np.isin(slots, [slot for slot, _ in sampled.failed])
            slots, tokens = slots[good], tokens[good]
    else:
        slots = slots[:0]
    return StepResult(
        step_id=step_id,
        slots=slots.astype("<i4").tobytes(),
        tokens=tokens.astype("<i4").tobytes(),
        ended=pack_ints(sampled.ended) if sampled is not None else b"",
        timings=timings,
        logprobs=sampled.logprobs if sampled is not None else [],
        prompt_logprobs=prompt_logprobs,
        failed=sampled.failed if sampled is not None else [],
    )


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
