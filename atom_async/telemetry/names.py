"""Every metric's name, meaning and buckets. Dashboards and routers depend on them: a test freezes this file.

The `vllm:` names, their labels and buckets are those that vLLM's dashboards and Kubernetes routers read; what
has no counterpart there is `atom:`. Counters get Prometheus' `_total` when published.
"""

from __future__ import annotations

LABELS = ("model_name", "engine")
FINISHED_REASONS = ("stop", "length", "abort", "error")

STAT_GAUGES = {
    "vllm:num_requests_running": ("running", "Requests in the engine's running set"),
    "vllm:num_requests_waiting": ("waiting", "Requests waiting for admission"),
    "atom:steps_in_flight": ("steps_in_flight", "Steps submitted and not yet returned"),
    "atom:kv_blocks_used": ("kv_blocks_used", "KV blocks held by live requests"),
    "atom:kv_blocks_cached": ("kv_blocks_cached", "KV blocks that are unreferenced and reusable"),
    "atom:kv_blocks_total": ("kv_blocks_total", "All KV blocks"),
    "atom:requests_parked": ("parked", "Requests waiting for a prefix that another one computes"),
    "atom:requests_blocked": ("blocked", "Requests waiting for memory"),
    "atom:queued_tokens": ("queued_tokens", "Prompt tokens to compute, of all requests that wait"),
    "atom:step_prediction_error": ("prediction_error", "Running mean of |predicted - measured| / measured step time"),
    "atom:draining": ("draining", "1 while the engine takes no new requests"),
}
"""Name: (field of EngineStats, help)."""

KV_USAGE = ("vllm:kv_cache_usage_perc", "Share of KV blocks held by live requests, 0 to 1")
ENGINE_UP = ("atom:engine_up", "0 after the engine has failed")

STAT_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens admitted, cached ones included"),
    "vllm:generation_tokens": ("generation_tokens", "Tokens generated"),
    "vllm:prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "vllm:num_preemptions": ("preemptions", "Requests preempted to free memory"),
    "atom:prompt_tokens_computed": ("prompt_tokens_computed", "Prompt tokens computed, hence not cached"),
    "atom:steps": ("steps", "Steps submitted"),
    "atom:requests_expired": ("expired", "Requests whose deadline passed in the queue"),
    "atom:prefix_waits": ("prefix_waits", "Times that a request was parked behind another's prefix"),
    "atom:prefill_holds": ("prefill_holds", "Times that ready prefill was held back"),
    "atom:requests_aborted": ("aborted", "Requests aborted in the engine"),
}
"""Name: (field of EngineStats, help)."""

STAT_COUNTERS_BY = {
    "atom:prefix_wait_outcomes": ("prefix_wait_outcomes", "outcome", "Ends of waits for a prefix, by outcome"),
    "atom:prefix_waits_declined": (
        "prefix_waits_declined",
        "reason",
        "Times that a request computed what another one was computing already, by reason",
    ),
    "atom:prefill_fires": ("prefill_fires", "reason", "Prefill-carrying steps, by what let them go"),
}
"""Name: (field of EngineStats that maps label values to counts, label, help)."""

REQUEST_SUCCESS = ("vllm:request_success", "Requests that ended, by reason")
REJECTED = ("atom:requests_rejected", "Requests that the engine refused or lost before they began")
CACHE_CONFIG = ("vllm:cache_config_info", "Settings of the KV cache, as labels")
LORA_INFO = ("vllm:lora_requests_info", "Adapters in use; this engine has none")

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_INTERVAL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (_TTFT, "Arrival of a request to its first token"),
    "vllm:inter_token_latency_seconds": (_TOKEN_INTERVAL, "Between tokens of one request"),
    "vllm:time_per_output_token_seconds": (_TOKEN_INTERVAL, "Old name of vllm:inter_token_latency_seconds"),
    "vllm:request_time_per_output_token_seconds": (_TOKEN_INTERVAL, "Mean time per token after a request's first"),
    "vllm:e2e_request_latency_seconds": (_LATENCY, "Arrival of a request to its last token"),
    "vllm:request_queue_time_seconds": (_LATENCY, "Arrival in the engine to first admission"),
    "vllm:request_prefill_time_seconds": (_LATENCY, "First admission to first token"),
    "vllm:request_decode_time_seconds": (_LATENCY, "First token to last"),
    "vllm:request_inference_time_seconds": (_LATENCY, "First admission to last token"),
    "vllm:request_prompt_tokens": (_TOKENS, "Prompt tokens of a request"),
    "vllm:request_generation_tokens": (_TOKENS, "Tokens generated for a request"),
    "vllm:request_params_max_tokens": (_TOKENS, "max_tokens of a request"),
    "vllm:request_params_n": (_CHOICES, "n of a request"),
}
"""Name: (upper bounds of the buckets, help)."""
