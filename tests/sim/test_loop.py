import asyncio
import os

import pytest

from atom_async.sim.loop import START, Deadlock, VirtualLoop


def run(coroutine):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def test_an_hour_passes_at_once_and_timers_fire_in_order() -> None:
    async def main() -> tuple[list[tuple[float, int]], float]:
        loop = asyncio.get_running_loop()
        log: list[tuple[float, int]] = []
        for delay in (3600, 2, 7, 2.5):
            loop.call_later(delay, lambda d=delay: log.append((loop.time() - START, d)))
        await asyncio.sleep(3601)
        return log, loop.time() - START

    log, now = run(main())
    assert log == [(2, 2), (2.5, 2.5), (7, 7), (3600, 3600)]
    assert now == 3601


def test_timeouts_work() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time() - START

    assert run(main()) == 5


def test_waiting_for_nothing_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="no timer"):
        run(main())


def test_threads_and_files_are_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="no threads"):
            await asyncio.to_thread(int)
        with pytest.raises(RuntimeError, match="no threads"):
            loop.call_soon_threadsafe(int)
        read, write = os.pipe()
        try:
            with pytest.raises(RuntimeError, match="no I/O"):
                loop.add_reader(read, int)
        finally:
            os.close(read)
            os.close(write)

    run(main())
