"""Sequences and samplers for the worker's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from atom_async.wire.messages import NewSequence, pack_ints
from atom_async.wire.sampling import SamplingParams
from workers.sampler import Sampler


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors: a second thread only costs."""
    torch.set_num_threads(1)


MakeSequence = Callable[..., NewSequence]
MakeSampler = Callable[..., Sampler]


@pytest.fixture(scope="session")
def new_sequence() -> MakeSequence:
    def make(
        slot: int, *, prompt_len: int = 1, total_len: int | None = None, history: Sequence[int] = (), **sampling: Any
    ) -> NewSequence:
        return NewSequence(
            slot=slot,
            prompt_len=prompt_len,
            total_len=prompt_len if total_len is None else total_len,
            present_tokens=len(history),
            blocks=b"",
            history=pack_ints(history),
            sampling=SamplingParams(max_tokens=1000, **sampling),
        )

    return make


@pytest.fixture(scope="session")
def new_sampler() -> MakeSampler:
    def make(vocab_size: int, *, max_num_seqs: int = 16, grammar: Any = None) -> Sampler:
        return Sampler(vocab_size=vocab_size, max_num_seqs=max_num_seqs, device=torch.device("cpu"), grammar=grammar)

    return make
