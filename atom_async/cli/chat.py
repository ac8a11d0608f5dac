"""`atom-async chat`: a conversation with a server in the terminal.

Ctrl-C stops the answer, not the program; Ctrl-D or /exit leaves. With input from a pipe, all of it is one
message, the answer goes to standard output, and the program ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from .flags import ConfigError
from .sse_client import ServerError, get_json, stream_chat

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = """\
/reset       forget the conversation
/system TEXT forget it, and begin another with this system message
/help        this list
/exit        leave (also Ctrl-D)
Ctrl-C stops an answer. Alt-Enter begins a new line, Enter sends."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("chat", help="talk to a server in the terminal", allow_abbrev=False)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server [{DEFAULT_URL}]")
    parser.add_argument("--api-key", help="key to send [the environment variable ATOM_API_KEY]")
    parser.add_argument("--model", help="a served model's name [the server's first]")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--max-tokens", type=int, help="most tokens in an answer")
    parser.add_argument("--seed", type=int)
    parser.set_defaults(run=run)


@dataclass
class Conversation:
    """What is said so far, and how answers are asked for."""

    url: str
    key: str | None
    model: str
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters, as the body of a request has them."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset(self.system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str, show: Callable[[str], None]) -> None:
        """Shows the answer as it comes and remembers both; on Ctrl-C as much of it as came.

        Raises ServerError (the question is then forgotten) and KeyboardInterrupt.
        """
        self.messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": self.messages, "stream": True, **self.options}
        pieces: list[str] = []
        try:
            with closing(stream_chat(self.url, self.key, body)) as stream:
                for piece in stream:
                    pieces.append(piece)
                    show(piece)
        except ServerError:
            self.messages.pop()
            raise
        except KeyboardInterrupt:
            self._answered(pieces)
            raise
        self._answered(pieces)

    def _answered(self, pieces: list[str]) -> None:
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 0, or 1 after saying what the server or the connection refused."""
    try:
        conversation = _conversation(args)
        if not sys.stdin.isatty():
            conversation.ask(sys.stdin.read(), _show)
            print()
            return 0
        print(f"{conversation.model} at {conversation.url}. /help lists commands.")
        _talk(conversation)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _conversation(args: argparse.Namespace) -> Conversation:
    url = args.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {args.url}: expected http://HOST:PORT")
    key = args.api_key or os.environ.get("ATOM_API_KEY", "").split(",")[0] or None
    model = args.model or get_json(url, key, "/v1/models")["data"][0]["id"]
    names = ("temperature", "top_p", "max_tokens", "seed")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return Conversation(url, key, model, args.system, options)


def _talk(conversation: Conversation) -> None:
    read = _line_reader()
    while True:
        try:
            text = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        if text.startswith("/"):
            if not _command(conversation, text):
                return
        elif text:
            _answer(conversation, text)


def _line_reader() -> Callable[[], str]:
    """With history and editing."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession("> ", key_bindings=bindings, multiline=True)
    return session.prompt


def _command(conversation: Conversation, text: str) -> bool:
    """Whether to go on."""
    name, _, rest = text.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        conversation.reset(conversation.system)
    elif name == "/system":
        conversation.reset(rest.strip() or None)
    else:
        print(HELP if name == "/help" else f"unknown command {name}\n{HELP}")
    return True


def _answer(conversation: Conversation, text: str) -> None:
    try:
        conversation.ask(text, _show)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except ServerError as error:
        print(f"\nerror: {error}", file=sys.stderr)


def _show(piece: str) -> None:
    print(piece, end="", flush=True)
