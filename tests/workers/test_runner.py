"""The runner as the worker's loop drives it: plans in, results out, from loading to sampling."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from driver import Driver, Sequence, tokens
from tiny import TinyModel, rope, worker_init
from tp_rank import DECODES, FIRST, run_script, script, step

from atom_async.wire.messages import NewSequence, StepResult, WorkerInit, pack_ints, unpack_ints
from atom_async.wire.model import WeightSource
from atom_async.wire.sampling import SamplingParams
from workers.kv import CPU_MOST_BYTES, bytes_per_block, cpu_kv_bytes
from workers.parallel import SingleRank
from workers.runner import LOGIT_ROWS, ModelRunner
from workers.warmup import largest_lengths, prompts_plan


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel("llama", tmp_path_factory.mktemp("runner"), max_position_embeddings=600)


def started(init: WorkerInit, num_blocks: int = 200) -> ModelRunner:
    runner = ModelRunner(init, SingleRank())
    runner.load(lambda stage, done, total: None)
    runner.allocate(num_blocks)
    return runner


def outputs(results: list[StepResult], slot: int) -> list[int]:
    found = []
    for result in results:
        slots = unpack_ints(result.slots).tolist()
        if slot in slots:
            found.append(unpack_ints(result.tokens)[slots.index(slot)])
    return found


@pytest.fixture(scope="module")
def scripted(tiny: TinyModel) -> tuple[list[list[int]], list[StepResult]]:
    rng = random.Random(8)
    prompts = [tokens(rng, length) for length in (31, 12, 17)]
    return prompts, run_script(worker_init(tiny.spec, tiny.weights), SingleRank(), script(prompts))


def test_greedy_outputs_are_transformers_own(tiny: TinyModel, scripted) -> None:
    prompts, results = scripted
    for slot in FIRST:
        ids = torch.tensor([prompts[slot]])
        with torch.inference_mode():
            expected = tiny.reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=DECODES + 1, do_sample=False, eos_token_id=-1
            )
        assert outputs(results, slot) == expected[0, len(prompts[slot]) :].tolist()


def test_log_probabilities_of_outputs_and_prompts(tiny: TinyModel, scripted) -> None:
    """The prompts came in two chunks, so one position's logits were carried over."""
    prompts, results = scripted
    for slot in FIRST:
        prompt, output = prompts[slot], outputs(results, slot)
        reference = tiny.logits(prompt + output).log_softmax(-1)
        told = [part for result in results for part in result.logprobs if part.slot == slot]
        places = torch.arange(len(prompt) - 1, len(prompt) + len(output) - 1)
        expected = reference[places, torch.tensor(output)]
        assert torch.allclose(torch.tensor([part.logprobs[0] for part in told]), expected, atol=1e-4)
        described = [part for result in results for part in result.prompt_logprobs if part.slot == slot]
        assert [p for part in described for p in range(part.start, part.start + len(part.ids))] == list(
            range(1, len(prompt))
        )
        assert [token for part in described for token in part.ids] == prompt[1:]
        found = torch.tensor([value for part in described for value in part.logprobs])
        expected = reference[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert torch.allclose(found, expected, atol=1e-4)


def test_a_long_prompt_is_described_piece_by_piece(tiny: TinyModel) -> None:
    prompt = tokens(random.Random(2), LOGIT_ROWS + 40)
    runner = started(worker_init(tiny.spec, tiny.weights, max_model_len=600))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    new = NewSequence(0, len(prompt), len(prompt), 0, pack_ints(range(100)), b"", params)
    plan = msgspec.structs.replace(prompts_plan([len(prompt)], 4), new=[new], chunk_tokens=pack_ints(prompt))
    parts = runner.execute(plan).prompt_logprobs
    assert [(part.start, len(part.ids)) for part in parts] == [(1, LOGIT_ROWS), (LOGIT_ROWS + 1, 39)]
    expected = tiny.logits(prompt).log_softmax(-1)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    found = torch.tensor([value for part in parts for value in part.logprobs])
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_step_that_samples_nothing_reports_nothing(scripted) -> None:
    _, (first, *_) = scripted
    assert (first.slots, first.tokens, first.logprobs) == (b"", b"", [])
    assert first.prompt_logprobs != []
    assert first.timings.forward_us > 0


def test_a_sequence_that_cannot_be_sampled_fails_alone(tiny: TinyModel) -> None:
    """No tokenizer, so no grammars: slot 0 asks for one."""
    from atom_async.wire.sampling import Grammar

    runner = started(worker_init(tiny.spec, tiny.weights))
    plan = step(new=[[1, 2, 3], [4, 5]], chunks=[(0, 0, [1, 2, 3]), (1, 0, [4, 5])])
    asked = SamplingParams(max_tokens=9, grammar=Grammar(kind="regex", source="a+"))
    first = msgspec.structs.replace(plan.new[0], sampling=asked)
    result = runner.execute(msgspec.structs.replace(plan, new=[first, plan.new[1]]))
    assert [slot for slot, _ in result.failed] == [0]
    assert unpack_ints(result.slots).tolist() == [1]
    assert len(unpack_ints(result.tokens)) == 1


def test_a_finished_slot_starts_afresh(tiny: TinyModel) -> None:
    runner = started(worker_init(tiny.spec, tiny.weights))
    plan = step(new=[[9, 8, 7]], chunks=[(0, 0, [9, 8, 7])])
    first = runner.execute(plan)
    runner.execute(step(decodes=[0]))
    again = runner.execute(msgspec.structs.replace(plan, finished=pack_ints([0])))
    assert again.tokens == first.tokens


@pytest.mark.parametrize("position", [90, 128])
def test_dynamic_scaling_is_that_of_the_longest_length_served(position: int, tmp_path: Path) -> None:
    """Trained for 64 positions; transformers grows the base with the prompt, here the prompt has that length."""
    tiny = TinyModel("llama", tmp_path, max_position_embeddings=64, **rope("dynamic", factor=2.0))
    runner = started(worker_init(tiny.spec, tiny.weights, max_model_len=position))
    driver = Driver(runner, tiny)
    ids = tokens(random.Random(3), position)
    driver.step([], [(Sequence(0, ids, position, list(range(-(-position // 4)))), position)])


def test_sharded_checkpoints(tmp_path: Path) -> None:
    tiny = TinyModel("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tiny.reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(tiny.weights.files) > 2
    driver = Driver(started(worker_init(tiny.spec, tiny.weights)), tiny)
    ids = tokens(random.Random(4), 20)
    driver.step([], [(Sequence(0, ids, 20, list(range(5))), 20)])


def test_random_weights_are_a_function_of_the_seed(tiny: TinyModel) -> None:
    def first_tokens(seed: int) -> bytes:
        init = worker_init(tiny.spec, WeightSource(kind="random"), seed=seed)
        return b"".join(r.tokens for r in run_script(init, SingleRank(), script([[5] * 31, [6] * 12, [7] * 17])))

    assert first_tokens(1) == first_tokens(1)
    assert first_tokens(1) != first_tokens(2)


def test_progress_is_told_layer_by_layer(tiny: TinyModel) -> None:
    told: list[tuple[str, int, int]] = []
    ModelRunner(worker_init(tiny.spec, tiny.weights), SingleRank()).load(lambda *told_now: told.append(told_now))
    assert told == [("load", 1, 3), ("load", 2, 3), ("load", 3, 3)]


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [1 << 20, (1 << 20) - 1, 5000])
def test_kv_memory_is_used_to_the_last_block(tiny: TinyModel, given: int) -> None:
    runner = ModelRunner(worker_init(tiny.spec, tiny.weights, kv_cache_bytes=given), SingleRank())
    loaded = runner.load(lambda stage, done, total: None)
    runner.allocate(loaded.max_kv_blocks)
    held = sum(t.nbytes for t in (*runner._pool.keys_BKHD, *runner._pool.values_BKHD))
    assert held == loaded.max_kv_blocks * loaded.bytes_per_block
    assert given - loaded.bytes_per_block < held <= given


def test_default_kv_memory_is_bounded_and_shared_by_the_ranks(tiny: TinyModel) -> None:
    assert 0 < cpu_kv_bytes(4) <= CPU_MOST_BYTES // 4
    loaded = ModelRunner(worker_init(tiny.spec, tiny.weights, kv_cache_bytes=0), SingleRank()).load(lambda *_: None)
    assert 0 < loaded.max_kv_blocks * loaded.bytes_per_block <= CPU_MOST_BYTES


def test_ranks_with_more_heads_than_the_model_each_hold_one(tiny: TinyModel) -> None:
    sizes = [bytes_per_block(tiny.spec, tp, 4, torch.float32) for tp in (1, 2, 4, 8)]
    assert sizes == [2 * 3 * 4 * heads * 8 * 4 for heads in (4, 2, 1, 1)]


@pytest.mark.parametrize("num_blocks", [1, 2, 9])
@pytest.mark.parametrize("max_model_len", [1, 5, 256])
def test_warmup_fits_any_pool(tiny: TinyModel, num_blocks: int, max_model_len: int) -> None:
    runner = started(worker_init(tiny.spec, tiny.weights, max_model_len=max_model_len), num_blocks)
    runner.warmup()
    result = runner.execute(prompts_plan([1], 4))
    assert len(unpack_ints(result.tokens)) == 1


def test_the_largest_step_fills_the_budget_where_it_can() -> None:
    assert largest_lengths(2048, max_model_len=900, max_num_seqs=16) == [900, 900, 248]
    assert largest_lengths(2048, max_model_len=4096, max_num_seqs=16) == [2048]
    assert largest_lengths(2048, max_model_len=512, max_num_seqs=2) == [512, 512]
