"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from atom_async.api.decode import BodyDecoder
from atom_async.api.errors import bad_request
from atom_async.api.prompts import LONG_TEXT, chat_prompt, encode
from atom_async.api.replies import JsonReply
from atom_async.api.requests import DetokenizeRequest, TokenizeRequest
from atom_async.api.responses import Detokenized, Model, ModelList, Tokens
from atom_async.api.state import Served, ServerState

TOKENIZE = BodyDecoder(TokenizeRequest)
DETOKENIZE = BodyDecoder(DetokenizeRequest)


async def models(request: Request) -> Response:
    state: ServerState = request.app.state.server
    served = state.accepting()
    return JsonReply(ModelList([_model(name, served, state) for name in served.names]))


async def model(request: Request) -> Response:
    state: ServerState = request.app.state.server
    name = request.path_params["name"]
    return JsonReply(_model(name, state.accepting_for(name), state))


def _model(name: str, served: Served, state: ServerState) -> Model:
    return Model(name, state.created, served.max_model_len)


async def tokenize(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await TOKENIZE.read(request)
    served = state.accepting_for(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    ids = await (_text_ids(body, served) if body.prompt is not None else _chat_ids(body, served))
    names = [served.tokenizer.token(token_id) or "" for token_id in ids] if body.return_token_strs else None
    return JsonReply(Tokens(len(ids), served.max_model_len, ids, names))


async def _text_ids(body: TokenizeRequest, served: Served) -> list[int]:
    for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name} goes with messages, not with prompt", name)
    assert body.prompt is not None
    return await encode(served.text, body.prompt, add_special_tokens=body.add_special_tokens is not False)


async def _chat_ids(body: TokenizeRequest, served: Served) -> list[int]:
    adds = body.add_generation_prompt
    prompt = await chat_prompt(
        served,
        body.messages or [],
        body.tools,
        add_generation_prompt=not body.continue_final_message if adds is None else adds,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs,
    )
    return prompt.token_ids


async def detokenize(request: Request) -> Response:
    """Special tokens are part of the text, so that it tokenizes back."""
    state: ServerState = request.app.state.server
    body = await DETOKENIZE.read(request)
    tokenizer = state.accepting_for(body.model).tokenizer
    beyond = next((token for token in body.tokens if token >= tokenizer.vocab_size), None)
    if beyond is not None:
        raise bad_request(f"tokens: {beyond} is no token id; they go from 0 to {tokenizer.vocab_size - 1}", "tokens")
    if len(body.tokens) >= LONG_TEXT:
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    else:
        text = tokenizer.decode(body.tokens, skip_special_tokens=False)
    return JsonReply(Detokenized(text))
