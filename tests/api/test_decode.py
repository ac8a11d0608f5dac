"""Bodies that are no JSON, or not the JSON they should be, are always the client's fault and never ours."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom_async.api.decode import BodyDecoder
from atom_async.api.errors import ApiError
from atom_async.api.requests import ChatRequest, CompletionRequest

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, "user", "zzz"])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "x", "n": "two", "temperature": NaN}',
        b'{"prompt": "x", "n": "two", "user": "\\ud83d"}',
        b'{"prompt": "x", "n": "two"} and more',
        b'{"prompt": "x", "n": "two", "user": "\xff"}',
        b"[" * 5000,
    ],
)
def test_malformed_after_a_mismatch_is_still_a_400(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        BodyDecoder(CompletionRequest).decode(data)
    assert caught.value.status == 400


def status_of(kind: type, data: bytes) -> int:
    try:
        BodyDecoder(kind).decode(data)
    except ApiError as error:
        return error.status
    return 200


@given(st.dictionaries(names, values, max_size=5), st.binary(max_size=4), st.integers(0, 80))
def test_any_body_decodes_or_is_a_400(body: dict[str, object], noise: bytes, cut: int) -> None:
    text = json.dumps(body).encode()
    for data in (text, text[:cut] + noise + text[cut:], text[:cut]):
        for kind in (CompletionRequest, ChatRequest):
            assert status_of(kind, data) in (200, 400)
