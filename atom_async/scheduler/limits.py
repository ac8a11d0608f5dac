"""What one step, and the engine as a whole, may carry."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_SEQUENCE = 512
"""Room for one NewSequence without its int lists and what `Request.sampling_bytes` counts."""
BYTES_PER_INT = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step, and the engine as a whole, may carry."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_plan_bytes: int
    block_size: int
    prefix_caching: bool
    max_chunk_tokens: int = 0
    """Most tokens of one prompt in a step; 0: no cap."""
    chunked: bool = True
    """Whether a prompt may be computed in several steps."""
    separate: bool = False
    """A step is prefill or decode, never both."""
    prefix_wait_s: float | None = None
    """Longest wait for a prefix; None: a multiple of what is predicted."""
    max_bypass_s: float = 1.0
    """How long others may pass a request that does not fit into memory."""
