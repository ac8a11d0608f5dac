"""Fetches a model repository from the Hugging Face hub: first its config, so that a model that cannot
run is refused before gigabytes are downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from atom_async.model.catalog import FetchError
from atom_async.model.folder import folder_config
from atom_async.model.spec import spec_from_hf_config

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TEXT_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
_WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]


def looks_like_hub_id(source: str) -> bool:
    """`owner/name`, as opposed to a path."""
    return bool(_HUB_ID.fullmatch(source))


def snapshot(repository: str, revision: str | None, *, with_weights: bool) -> Path:
    """The local folder of the snapshot, downloading what is missing; the hub library shows its progress.

    Raises FetchError (no such repository, no access, no network and nothing kept), or ValueError when
    the model is of a kind that is not implemented.
    """
    folder = _fetch(repository, revision, _TEXT_FILES)
    spec_from_hf_config(folder_config(folder))
    return _fetch(repository, revision, _TEXT_FILES + _WEIGHT_FILES) if with_weights else folder


def _fetch(repository: str, revision: str | None, patterns: list[str]) -> Path:
    # Imported here: it costs a quarter of a second that a local model need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise FetchError(f"{repository} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise FetchError(f"the hub has no model {repository} (or it is private: set HF_TOKEN)") from error
    except RevisionNotFoundError as error:
        raise FetchError(f"{repository} has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        raise FetchError(
            f"the hub cannot be reached and {repository} is not kept on this machine; download it where there is a "
            "network and pass the folder, or use the embedded `default` model"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise FetchError(f"cannot download {repository}: {error}") from error
