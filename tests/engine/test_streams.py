import asyncio

import pytest

from atom_async.engine.client import EngineDead, EngineOutput, TokenLogprob
from atom_async.engine.streams import StreamTable


def output(*tokens: int, finish: str | None = None, **fields) -> EngineOutput:
    return EngineOutput(request_id="a", token_ids=list(tokens), finish_reason=finish, **fields)


async def test_outputs_arrive_in_order_and_the_last_one_ends() -> None:
    table = StreamTable(on_abandoned=pytest.fail)
    stream = table.open(["a"])
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    table.deliver(output(1))
    assert (await reader)[0].token_ids == [1]
    table.deliver(output(2))
    table.deliver(output(3, finish="stop"))
    assert "a" not in table
    [last] = await anext(stream)
    assert (last.token_ids, last.finish_reason) == ([2, 3], "stop")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()


async def test_a_late_reader_gets_everything_merged() -> None:
    table = StreamTable(on_abandoned=pytest.fail)
    stream = table.open(["a"])
    entry = TokenLogprob(1, -0.5, 1, [])
    table.deliver(output(1, logprobs=[entry], prompt_logprobs=[None, entry]))
    table.deliver(output(2, logprobs=[entry]))
    [merged] = await anext(stream)
    assert merged.token_ids == [1, 2]
    assert merged.logprobs == [entry, entry]
    assert merged.prompt_logprobs == [None, entry]
    table.deliver(output(3, finish="length"))
    assert (await anext(stream))[0].logprobs is None


async def test_a_reader_that_leaves_early_abandons_once() -> None:
    left: list[str] = []
    table = StreamTable(on_abandoned=left.append)
    stream = table.open(["a"])
    await stream.aclose()
    await stream.aclose()
    assert left == ["a"]
    table.deliver(output(1))  # to nobody
    assert len(table) == 0


async def test_failures_come_after_what_was_delivered() -> None:
    table = StreamTable(on_abandoned=pytest.fail)
    stream, other = table.open(["a"]), table.open(["b"])
    table.deliver(output(1))
    table.fail("b", EngineDead("only b"))
    table.fail_all(EngineDead("all"))
    assert (await anext(stream))[0].token_ids == [1]
    with pytest.raises(EngineDead, match="all"):
        await anext(stream)
    with pytest.raises(EngineDead, match="only b"):
        await anext(other)


async def test_the_requests_of_a_body_share_a_stream_and_each_is_merged_by_itself() -> None:
    left: list[str] = []
    table = StreamTable(on_abandoned=left.append)
    stream = table.open(["a", "b", "c"])
    for request_id, token in [("a", 1), ("b", 2), ("a", 3)]:
        table.deliver(EngineOutput(request_id=request_id, token_ids=[token]))
    assert [(o.request_id, o.token_ids) for o in await anext(stream)] == [("a", [1, 3]), ("b", [2])]
    table.deliver(EngineOutput(request_id="b", finish_reason="stop"))
    assert "b" not in table
    assert [o.request_id for o in await anext(stream)] == ["b"]
    await stream.aclose()
    assert sorted(left) == ["a", "c"]
    assert len(table) == 0


async def test_a_failure_of_one_request_ends_its_whole_body() -> None:
    table = StreamTable(on_abandoned=pytest.fail)
    stream, other = table.open(["a", "b"]), table.open(["c"])
    table.fail("b", EngineDead("refused"))
    assert "a" not in table
    assert "c" in table
    with pytest.raises(EngineDead, match="refused"):
        await anext(stream)
    await stream.aclose()
    table.fail_all(EngineDead("all"))
    with pytest.raises(EngineDead, match="all"):
        await anext(other)
