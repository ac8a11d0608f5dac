"""The embedded default model end to end, in real worker processes: transformers' greedy text, whatever the engine does.

A continuation is checked with one forward pass of the reference over prompt and continuation: every token must be
the reference's own choice at its place, which by induction is what its greedy generation gives. Two float32
implementations may disagree where two tokens are equally likely; NEAR_TIE bounds what counts as that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from atom_async import AsyncEngine
from atom_async.model.resolve import ResolvedModel
from workers.loading.gguf import GgufReader

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]  # seconds here, minutes on a slow machine

DATA = json.loads((Path(__file__).parent.parent / "data" / "gsm8k_sample.json").read_text())
CHATS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three prime numbers.",
    "Explain what an atom is to a child.",
    "Translate 'good morning' into Spanish.",
    "What comes after Tuesday?",
    "Name a fruit that is red.",
    "How many legs does a spider have?",
]
OUTPUT_TOKENS = 24
NEAR_TIE = 1e-3
Prompt = str | list[dict[str, str]]


def prompts() -> list[Prompt]:
    """24 questions behind the same five examples, and 8 short chats."""
    shots = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in DATA["shots"])
    questions: list[Prompt] = [f"{shots}Question: {q}\nAnswer:" for q in DATA["questions"]]
    return questions + [[{"role": "user", "content": text}] for text in CHATS]


async def answer(engine: AsyncEngine, prompt: Prompt) -> tuple[list[int], int]:
    """Token ids and how many prompt tokens were cached."""
    ids: list[int] = []
    cached = 0
    async for output in engine.generate(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True):
        ids += output.token_ids
        cached = output.cached_tokens
    return ids, cached


async def run_engine(asked: list[Prompt], *, at_once: bool, **settings: Any) -> tuple[list[list[int]], Any, list[int]]:
    async with AsyncEngine("default", device="cpu", **settings) as engine:
        if at_once:
            answers = await asyncio.gather(*(answer(engine, prompt) for prompt in asked))
        else:
            answers = [await answer(engine, prompt) for prompt in asked]
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        return [ids for ids, _ in answers], stats, [cached for _, cached in answers]


@pytest.fixture(scope="module")
def reference(default_model: ResolvedModel) -> Any:
    """transformers' Llama on the weights that the GGUF dequantises to."""
    spec = default_model.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    reader = GgufReader(default_model.weights, spec)
    state = {
        name: reader.rows(name, tuple(tensor.shape), 0, tensor.shape[0])
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval().float()


@pytest.fixture(scope="module")
def together() -> tuple[list[list[int]], Any, list[int]]:
    """All prompts at once, with the prefix cache and the default settings."""
    return asyncio.run(run_engine(prompts(), at_once=True))


def encode(default_model: ResolvedModel, prompt: Prompt) -> list[int]:
    engine = AsyncEngine("default")
    engine.model = default_model
    from atom_async.text.chat_template import ChatTemplate
    from atom_async.text.tokenizer import Tokenizer

    text = default_model.text
    engine.tokenizer = Tokenizer.from_file(default_model.tokenizer_json, eos_ids=text.eos_ids)
    engine._template = ChatTemplate(text.chat_template or "", special_tokens={})
    return engine._encode(prompt)


def test_every_token_is_the_one_transformers_chooses(together, reference, default_model: ResolvedModel) -> None:
    outputs, _, _ = together
    exact = 0
    for prompt, output in zip(prompts(), outputs, strict=True):
        ids = encode(default_model, prompt)
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + output[:-1]]), logits_to_keep=len(output)).logits[0]
        best = logits.max(dim=-1)
        gap = best.values - logits[torch.arange(len(output)), torch.tensor(output)]
        assert gap.max() <= NEAR_TIE, f"token {int(gap.argmax())} of {output} is not the reference's"
        exact += int((best.indices == torch.tensor(output)).sum())
    assert exact >= len(outputs) * OUTPUT_TOKENS - 2


def test_the_shared_examples_are_computed_once(together, default_model: ResolvedModel) -> None:
    """All 24 questions arrive in one turn, so most of the examples' tokens are shared inside steps."""
    _, stats, cached = together
    total = sum(len(encode(default_model, prompt)) for prompt in prompts())
    assert stats.prompt_tokens == total
    assert stats.prompt_tokens_computed < 0.3 * total
    assert sorted(cached[:24])[1] > 400


@pytest.mark.parametrize(
    ("settings", "some"),
    [
        pytest.param({"enable_prefix_caching": False, "max_num_seqs": 8}, range(0, 32, 3), id="no-prefix-cache"),
        pytest.param(
            {"max_num_batched_tokens": 48, "max_num_seqs": 6, "block_size": 8}, range(0, 32, 2), id="small-chunks"
        ),
        pytest.param({"tp": 3, "max_num_seqs": 16}, [0, 1, 2, *range(24, 32)], id="tp3"),
    ],
)
def test_settings_change_no_token(together, settings: dict[str, Any], some: Sequence[int]) -> None:
    outputs, _, _ = asyncio.run(run_engine([prompts()[index] for index in some], at_once=True, **settings))
    assert outputs == [together[0][index] for index in some]


def test_one_by_one_gives_the_same(together) -> None:
    some = range(0, 32, 3)
    outputs, _, cached = asyncio.run(run_engine([prompts()[index] for index in some], at_once=False))
    assert outputs == [together[0][index] for index in some]
    assert min(cached[1:8]) > 400


def test_preemption_changes_no_token(together) -> None:
    """Room for about four of the chats at their full length: some are preempted and computed again."""
    some = list(range(24, 32))
    settings = {"kv_cache_memory": 20 * 16 * 46_080, "max_model_len": 128}
    outputs, stats, _ = asyncio.run(run_engine([prompts()[i] for i in some], at_once=True, **settings))
    assert outputs == [together[0][index] for index in some]
    assert stats.preemptions > 0
