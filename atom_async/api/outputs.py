"""The outputs of all sequences of one request, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from atom_async.api.errors import from_engine
from atom_async.api.sequence import Piece, Sequence
from atom_async.engine.client import EngineClient, EngineError

Batch = list[tuple[Sequence, Piece]]


class Outputs(Protocol):
    async def next(self) -> Batch:
        """What has come since the last call, at least one piece; empty when all sequences have ended.

        Submits the requests on the first call. Raises ApiError as soon as one sequence fails.
        """
        ...

    async def aclose(self) -> None:
        """Aborts what has not ended. Idempotent."""
        ...


def outputs_of(engine: EngineClient, sequences: SequenceOf[Sequence]) -> Outputs:
    return OneOutput(engine, sequences[0]) if len(sequences) == 1 else MergedOutputs(engine, sequences)


async def collect(outputs: Outputs, add: Callable[[Sequence, Piece], object]) -> None:
    """Hands over every piece until the end. Raises ApiError."""
    try:
        while batch := await outputs.next():
            for sequence, piece in batch:
                add(sequence, piece)
    finally:
        await outputs.aclose()


class _Reader:
    """One sequence's stream of the engine."""

    def __init__(self, engine: EngineClient, sequence: Sequence) -> None:
        self._engine = engine
        self._sequence = sequence
        self._stream = engine.generate(sequence.request)

    async def next(self) -> Piece | None:
        """None at the end. Raises ApiError."""
        try:
            output = await anext(self._stream)
        except StopAsyncIteration:
            return None
        except EngineError as error:
            self._sequence.stream_failed()
            raise from_engine(error) from error
        return self._sequence.take(output, self._engine)

    async def aclose(self) -> None:
        self._sequence.reader_left()
        await self._stream.aclose()


class OneOutput:
    """The usual case, without a task between the engine's stream and the client's."""

    def __init__(self, engine: EngineClient, sequence: Sequence) -> None:
        self._reader = _Reader(engine, sequence)
        self._sequence = sequence

    async def next(self) -> Batch:
        piece = await self._reader.next()
        return [] if piece is None else [(self._sequence, piece)]

    async def aclose(self) -> None:
        await self._reader.aclose()


class MergedOutputs:
    """A task per sequence fills one inbox; what it may hold is bounded by their max_tokens."""

    def __init__(self, engine: EngineClient, sequences: SequenceOf[Sequence]) -> None:
        self._engine = engine
        self._sequences = sequences
        self._inbox: Batch = []
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self._running = len(sequences)

    async def next(self) -> Batch:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._pump(sequence)) for sequence in self._sequences]
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                return []
            self._news.clear()
            await self._news.wait()
        batch, self._inbox = self._inbox, []
        return batch

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, sequence: Sequence) -> None:
        reader = _Reader(self._engine, sequence)
        try:
            while (piece := await reader.next()) is not None:
                self._inbox.append((sequence, piece))
                self._news.set()
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._running -= 1
            self._news.set()
            await reader.aclose()
