"""The terminal chat against a scripted server on a real socket."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import sys
import termios
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from atom_async.api.http_server import HttpServer, bind
from atom_async.cli import main
from atom_async.cli.chat import Conversation
from atom_async.cli.sse_client import ServerError, get_json, stream_chat


class Peer:
    """Answers with `pieces`; then [DONE], an error event, or silence, as `end` says."""

    def __init__(self) -> None:
        self.pieces = ["Hel", "lo\n", "🌍"]
        self.end = "done"
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""
        self.left = asyncio.Event()

    async def models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "m1"}, {"id": "m2"}]})

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if self.end == "refuse":
            return JSONResponse({"error": {"message": "too long"}}, 400)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield event({"choices": [{"delta": {"content": piece}}]})
        yield event({"choices": []})
        if self.end == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        if self.end == "error":
            yield event({"error": {"message": "the engine has failed"}})
        if self.end == "done":
            yield b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    app = Starlette(
        routes=[Route("/v1/models", peer.models), Route("/v1/chat/completions", peer.chat, methods=["POST"])]
    )
    server = HttpServer(app, access_log=False)
    with bind("127.0.0.1", 0) as sock:
        peer.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await server.open(sock)
        yield peer
        await server.close()


async def run_with_stdin(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return await asyncio.to_thread(main, ["chat", *arguments])


async def test_piped_input_is_one_message(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--system", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--api-key", "k")
    assert await run_with_stdin(monkeypatch, "Hi\nthere", "--url", peer.url + "/v1/", *options) == 0
    assert capsys.readouterr().out == "Hello\n🌍\n"
    assert peer.bodies == [
        {
            "model": "m1",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}],
            "stream": True,
            "temperature": 0.0,
            "max_tokens": 9,
        }
    ]
    assert peer.keys == ["Bearer k"]


@pytest.mark.parametrize(
    ("end", "words"), [("refuse", "too long"), ("error", "engine has failed"), ("cut", "before it was complete")]
)
async def test_errors_are_said(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str, words: str
) -> None:
    peer.end = end
    assert await run_with_stdin(monkeypatch, "Hi", "--url", peer.url) == 1
    assert words in capsys.readouterr().err


async def test_no_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as sock:  # bound, but nobody listens
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert await run_with_stdin(monkeypatch, "Hi", "--url", url) == 1
    assert "is `atom-async serve` running?" in capsys.readouterr().err


def test_urls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "localhost:8000"]) == 2
    assert "http://HOST:PORT" in capsys.readouterr().err


async def test_turns_are_remembered(peer: Peer) -> None:
    conversation = Conversation(peer.url, None, "m1", "Be brief.")
    shown: list[str] = []
    await asyncio.to_thread(conversation.ask, "one", shown.append)
    await asyncio.to_thread(conversation.ask, "two", shown.append)
    assert shown == peer.pieces * 2
    roles = [message["role"] for message in peer.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert peer.bodies[1]["messages"][2]["content"] == "Hello\n🌍"
    conversation.reset("New.")
    assert conversation.messages == [{"role": "system", "content": "New."}]


async def test_a_refused_question_is_forgotten(peer: Peer) -> None:
    conversation = Conversation(peer.url, None, "m1")
    peer.end = "refuse"
    with pytest.raises(ServerError, match="too long"):
        await asyncio.to_thread(conversation.ask, "one", lambda piece: None)
    assert conversation.messages == []


async def test_stopping_an_answer_keeps_what_came_and_tells_the_server(peer: Peer) -> None:
    """Ctrl-C arrives as KeyboardInterrupt while waiting for the next piece."""
    peer.end = "hang"
    conversation = Conversation(peer.url, None, "m1")

    def stop_at_last(piece: str) -> None:
        if piece == peer.pieces[-1]:
            raise KeyboardInterrupt

    def ask() -> bool:
        try:
            conversation.ask("one", stop_at_last)
        except KeyboardInterrupt:  # must not leave the thread: asyncio would end the loop
            return True
        return False

    assert await asyncio.to_thread(ask)
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hello\n🌍"}
    async with asyncio.timeout(10):
        await peer.left.wait()


async def test_closing_a_stream_early_ends_the_request(peer: Peer) -> None:
    peer.end = "hang"

    def first() -> str:
        stream = stream_chat(peer.url, None, {})
        piece = next(stream)
        stream.close()
        return piece

    assert await asyncio.to_thread(first) == "Hel"
    async with asyncio.timeout(10):
        await peer.left.wait()


async def test_answers_that_are_no_json(peer: Peer) -> None:
    with pytest.raises(ServerError, match="HTTP status 404"):
        await asyncio.to_thread(get_json, peer.url, None, "/nowhere")


def _own_terminal() -> None:
    """In the child: standard input controls it, so that Ctrl-C becomes SIGINT."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """`atom-async chat` on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments
        self.seen = b""
        self._news = asyncio.Event()

    async def __aenter__(self) -> Terminal:
        self.ours, theirs = pty.openpty()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atom_async.cli", "chat", *self.arguments),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "dumb", "PROMPT_TOOLKIT_NO_CPR": "1"},
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        asyncio.get_running_loop().add_reader(self.ours, self._read)
        return self

    def _read(self) -> None:
        try:
            self.seen += os.read(self.ours, 4096)
        except OSError:  # the other side is closed
            asyncio.get_running_loop().remove_reader(self.ours)
        self._news.set()

    async def until(self, text: str) -> None:
        """Until it shows, after what was waited for before."""
        async with asyncio.timeout(30):
            while text.encode() not in self.seen:
                self._news.clear()
                await self._news.wait()
        self.seen = self.seen.partition(text.encode())[2]

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    async def __aexit__(self, *error: object) -> None:
        asyncio.get_running_loop().remove_reader(self.ours)
        os.close(self.ours)
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.mark.process
async def test_a_conversation_on_a_terminal(peer: Peer) -> None:
    """Several turns, commands, and Ctrl-C, which stops an answer and not the program."""
    async with Terminal("--url", peer.url) as terminal:
        await terminal.until("m1 at")
        await terminal.until("> ")
        terminal.type("/help\r")
        await terminal.until("Ctrl-C stops an answer")
        terminal.type("one\r")
        await terminal.until("🌍")
        await terminal.until("> ")
        peer.end = "hang"
        terminal.type("two\r")
        await terminal.until("🌍")
        terminal.type("\x03")
        await terminal.until("[stopped]")
        async with asyncio.timeout(10):
            await peer.left.wait()
        peer.end = "done"
        terminal.type("/reset\r")
        terminal.type("three\r")
        await terminal.until("🌍")
        terminal.type("/exit\r")
        async with asyncio.timeout(10):
            assert await terminal.process.wait() == 0
    assert [[m["content"] for m in body["messages"] if m["role"] == "user"] for body in peer.bodies] == [
        ["one"],
        ["one", "two"],
        ["three"],
    ]
