"""The outputs of all sequences of one request, as they come."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from atom_async.api.errors import ApiError, from_engine
from atom_async.api.sequence import Piece, Sequence
from atom_async.engine.client import EngineClient, EngineError

Batch = list[tuple[Sequence, Piece]]


class Outputs:
    """One stream of the engine for all of them."""

    def __init__(self, engine: EngineClient, sequences: SequenceOf[Sequence]) -> None:
        self._engine = engine
        self._sequences = {sequence.request.request_id: sequence for sequence in sequences}
        self._stream = engine.generate_all([sequence.request for sequence in sequences])
        self._failure: ApiError | None = None

    async def next(self) -> Batch:
        """What has come since the last call, at least one piece; empty when all sequences have ended.

        Submits the requests on the first call. Raises ApiError when a sequence has failed, once what came before
        that was returned.
        """
        if self._failure is not None:
            raise self._failure
        try:
            outputs = await anext(self._stream)
        except StopAsyncIteration:
            return []
        except EngineError as error:
            for sequence in self._sequences.values():
                sequence.stream_failed()
            raise from_engine(error) from error
        batch: Batch = []
        for output in outputs:
            sequence = self._sequences[output.request_id]
            try:
                batch.append((sequence, sequence.take(output, self._engine)))
            except ApiError as error:
                self._failure = self._failure or error
        if not batch and self._failure is not None:
            raise self._failure
        return batch

    async def aclose(self) -> None:
        """Aborts what has not ended. Idempotent."""
        for sequence in self._sequences.values():
            sequence.reader_left()
        await self._stream.aclose()


async def collect(outputs: Outputs, add: Callable[[Sequence, Piece], object]) -> None:
    """Hands over every piece until the end. Raises ApiError."""
    try:
        while batch := await outputs.next():
            for sequence, piece in batch:
                add(sequence, piece)
    finally:
        await outputs.aclose()
