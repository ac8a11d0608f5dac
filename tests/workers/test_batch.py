import numpy as np
import pytest
import torch

from atom_async.wire.messages import NewSequence, StepPlan, pack_ints
from atom_async.wire.sampling import SamplingParams
from workers.batch import SequenceTables


def make_tables() -> SequenceTables:
    return SequenceTables(max_num_seqs=4, max_model_len=32, block_size=4, device=torch.device("cpu"))


def plan(*, new=(), decodes=(), chunks=(), finished=(), grown=()) -> StepPlan:
    return StepPlan(
        step_id=1,
        finished=pack_ints(finished),
        new=list(new),
        grown_slots=pack_ints(s for s, _ in grown),
        grown_blocks=pack_ints(b for _, b in grown),
        decode_slots=pack_ints(decodes),
        chunk_slots=pack_ints(s for s, _, _ in chunks),
        chunk_starts=pack_ints(p for _, p, _ in chunks),
        chunk_lengths=pack_ints(len(t) for _, _, t in chunks),
        chunk_tokens=pack_ints(t for _, _, ids in chunks for t in ids),
    )


def sequence(slot: int, total: int, blocks: list[int], present: int = 0, prompt_len: int = 0) -> NewSequence:
    params = SamplingParams(max_tokens=9)
    return NewSequence(slot, prompt_len or total, total, present, pack_ints(blocks), b"", params)


def test_layout_of_decodes_and_chunks() -> None:
    tables = make_tables()
    first = tables.apply(plan(new=[sequence(2, 5, [7])], grown=[(2, 3)], chunks=[(2, 0, [10, 11, 12, 13, 14])]))
    assert first.ids_T.tolist() == [10, 11, 12, 13, 14]
    assert first.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert first.write_places_N.tolist() == [28, 29, 30, 31, 12]
    assert first.write_rows_N is None
    assert (first.sample_rows.tolist(), first.sample_slots.tolist(), first.sample_indices) == ([4], [2], [0])
    tables.remember(first.sample_slots, torch.tensor([99]))
    mixed = tables.apply(plan(new=[sequence(0, 6, [5])], decodes=[2], chunks=[(0, 0, [1, 2, 3])]))
    assert mixed.ids_T.tolist() == [99, 1, 2, 3]
    assert mixed.positions_T.tolist() == [5, 0, 1, 2]
    assert mixed.write_places_N.tolist() == [13, 20, 21, 22]
    assert mixed.context_lengths.tolist() == [6, 3]
    assert [table.tolist() for table in mixed.block_tables] == [[7, 3], [5]]
    assert (mixed.sample_rows.tolist(), mixed.sample_slots.tolist(), mixed.sample_indices) == ([0], [2], [1])


def test_what_is_present_is_not_written() -> None:
    tables = make_tables()
    batch = tables.apply(plan(new=[sequence(1, 8, [0, 1], present=8)], chunks=[(1, 7, [50])]))
    assert batch.write_rows_N is not None
    assert batch.write_rows_N.tolist() == []
    assert batch.context_lengths.tolist() == [8]


def test_a_readmitted_sequence_continues_its_output() -> None:
    tables = make_tables()
    batch = tables.apply(plan(new=[sequence(1, 8, [0, 1], prompt_len=5)], chunks=[(1, 0, list(range(8)))]))
    assert batch.sample_indices == [3]


def test_a_slot_is_free_again_once_finished() -> None:
    tables = make_tables()
    tables.apply(plan(new=[sequence(1, 2, [0])], chunks=[(1, 0, [1, 2])]))
    tables.apply(plan(finished=[1], new=[sequence(1, 1, [4])], chunks=[(1, 0, [3])]))
    with pytest.raises(ValueError, match="before its old one has finished"):
        tables.apply(plan(new=[sequence(1, 1, [4])], chunks=[(1, 0, [3])]))


def test_plans_that_do_not_fit_are_refused() -> None:
    tables = make_tables()
    with pytest.raises(ValueError, match="holds no sequence"):
        tables.apply(plan(decodes=[3]))
    tables.apply(plan(new=[sequence(1, 6, [0, 1])], chunks=[(1, 0, [1, 2])]))
    with pytest.raises(ValueError, match="a chunk at 3, the sequence stands at 2"):
        tables.apply(plan(chunks=[(1, 3, [1])]))


def test_last_tokens_are_kept_by_slot() -> None:
    tables = make_tables()
    tables.remember(np.array([3, 0], dtype=np.int32), torch.tensor([30, 10]))
    assert tables._last_token.tolist() == [10, 0, 0, 30]
