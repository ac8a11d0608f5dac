import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom_async.cache.hashing import HASH_BYTES, hash_chain, next_hash, root_hash, split_chain
from atom_async.wire.messages import pack_ints

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(token_lists, st.integers(1, 7))
def test_chain_covers_full_blocks_only(tokens: list[int], block_size: int) -> None:
    chain = split_chain(hash_chain(pack_ints(tokens), block_size))
    assert len(chain) == len(tokens) // block_size
    parent = root_hash("")
    for index, block_hash in enumerate(chain):
        parent = next_hash(parent, pack_ints(tokens[index * block_size : (index + 1) * block_size]))
        assert block_hash == parent


@given(token_lists, token_lists, st.integers(1, 5))
def test_equal_hash_means_equal_prefix(a: list[int], b: list[int], block_size: int) -> None:
    chains = [split_chain(hash_chain(pack_ints(tokens), block_size)) for tokens in (a, b)]
    for index, (left, right) in enumerate(zip(*chains, strict=False)):
        end = (index + 1) * block_size
        assert (left == right) == (a[:end] == b[:end])


@given(st.lists(st.integers(0, 100), min_size=4, max_size=20), st.text(max_size=5), st.text(max_size=5))
def test_salt_isolates(tokens: list[int], one: str, other: str) -> None:
    chains = [split_chain(hash_chain(pack_ints(tokens), 4, salt)) for salt in (one, other)]
    assert (chains[0] == chains[1]) == (one == other)
    if one != other:
        assert not set(chains[0]) & set(chains[1])


def test_split_refuses_a_torn_chain() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        split_chain(b"x" * (HASH_BYTES + 1))
