"""`atom-async serve`: the frontend process, from its first line to its exit code.

Exit codes: 0 after an orderly end (a signal, running requests drained or ended with an error), 1 after a
failure of the engine or a worker, 2 when it could not start, 130 when interrupted before it served.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable

import uvloop

from atom_async.api.app import create_app
from atom_async.api.http_server import HttpServer, bind
from atom_async.api.state import Served, ServerState, load_text, served_names
from atom_async.config import EngineConfig, ServeConfig
from atom_async.engine.client import EngineInfo
from atom_async.engine.ipc import ModelFacts
from atom_async.engine.remote import RemoteEngine
from atom_async.engine.workers import WorkerStartError
from atom_async.model.catalog import FetchError
from atom_async.model.progress import console_progress
from atom_async.model.resolve import ResolvedModel, resolve_model
from atom_async.scheduler.setup import describe
from atom_async.telemetry.metrics import Metrics
from atom_async.wire.messages import WorkerProgress

from .flags import add_config_flags, environment_warnings, load_config

log = logging.getLogger("atom_async.serve")

STAGES = {"import": "starting", "load": "reading weights", "kv": "allocating KV cache", "warmup": "warming up"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    add_config_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError."""
    config, serve = load_config(args, os.environ)
    logging.basicConfig(level=serve.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))
    for warning in environment_warnings(os.environ):
        log.warning("%s", warning)
    try:
        with bind(serve.host, serve.port) as sock:
            with console_progress() as progress:
                model = resolve_model(config, progress)
            return uvloop.run(Server(config, serve, model, sock).run())
    except (OSError, ValueError, FetchError, WorkerStartError) as error:
        log.debug("start failed", exc_info=True)
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2


class Signals:
    """SIGINT and SIGTERM as events: the first asks to drain, the second to end now."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
        else:
            log.info("%s: draining; once more to end now", number.name)
            self.first.set()


class Server:
    """One life: load, serve, drain or fail, leave nothing behind."""

    def __init__(self, config: EngineConfig, serve: ServeConfig, model: ResolvedModel, sock: socket.socket) -> None:
        self._config = config
        self._serve_config = serve
        self._model = model
        self._socket = sock
        names = served_names(config, serve, model)
        self._names = names
        self._state = ServerState(config, serve, Metrics(names[0]))
        self._engine = RemoteEngine(config, _facts(model), log_level=serve.log_level)
        self._shown: dict[tuple[int, str], int] = {}

    async def run(self) -> int:
        """Returns the exit code. Raises WorkerStartError, OSError or ValueError when it cannot start."""
        signals = Signals()
        http = HttpServer(
            create_app(self._state), access_log=self._serve_config.access_log, root_path=self._serve_config.root_path
        )
        await http.open(self._socket)
        try:
            if not await self._first_of(self._load(), signals.first.wait()):
                return 0
            self._announce()
            await self._first_of(self._engine.wait_failed(), signals.first.wait())
            if self._engine.failure is not None:
                return await self._linger(signals)
            return await self._drain(signals)
        finally:
            await self._engine.stop()
            await http.close()

    @staticmethod
    async def _first_of(wanted: Awaitable[object], other: Awaitable[object]) -> bool:
        """Waits for either and cancels the one left over. Whether it was the wanted one; raises its error."""
        tasks = [asyncio.ensure_future(wanted), asyncio.ensure_future(other)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done = tasks[0].done()
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if done:
            await tasks[0]
        return done

    async def _load(self) -> None:
        """Tokenizer and workers at once; when one cannot be loaded, the other is given up. Raises as `run`."""
        text = asyncio.create_task(asyncio.to_thread(load_text, self._model, self._serve_config))
        engine = asyncio.create_task(self._engine.start(self._progress))
        try:
            await asyncio.gather(text, engine)
        except BaseException:
            text.cancel()
            engine.cancel()
            await asyncio.gather(text, engine, return_exceptions=True)
            raise
        self._state.begin(Served(self._engine, text.result(), self._names, self._model))

    def _progress(self, progress: WorkerProgress) -> None:
        """A line for each stage, and for each fifth of the weights."""
        fifth = 5 * progress.done // max(1, progress.total)
        if self._shown.get((progress.rank, progress.stage), -1) < fifth:
            self._shown[progress.rank, progress.stage] = fifth
            share = f" {20 * fifth} %" if progress.stage == "load" else ""
            log.info("worker %d: %s%s", progress.rank, STAGES[progress.stage], share)

    def _announce(self) -> None:
        host, port = self._socket.getsockname()[:2]
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        print(_settings(self._config, self._engine.info), flush=True)
        print(_ready(f"http://{host}:{port}", self._names[0], with_key=bool(self._serve_config.api_key)), flush=True)

    async def _linger(self, signals: Signals) -> int:
        """The engine is dead: /health says why until somebody has had the time to look."""
        self._state.metrics.engine_up = False
        self._log_failure()
        try:
            async with asyncio.timeout(self._serve_config.failure_linger):
                await signals.first.wait()
        except TimeoutError:
            pass
        return 1

    async def _drain(self, signals: Signals) -> int:
        """Lets running requests finish, for a while; what then still runs ends with an error."""
        self._state.draining = True
        try:
            async with asyncio.timeout(self._serve_config.drain_timeout):
                await self._first_of(self._engine.drain(), signals.second.wait())
        except TimeoutError:
            log.warning("requests still running after %g s end with an error", self._serve_config.drain_timeout)
        if self._engine.failure is None:
            return 0
        self._log_failure()
        return 1

    def _log_failure(self) -> None:
        log.error("engine failed: %s", self._engine.failure)


def _facts(model: ResolvedModel) -> ModelFacts:
    return ModelFacts(
        spec=model.spec,
        weights=model.weights,
        device=model.device,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        tokenizer_json=str(model.tokenizer_json),
        end_token_ids=model.text.eos_ids,
    )


def _settings(config: EngineConfig, info: EngineInfo) -> str:
    """What is in force, once everything that follows from model and machine is known."""
    kv_tokens = info.num_kv_blocks * info.block_size
    rows = {
        "device": f"{info.device_name}, {info.dtype}, attention {info.attention_backend}, tp {info.tp_size}",
        "context": f"{info.max_model_len} tokens",
        "KV cache": f"{kv_tokens} tokens in {info.num_kv_blocks} blocks of {info.block_size}"
        + ("" if config.enable_prefix_caching else ", prefix caching off"),
        "policy": describe(config),
        "steps": f"up to {info.max_num_batched_tokens} tokens and {info.max_num_seqs} sequences, "
        f"{config.max_steps_in_flight} in flight",
    }
    return "\n".join(f"  {name:9} {text}" for name, text in rows.items())


def _ready(url: str, model: str, *, with_key: bool) -> str:
    key = "-H 'Authorization: Bearer YOUR_KEY' " if with_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is an atom?"}}]}}'
    return (
        f"\nReady: {model} on {url}\n\n"
        f"  curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' \\\n    -d '{body}'\n"
    )
