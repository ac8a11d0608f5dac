"""Names that dashboards and routers depend on, and the arithmetic behind them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from atom_async.engine.client import EngineInfo, EngineOutput, RequestTimings
from atom_async.telemetry.histogram import Histogram
from atom_async.telemetry.metrics import Metrics, registry_of

LABELS = {"model_name", "engine"}
FROZEN = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:lora_requests_info": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "atom:steps_in_flight": "gauge",
    "atom:kv_blocks_used": "gauge",
    "atom:kv_blocks_cached": "gauge",
    "atom:kv_blocks_total": "gauge",
    "atom:draining": "gauge",
    "atom:requests_parked": "gauge",
    "atom:requests_blocked": "gauge",
    "atom:queued_tokens": "gauge",
    "atom:step_prediction_error": "gauge",
    "atom:requests_expired": "counter",
    "atom:prefix_waits": "counter",
    "atom:prefix_wait_outcomes": "counter",
    "atom:prefix_waits_declined": "counter",
    "atom:prefill_holds": "counter",
    "atom:prefill_fires": "counter",
    "atom:engine_up": "gauge",
    "atom:prompt_tokens_computed": "counter",
    "atom:steps": "counter",
    "atom:requests_aborted": "counter",
    "atom:requests_rejected": "counter",
}
INFO = EngineInfo(
    boot_id="b",
    max_model_len=8,
    block_size=16,
    num_kv_blocks=10,
    vocab_size=9,
    max_num_seqs=1,
    max_num_batched_tokens=1,
    device_name="",
    attention_backend="",
    dtype="float32",
    tp_size=1,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def scraped(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Samples by name, and `le` or `finished_reason` where they have one."""
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry_of(metrics)).decode()):
        for sample in family.samples:
            extra = sample.labels.get("le") or sample.labels.get("finished_reason")
            samples[(sample.name, extra) if extra else (sample.name,)] = sample.value
    return samples


def test_names_types_and_labels_are_frozen() -> None:
    metrics = Metrics("model")
    metrics.info = INFO
    families = list(text_string_to_metric_families(generate_latest(registry_of(metrics)).decode()))
    assert {family.name: family.type for family in families} == FROZEN
    for family in families:
        for sample in family.samples:
            assert set(sample.labels) >= LABELS, sample.name
            assert sample.labels["model_name"] == "model"


def test_what_routers_read_of_the_cache() -> None:
    metrics = Metrics("model")
    metrics.info = INFO
    (cache,) = [f for f in registry_of(metrics).collect() if f.name == "vllm:cache_config_info"]
    labels = cache.samples[0].labels
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", "10")


def test_one_request_from_arrival_to_end() -> None:
    clock = Clock()
    metrics = Metrics("model", clock)
    meter = metrics.begin(prompt_tokens=12, max_tokens=30)
    clock.now += 0.5
    meter.output(EngineOutput(request_id="r", token_ids=[1]))
    clock.now += 0.25
    meter.output(EngineOutput(request_id="r", token_ids=[2]))
    clock.now += 1.0  # a reader that fell behind gets two at once
    meter.output(EngineOutput(request_id="r", token_ids=[3, 4]))
    timings = RequestTimings(queue_s=0.125, prefill_s=0.25, decode_s=1.0)
    meter.output(EngineOutput(request_id="r", finish_reason="length", timings=timings))
    meter.left()
    samples = scraped(metrics)
    sums = {
        "vllm:time_to_first_token_seconds": (1, 0.5),
        "vllm:inter_token_latency_seconds": (3, 1.25),
        "vllm:time_per_output_token_seconds": (3, 1.25),
        "vllm:request_time_per_output_token_seconds": (1, 1.25 / 3),
        "vllm:e2e_request_latency_seconds": (1, 1.75),
        "vllm:request_queue_time_seconds": (1, 0.125),
        "vllm:request_prefill_time_seconds": (1, 0.25),
        "vllm:request_decode_time_seconds": (1, 1.0),
        "vllm:request_inference_time_seconds": (1, 1.25),
        "vllm:request_prompt_tokens": (1, 12),
        "vllm:request_generation_tokens": (1, 4),
        "vllm:request_params_max_tokens": (1, 30),
    }
    for name, (count, total) in sums.items():
        assert (samples[f"{name}_count",], samples[f"{name}_sum",]) == (count, total), name
    assert samples["vllm:request_success_total", "length"] == 1
    assert samples["vllm:request_success_total", "abort"] == 0


def test_ends_that_are_no_success() -> None:
    metrics = Metrics("model")
    never_begun, lost, left = (metrics.begin(prompt_tokens=1, max_tokens=1) for _ in range(3))
    never_begun.failed()
    lost.output(EngineOutput(request_id="r", token_ids=[1]))
    lost.failed()
    for meter in (never_begun, lost, left):
        meter.left()
        meter.left()
    assert metrics.rejected == 1
    assert metrics.ended == {"stop": 0, "length": 0, "abort": 1, "error": 1}


@given(values=st.lists(st.floats(0, 100)), bounds=st.lists(st.integers(0, 100), unique=True, min_size=1))
def test_histogram_counts_like_its_definition(values: list[float], bounds: list[int]) -> None:
    bounds.sort()
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    assert histogram.count == len(values)
    for (bound, count), limit in zip(histogram.cumulative(), [*bounds, float("inf")], strict=True):
        assert count == sum(value <= limit for value in values), bound
