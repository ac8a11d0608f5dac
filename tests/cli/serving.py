"""A real `atom-async serve` process for tests, and what must hold once it is gone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil

SIMULATED = ("--device", "simulated", "--failure-linger", "1.5", "--log-level", "warning")


class Serve:
    """`async with Serve(...)`: started on a free port, killed and checked for leftovers at the end."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None, until: str = "Ready: ") -> None:
        """`until`: what the server prints when entering is over; or it ends before that."""
        self.flags = flags
        self.until = until
        self.env = os.environ | (env or {})
        self.url = ""
        self.output = ""

    async def __aenter__(self) -> Serve:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atom_async.cli", "serve", "--port", "0", *self.flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self.env,
        )
        self.reading = asyncio.create_task(self._read())
        self.ready = asyncio.Event()
        ended = asyncio.create_task(self.process.wait())
        ready = asyncio.create_task(self.ready.wait())
        await asyncio.wait((ended, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        ended.cancel()
        self.tree: list[psutil.Process] = []
        if self.process.returncode is None:
            self.tree = psutil.Process(self.process.pid).children(recursive=True)
        self.client = httpx.AsyncClient(base_url=self.url, timeout=30)
        return self

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.output += line.decode()
            if match := re.search(r"Ready: .* on (http://\S+)", line.decode()):
                self.url = match[1]
            if self.until in line.decode():
                self.ready.set()

    async def __aexit__(self, *error: object) -> None:
        await self.client.aclose()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self.reading
        _, alive = await asyncio.to_thread(psutil.wait_procs, self.tree, timeout=5)
        assert not alive, f"left behind: {alive}"

    @property
    def engine(self) -> psutil.Process:
        return next(p for p in self.tree if "atom_async.engine.process" in p.cmdline())

    @property
    def workers(self) -> list[psutil.Process]:
        return [p for p in self.tree if "workers.main" in p.cmdline()]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self, within_s: float = 10) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    async def stream(self, **body: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed completion, `{"done": True}` for the closing one."""
        body = {"prompt": "one two three", "max_tokens": 500, "ignore_eos": True, "stream": True} | body
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    yield {"done": True}
                elif line.startswith("data: "):
                    yield json.loads(line[6:])
