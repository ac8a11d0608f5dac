"""Messages between the engine and a worker.

Steps travel through the rings (`StepPlan` out, `StepResult` back); everything that happens before the
first step or after the last travels over the control socket (`ControlMessage`, tagged).

A plan is a delta: a sequence is described once, in `NewSequence`, and afterwards only by what changes.
Integer lists are packed as little-endian int32 `bytes` (`pack_ints`), which costs one copy to encode
whatever their length.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from .model import ModelSpec, WeightSource
from .sampling import SamplingParams

PROTOCOL_VERSION = 1


def pack_ints(values: Iterable[int]) -> bytes:
    """int32, little-endian. Raises OverflowError for a value outside int32."""
    return array("i", values).tobytes()


def unpack_ints(data: bytes) -> array[int]:
    """The inverse of `pack_ints`. Raises ValueError when the length is no multiple of 4."""
    out = array("i")
    out.frombytes(data)
    return out


class NewSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence enters the worker's tables (first admission, or again after a preemption)."""

    slot: int
    """Row in the worker's tables, below max_num_seqs; free for reuse once named in `finished`."""
    prompt_len: int
    """Tokens from here on are output; after a preemption part of the output is recomputed like a prompt."""
    total_len: int
    """Tokens known at admission. The chunk that reaches total_len samples the next token."""
    present_tokens: int
    """KV below this position is already in the blocks (or is written by another sequence of this very
    step) and must not be written. The first chunk starts at or before it: at present_tokens - 1 when
    everything is present, since the last token must be computed for its logits."""
    blocks: bytes
    """int32 block ids that cover [0, present_tokens); more come in `grown_*`."""
    history: bytes
    """int32 ids of tokens [0, first chunk start) when sampling.needs_history, else empty."""
    sampling: SamplingParams


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One forward pass. Applied in this order: finished, new, grown, then chunks and decodes run.

    All keys and values of the step are written, layer by layer, before attention reads them, so one
    sequence may read blocks that another one of the same step writes.
    """

    step_id: int
    finished: bytes = b""
    """int32 slots whose sequence left (finished, aborted, preempted). Not in chunks or decodes."""
    new: list[NewSequence] = []
    grown_slots: bytes = b""
    """int32; entry i appends block grown_blocks[i] to the table of slot grown_slots[i]."""
    grown_blocks: bytes = b""
    decode_slots: bytes = b""
    """int32 slots that compute one token: the last sampled one, which the worker knows itself (it may
    have been sampled by the step still in flight when this plan was sent). Each samples one token."""
    chunk_slots: bytes = b""
    """int32; chunk i computes tokens [chunk_starts[i], + chunk_lengths[i]) of slot chunk_slots[i]."""
    chunk_starts: bytes = b""
    chunk_lengths: bytes = b""
    chunk_tokens: bytes = b""
    """int32 token ids of all chunks, concatenated."""


class SequenceLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at consecutive positions of one sequence, natural log.

    Sampled token: one position. Prompt: `start` is the prompt position of the first token described.
    `top_ids[i]` / `top_logprobs[i]` are the most likely tokens there, most likely first.
    """

    slot: int
    start: int
    ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """1 is the most likely token."""
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class StepTimings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Microseconds inside the worker."""

    wait_us: int
    """Idle between the previous step's result and this plan."""
    prepare_us: int
    forward_us: int
    sample_us: int


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step produced. Rank 0 reports tokens; the other ranks report only that they finished."""

    step_id: int
    slots: bytes
    """int32 slots that sampled: decode_slots first, then the chunks that reached total_len, in plan order."""
    tokens: bytes
    """int32, one per entry of `slots`."""
    ended: bytes
    """int32 slots whose grammar is complete with this token: no further token is allowed."""
    timings: StepTimings
    logprobs: list[SequenceLogprobs] = []
    prompt_logprobs: list[SequenceLogprobs] = []
    failed: list[tuple[int, str]] = []
    """Sequences that cannot go on alone (a grammar that fails at run time): slot and reason. They do not
    appear in `slots`."""


# Control socket -----------------------------------------------------------------------------------


class WorkerInit(msgspec.Struct, frozen=True, kw_only=True, tag="init"):
    """Engine -> worker, first message."""

    protocol_version: int
    rank: int
    tp_size: int
    model: ModelSpec
    weights: WeightSource
    device: Literal["cpu", "cuda", "simulated"]
    dtype: str
    """Resolved: float32, bfloat16 or float16."""
    seed: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_cache_bytes: int
    """Bytes of KV over all layers for this rank; 0: the worker decides from what is free."""
    gpu_memory_utilization: float
    threads: int
    """CPU threads for this rank; 0: torch's default."""
    store_port: int
    """torch.distributed TCPStore on 127.0.0.1; rank 0 listens on the fd it was handed. 0 when tp_size is 1."""
    tokenizer_json: str
    """Path of a tokenizer.json, for grammars; empty when there is none."""
    end_token_ids: tuple[int, ...]
    """The model's EOS ids, for grammars."""
    simulation: str
    """JSON options of the simulated worker."""


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Worker -> engine, first message."""

    protocol_version: int
    rank: int
    pid: int
    capabilities: tuple[str, ...]
    """Such as `logprobs`, `grammar`, `attention:cpu-sdpa`, `device:cuda`."""


class WorkerProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    rank: int
    stage: Literal["import", "load", "kv", "warmup"]
    done: int
    total: int


class WorkerLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """Weights are in place; answers WorkerInit."""

    rank: int
    max_kv_blocks: int
    """Blocks that fit into the KV memory of this rank."""
    bytes_per_block: int
    device_name: str
    attention_backend: str


class AllocateKv(msgspec.Struct, frozen=True, kw_only=True, tag="allocate_kv"):
    """Engine -> worker: the smallest max_kv_blocks over all ranks."""

    num_blocks: int


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Pool allocated and warmed up; from now on the rings are served."""

    rank: int


class WorkerFault(msgspec.Struct, frozen=True, kw_only=True, tag="fault"):
    """Worker -> engine, last message before it exits: an error that ends the worker."""

    rank: int
    step_id: int
    """-1 outside a step."""
    message: str
    traceback: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Engine -> worker: leave in order."""


ControlMessage = (
    WorkerInit | WorkerHello | WorkerProgress | WorkerLoaded | AllocateKv | WorkerReady | WorkerFault | Shutdown
)
