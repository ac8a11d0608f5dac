"""Tensor parallelism: real ranks over gloo give one rank's tokens and probabilities."""

from __future__ import annotations

import multiprocessing
import random
import socket
from pathlib import Path

import msgspec
import pytest
import torch
from test_gguf import write_gguf
from tiny import TinyModel, worker_init
from tp_rank import DECODES, FIRST, run_rank, run_script, script

from atom_async.model.gguf_header import read_gguf_header
from atom_async.wire.messages import SequenceLogprobs, StepPlan, StepResult, WorkerInit, unpack_ints
from atom_async.wire.model import ModelSpec, WeightSource
from workers.parallel import SingleRank

PROMPT_LENGTHS = (31, 12, 17)
EVEN = {"num_attention_heads": 8, "num_key_value_heads": 4}
FEW_KV_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
MODELS = {
    "llama": EVEN,
    "llama-bias": FEW_KV_HEADS,
    "mistral-window": EVEN,
    "qwen2-window": FEW_KV_HEADS,
    "qwen3-tied": {**FEW_KV_HEADS, "num_key_value_heads": 1},
}


@pytest.fixture(scope="module")
def plans() -> list[StepPlan]:
    rng = random.Random(5)
    return script([[rng.randrange(131) for _ in range(length)] for length in PROMPT_LENGTHS])


@pytest.fixture(scope="module")
def inits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WorkerInit]:
    """Safetensors of several architectures, a quantised GGUF file, and random weights. 131 vocabulary rows and
    fewer KV heads than ranks leave uneven and shared shards."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: TinyModel(name, folder / name, **settings) for name, settings in MODELS.items()}
    sources: dict[str, tuple[ModelSpec, WeightSource]] = {n: (tiny.spec, tiny.weights) for n, tiny in made.items()}
    sources["gguf"] = (made["llama"].spec, gguf_of(made["llama"], folder / "tiny.gguf"))
    sources["random"] = (made["qwen3-tied"].spec, WeightSource(kind="random"))
    return {name: worker_init(spec, weights, seed=3) for name, (spec, weights) in sources.items()}


def gguf_of(tiny: TinyModel, path: Path) -> WeightSource:
    from gguf import GGMLQuantizationType as Kind

    write_gguf(tiny, path, {"mlp": Kind.Q8_0, "self_attn": Kind.Q4_0, "embed_tokens": Kind.F16})
    return WeightSource(kind="gguf", files=(str(path),), tensors=read_gguf_header(path).tensors)


@pytest.fixture(scope="module")
def alone(inits: dict[str, WorkerInit], plans: list[StepPlan]) -> dict[str, list[StepResult]]:
    return {name: run_script(init, SingleRank(), plans) for name, init in inits.items()}


def run_ranks(size: int, inits: list[WorkerInit], plans: list[StepPlan]) -> list[list[list[StepResult]]]:
    """Per rank and model, the results of every step."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0), backlog=size) as listener:
        port = listener.getsockname()[1]
        inits = [msgspec.structs.replace(init, tp_size=size, store_port=port) for init in inits]
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=run_rank, args=(rank, inits, plans, None if rank else listener, pipes[rank][1]))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
    for _, mine in pipes:
        mine.close()  # so that a rank that dies is an end of file
    answers = [msgspec.msgpack.decode(end.recv_bytes(), type=list[list[StepResult]]) for end, _ in pipes]
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * size
    return answers


@pytest.mark.process
@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_give_what_one_gives(
    size: int, inits: dict[str, WorkerInit], plans: list[StepPlan], alone: dict[str, list[StepResult]]
) -> None:
    first, *others = run_ranks(size, list(inits.values()), plans)
    for name, results in zip(inits, first, strict=True):
        for result, expected in zip(results, alone[name], strict=True):
            assert (result.slots, result.tokens, result.failed) == (expected.slots, expected.tokens, []), name
            assert_close(result.logprobs, expected.logprobs)
            assert_close(result.prompt_logprobs, expected.prompt_logprobs)
    assert all(not result.tokens for rank in others for results in rank for result in results)


def test_the_script_does_what_it_is_for(alone: dict[str, list[StepResult]]) -> None:
    for results in alone.values():
        assert [len(unpack_ints(result.tokens)) for result in results] == [0, 3, *[3] * DECODES]
        described = [part for result in results for part in result.prompt_logprobs]
        assert {part.slot for part in described} == set(FIRST)
        assert len({unpack_ints(result.tokens)[0] for result in results[1:]}) > 1


def assert_close(found: list[SequenceLogprobs], expected: list[SequenceLogprobs]) -> None:
    assert [(part.slot, part.start, part.ids) for part in found] == [(p.slot, p.start, p.ids) for p in expected]
    for part, other in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(part.logprobs), torch.tensor(other.logprobs), atol=1e-4)
        assert torch.allclose(torch.tensor(part.top_logprobs), torch.tensor(other.top_logprobs), atol=1e-4)


def test_shares_that_do_not_come_out_even_are_refused(inits: dict[str, WorkerInit]) -> None:
    class Third(SingleRank):
        size = 3

    with pytest.raises(ValueError, match="8 do not divide evenly over 3 ranks"):
        run_script(msgspec.structs.replace(inits["llama"], tp_size=3), Third(), [])
