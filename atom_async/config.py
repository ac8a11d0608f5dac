"""Every setting, once: its name gives the flag (`--max-num-seqs`) and the environment variable
(`ATOM_MAX_NUM_SEQS`), its annotation the type, its `Meta` description the help text.

The command line, the environment and `AsyncEngine` build these structs; nothing else holds defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MOST = 2**31 - 1
"""Bound of every count, so that none overflows where it is used."""
LONGEST = 1e9
"""Bound of every duration, in its own unit: what a timer can be set to."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model, memory and scheduling: what `AsyncEngine` needs."""

    model: Annotated[
        str,
        Meta(description="hub id, local folder or .gguf file; `default` is the embedded SmolLM2-135M-Instruct"),
    ] = "default"
    revision: Annotated[str | None, Meta(description="hub revision: branch, tag or commit")] = None
    tokenizer: Annotated[
        str | None, Meta(description="folder or file with tokenizer.json, when not the model's own")
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="`dummy` fills the weights with seeded random values")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda", "simulated"],
        Meta(
            description="`cuda` is also ROCm's name in torch; `simulated` computes nothing and follows a latency model"
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="`auto`: float32 on a CPU, the checkpoint's own on a GPU"),
    ] = "auto"
    tp: Annotated[int, Meta(ge=1, le=MOST, description="tensor-parallel size: worker processes, one a rank")] = 1
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | None,
        Meta(description="longest prompt plus output, tokens; default: the model's own limit"),
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=MOST, description="most sequences running at once")] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, le=MOST, description="token budget: most tokens one step carries")
    ] = 2048
    block_size: Annotated[int, Meta(ge=1, le=MOST, description="tokens per KV block")] = 16
    kv_cache_memory: Annotated[
        Annotated[int, Meta(ge=1, le=2**63 - 1)] | None,
        Meta(
            description="bytes of KV cache per rank (suffixes K, M, G, KiB, MiB, GiB); default: from what is free",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of GPU memory for weights, activations and KV, when --kv-cache-memory is not given",
        ),
    ] = 0.9
    max_logprobs: Annotated[
        int, Meta(ge=0, le=MOST, description="most log-probabilities per token a request may ask for")
    ] = 20
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV of equal prompt prefixes")] = True
    enable_chunked_prefill: Annotated[
        bool, Meta(description="compute a prompt in several steps; off needs a token budget of --max-model-len")
    ] = True
    max_chunk_tokens: Annotated[
        int,
        Meta(
            ge=0, le=MOST, description="most tokens of one prompt in a step; 0: as the budget and --itl-target-ms allow"
        ),
    ] = 0
    step_policy: Annotated[
        Literal["mixed", "separate"],
        Meta(description="`mixed`: decodes and prefill share steps; `separate`: a step is one or the other"),
    ] = "mixed"
    itl_target_ms: Annotated[
        str,
        Meta(
            pattern=r"^(auto|off|[0-9]{1,9}(\.[0-9]{1,9})?)\Z",
            description="predicted time that a step with decodes and prefill may take: milliseconds, `auto` (from the "
            "costs measured) or `off`",
        ),
    ] = "auto"
    queue_policy: Annotated[
        Literal["least-work", "fcfs"],
        Meta(
            description="order of ready prefills within a priority: fewest uncached tokens first with aging, or arrival"
        ),
    ] = "least-work"
    overtake_factor: Annotated[
        float,
        Meta(
            ge=0,
            le=LONGEST,
            description="a prefill may be overtaken by smaller ones for this many times its own predicted time",
        ),
    ] = 4.0
    max_bypass_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=LONGEST,
            description="how long others may pass a request that does not fit into memory, before it is kept free",
        ),
    ] = 1000.0
    prefix_wait_ms: Annotated[
        Annotated[float, Meta(ge=0, le=LONGEST)] | None,
        Meta(description="longest wait for a prefix that another request computes; default: while that one gets on"),
    ] = None
    coalesce_target_fill: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="while anything decodes, hold prefill until it fills this share of the budget; 0: never hold",
        ),
    ] = 0.0
    coalesce_quiet_ms: Annotated[
        float, Meta(ge=0, le=LONGEST, description="held prefill starts when it has not grown for so long")
    ] = 20.0
    coalesce_max_hold_ms: Annotated[float, Meta(ge=0, le=LONGEST, description="longest hold")] = 200.0
    prefill_max_queue_ms: Annotated[
        float, Meta(ge=0, le=LONGEST, description="a request that arrived so long ago ends every hold")
    ] = 1000.0
    partial_max_hold_ms: Annotated[
        float, Meta(ge=0, le=LONGEST, description="longest hold of a half-done prefill, all its holds together")
    ] = 100.0
    kv_high_watermark: Annotated[
        float, Meta(ge=0, le=1, description="share of KV in use from which nothing is held: running requests must end")
    ] = 0.95
    kv_low_watermark: Annotated[
        float, Meta(ge=0, le=1, description="share of KV in use below which nothing is held")
    ] = 0.0
    prefill_decode_interval: Annotated[
        int,
        Meta(ge=0, le=MOST, description="decode-only steps that follow a step with prefill, unless a bound is reached"),
    ] = 0
    max_decode_gap_ms: Annotated[
        Annotated[float, Meta(gt=0, le=LONGEST)] | None,
        Meta(description="longest predicted time between two steps of a decoding request that prefill may cause"),
    ] = None
    policy: Annotated[
        str, Meta(description="`default`, or package.module:Class of your own order, holds and step bounds")
    ] = "default"
    max_queued_requests: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | None,
        Meta(description="requests that may wait; more get 429; default: no limit"),
    ] = None
    max_queued_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | None,
        Meta(description="uncached prompt tokens that may wait; more get 429; default: no limit"),
    ] = None
    max_steps_in_flight: Annotated[
        int,
        Meta(ge=1, le=2, description="steps queued on the workers: 2 plans the next step while one computes"),
    ] = 2
    step_timeout: Annotated[
        float, Meta(gt=0, le=LONGEST, description="seconds after which a step that does not come back fails the engine")
    ] = 120.0
    startup_timeout: Annotated[float, Meta(gt=0, le=LONGEST, description="seconds a worker may take to load")] = 1800.0
    threads: Annotated[
        int, Meta(ge=0, le=MOST, description="CPU threads per worker; 0: the machine's cores divided by the ranks")
    ] = 0
    seed: Annotated[
        int,
        Meta(
            ge=0,
            le=2**63 - 1,
            description="seeds what is random in the engine, such as sampling without a request seed",
        ),
    ] = 0
    simulation: Annotated[str, Meta(description="JSON options of `--device simulated`")] = "{}"


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side: what `serve` needs beyond EngineConfig."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 picks a free one")] = 8000
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="names clients may use for the model (repeatable); default: the MODEL argument"),
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        Meta(description="key that clients must send as `Authorization: Bearer` (repeatable)"),
    ] = ()
    chat_template: Annotated[
        str | None, Meta(description="file with a Jinja chat template, instead of the model's own")
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "qwen_xml", "json", "none"],
        Meta(description="how tool calls are read from the output; `auto` looks at the chat template"),
    ] = "auto"
    drain_timeout: Annotated[
        float, Meta(ge=0, le=LONGEST, description="seconds that running requests get to finish after SIGTERM or Ctrl-C")
    ] = 30.0
    failure_linger: Annotated[
        float,
        Meta(
            ge=0,
            le=LONGEST,
            description="seconds that /health goes on answering 503 with the cause after an engine failure",
        ),
    ] = 5.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="log verbosity")] = "info"
    access_log: Annotated[bool, Meta(description="log each HTTP request")] = False
    root_path: Annotated[str, Meta(description="path prefix when behind a proxy")] = ""
