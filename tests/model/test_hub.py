"""The hub client against a hub of our own on the loopback interface."""

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
import tokenizers

from atom_async.config import EngineConfig
from atom_async.model.catalog import FetchError
from atom_async.model.hub import looks_like_hub_id
from atom_async.model.resolve import resolve_model

COMMIT = "c" * 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 8,
}


def tokenizer_json() -> bytes:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend.to_str().encode()


def repositories() -> dict[str, dict[str, bytes]]:
    good = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": tokenizer_json(),
        "model.safetensors": bytes(64),
        "pytorch_model.bin": b"pickle",
        "README.md": b"text",
    }
    unknown = {**good, "config.json": json.dumps({**CONFIG, "architectures": ["MambaForCausalLM"]}).encode()}
    pickled = {name: data for name, data in good.items() if name != "model.safetensors"}
    return {"owner/good": good, "owner/unknown": unknown, "owner/pickled": pickled}


class Hub(BaseHTTPRequestHandler):
    """The few routes of the hub that a snapshot needs."""

    repositories = repositories()
    fetched: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        files = self.repositories.get(f"{owner}/{name}")
        if f"{owner}/{name}" == "owner/gated":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif files is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "nowhere" in rest:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif is_api and rest[0] == "tree":  # what newer clients ask instead of the siblings below
            entries = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            self._send(200, json.dumps(entries).encode())
        elif is_api:
            siblings = [{"rfilename": file} for file in files]
            self._send(200, json.dumps({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings}).encode())
        elif "/".join(rest[2:]) in files:
            self._file("/".join(rest[2:]), files, with_body=with_body)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _file(self, file: str, files: dict[str, bytes], *, with_body: bool) -> None:
        headers = {"ETag": f'"{hashlib.sha1(files[file]).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if with_body:
            self.fetched.append(file)
        self._send(200, files[file], headers, with_body=with_body)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, with_body: bool | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET" if with_body is None else with_body:
            self.wfile.write(body)


def serve(server: ThreadingHTTPServer, closing: threading.Event) -> None:
    while not closing.is_set():
        server.handle_request()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A running hub that the client is pointed at, and an empty place to keep snapshots."""
    Hub.fetched = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    closing = threading.Event()
    thread = threading.Thread(target=serve, args=(server, closing))
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        f"http://127.0.0.1:{server.server_port}" + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield server
    closing.set()
    socket.create_connection(server.server_address).close()  # wakes the thread, which waits for a client
    thread.join()
    server.server_close()


def resolve(source: str, **options: object):  # type: ignore[no-untyped-def]
    return resolve_model(EngineConfig(model=source, device="cpu", **options))  # type: ignore[arg-type]


def test_only_what_is_needed_is_fetched_and_kept(hub: ThreadingHTTPServer) -> None:
    model = resolve("owner/good")
    assert model.name == "owner/good"
    assert model.weights.kind == "safetensors"
    assert sorted(Hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    resolve("owner/good", revision=COMMIT)
    assert len(Hub.fetched) == 3


def test_an_unknown_architecture_is_refused_before_its_weights_are_fetched(hub: ThreadingHTTPServer) -> None:
    with pytest.raises(ValueError, match="unknown architecture"):
        resolve("owner/unknown")
    assert "model.safetensors" not in Hub.fetched


def test_dummy_weights_are_not_fetched(hub: ThreadingHTTPServer) -> None:
    assert resolve("owner/good", load_format="dummy").weights.kind == "random"
    assert "model.safetensors" not in Hub.fetched


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("owner/missing", {}, FetchError, "the hub has no model owner/missing"),
        ("owner/gated", {}, FetchError, "is gated: accept its terms on the hub and set HF_TOKEN"),
        ("owner/good", {"revision": "nowhere"}, FetchError, "has no revision 'nowhere'"),
        ("owner/pickled", {}, FileNotFoundError, "holds no weights"),
    ],
)
def test_failures_say_what_to_do(
    hub: ThreadingHTTPServer, source: str, options: dict[str, str], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve(source, **options)


def test_without_a_network(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve("owner/good")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve("owner/good").name == "owner/good", "what is kept still works"
    with pytest.raises(FetchError, match="the hub cannot be reached and owner/other is not kept"):
        resolve("owner/other")


def test_what_a_hub_id_looks_like() -> None:
    assert looks_like_hub_id("Qwen/Qwen3-0.6B")
    for other in ("model", "./a/b", "/a/b", "a/b/c", "a/", "~/b"):
        assert not looks_like_hub_id(other)
