"""The largest result a step can have must fit the ring, or a client could end the engine with a request."""

import msgspec
import pytest

from atom_async.config import EngineConfig
from atom_async.engine.process_workers import ProcessWorkers
from atom_async.wire.messages import SequenceLogprobs, StepResult, StepTimings
from atom_async.wire.model import ModelSpec, WeightSource

SPEC = ModelSpec(
    architecture="llama",
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=1 << 31,
    max_positions=1024,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)


@pytest.mark.parametrize(("tokens", "top"), [(2048, 20), (8192, 100), (16, 0), (4096, 1)])
def test_log_probabilities_of_every_token_of_a_step_fit(tokens: int, top: int) -> None:
    config = EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=16, max_logprobs=top)
    workers = ProcessWorkers(
        config, SPEC, WeightSource(kind="random"), device="simulated", dtype="float32", max_model_len=1024
    )
    wide, value = (1 << 31) - 1, -123.4567891234
    part = SequenceLogprobs(
        slot=15,
        start=1_000_000,
        ids=[wide] * tokens,
        logprobs=[value] * tokens,
        ranks=[wide] * tokens,
        top_ids=[[wide] * top] * tokens,
        top_logprobs=[[value] * top] * tokens,
    )
    slots = b"x" * 4 * 16
    result = StepResult(1 << 40, slots, slots, slots, StepTimings(0, 0, 0, 0), prompt_logprobs=[part])
    assert len(msgspec.msgpack.encode(result)) <= workers._result_ring_bytes() // 2 - 16
