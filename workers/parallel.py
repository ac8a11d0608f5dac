"""Tensor parallelism: what the ranks of one group say to each other."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from atom_async.wire.messages import WorkerInit

JOIN_TIMEOUT = timedelta(minutes=5)


class ParallelGroup(Protocol):
    """Collectives over the ranks. Every rank calls the same ones in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        ...

    def gather_columns(self, shard_NS: torch.Tensor) -> torch.Tensor:
        """[N, S] of each rank side by side: [N, size * S], on every rank."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place."""
        ...


class SingleRank:
    """No parallelism: nothing is sent."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather_columns(self, shard_NS: torch.Tensor) -> torch.Tensor:
        return shard_NS

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class DistributedGroup:
    """Over torch.distributed's default process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def gather_columns(self, shard_NS: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(shard_NS) for _ in range(self.size)]
        dist.all_gather(parts, shard_NS.contiguous())
        return torch.cat(parts, dim=1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, src=0)
        return tensor


def join_group(init: WorkerInit, store_fd: int) -> ParallelGroup:
    """Meets the other ranks on loopback. Rank 0 listens on `store_fd`, which the engine opened."""
    if init.tp_size == 1:
        return SingleRank()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if init.device == "cuda":
        torch.cuda.set_device(init.rank)
    listening = {"master_listen_fd": store_fd} if init.rank == 0 and store_fd >= 0 else {}
    store = dist.TCPStore(
        "127.0.0.1", init.store_port, init.tp_size, is_master=init.rank == 0, timeout=JOIN_TIMEOUT, **listening
    )
    backend = "nccl" if init.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=init.rank, world_size=init.tp_size, timeout=JOIN_TIMEOUT)
    atexit.register(dist.destroy_process_group)  # gloo's threads end the process with SIGABRT when left running
    return DistributedGroup(init.rank, init.tp_size)
