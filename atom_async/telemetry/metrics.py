"""Metrics of one served model: plain numbers while requests run, Prometheus' form only when scraped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from atom_async.engine.client import EngineInfo, EngineOutput, EngineStats

from . import names
from .histogram import Histogram


class Metrics:
    """Owned by the event loop's thread. `clock` is monotonic, in seconds."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.model_name = model_name
        self.clock = clock
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in names.HISTOGRAMS.items()}
        self.ended = dict.fromkeys(names.FINISHED_REASONS, 0)
        self.rejected = 0
        self.stats = EngineStats()
        """As of the last scrape; what a dead engine said last."""
        self.info: EngineInfo | None = None
        self.engine_up = False

    def begin(self, *, prompt_tokens: int, max_tokens: int) -> RequestMeter:
        """A sequence is about to be submitted."""
        self.histograms["vllm:request_prompt_tokens"].observe(prompt_tokens)
        self.histograms["vllm:request_params_max_tokens"].observe(max_tokens)
        return RequestMeter(self)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)


class RequestMeter:
    """Watches the outputs of one sequence go by."""

    __slots__ = ("_arrived", "_first", "_last", "_metrics", "_over", "_tokens")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = metrics.clock()
        self._first = self._last = -1.0
        self._tokens = 0
        self._over = False

    def output(self, output: EngineOutput) -> None:
        now = self._metrics.clock()
        if output.token_ids:
            self._count(len(output.token_ids), now)
        if output.finish_reason is not None:
            self._ended(output, now)

    def failed(self) -> None:
        """Its stream raised: refused before it began, or lost with the engine."""
        if self._over:
            return
        self._over = True
        if self._first < 0:
            self._metrics.rejected += 1
        else:
            self._metrics.ended["error"] += 1

    def left(self) -> None:
        """Nobody reads its stream any more, so it will not be seen to end."""
        if not self._over:
            self._over = True
            self._metrics.ended["abort"] += 1

    def _count(self, tokens: int, now: float) -> None:
        observe = self._metrics.observe
        if self._first < 0:
            self._first = self._last = now
            self._tokens = 1
            tokens -= 1
            observe("vllm:time_to_first_token_seconds", now - self._arrived)
        if tokens:
            interval = (now - self._last) / tokens
            observe("vllm:inter_token_latency_seconds", interval, tokens)
            observe("vllm:time_per_output_token_seconds", interval, tokens)
            self._tokens += tokens
            self._last = now

    def _ended(self, output: EngineOutput, now: float) -> None:
        self._over = True
        metrics = self._metrics
        assert output.finish_reason is not None
        metrics.ended[output.finish_reason] += 1
        observe = metrics.observe
        observe("vllm:e2e_request_latency_seconds", now - self._arrived)
        observe("vllm:request_generation_tokens", self._tokens)
        if self._tokens > 1:
            observe("vllm:request_time_per_output_token_seconds", (self._last - self._first) / (self._tokens - 1))
        if (timings := output.timings) is not None:
            observe("vllm:request_queue_time_seconds", timings.queue_s)
            observe("vllm:request_prefill_time_seconds", timings.prefill_s)
            observe("vllm:request_decode_time_seconds", timings.decode_s)
            observe("vllm:request_inference_time_seconds", timings.prefill_s + timings.decode_s)


class PrometheusCollector(Collector):
    """Reads `Metrics` when Prometheus asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._labels = (metrics.model_name, "0")

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from self._facts()

    def _gauges(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        values: dict[tuple[str, str], float] = {
            (name, text): float(getattr(stats, field)) for name, (field, text) in names.STAT_GAUGES.items()
        }
        values[names.KV_USAGE] = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        values[names.ENGINE_UP] = float(self._metrics.engine_up)
        for (name, text), value in values.items():
            gauge = GaugeMetricFamily(name, text, labels=names.LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        for name, (field, text) in names.STAT_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=names.LABELS)
            counter.add_metric(self._labels, getattr(stats, field))
            yield counter
        for name, (field, label, text) in names.STAT_COUNTERS_BY.items():
            counter = CounterMetricFamily(name, text, labels=(*names.LABELS, label))
            for value, count in getattr(stats, field).items():
                counter.add_metric((*self._labels, value), count)
            yield counter
        rejected = CounterMetricFamily(*names.REJECTED, labels=names.LABELS)
        rejected.add_metric(self._labels, self._metrics.rejected)
        yield rejected
        ended = CounterMetricFamily(*names.REQUEST_SUCCESS, labels=(*names.LABELS, "finished_reason"))
        for reason, count in self._metrics.ended.items():
            ended.add_metric((*self._labels, reason), count)
        yield ended

    def _histograms(self) -> Iterator[Metric]:
        for name, (_, text) in names.HISTOGRAMS.items():
            histogram = self._metrics.histograms[name]
            family = HistogramMetricFamily(name, text, labels=names.LABELS)
            family.add_metric(self._labels, histogram.cumulative(), histogram.total)
            yield family

    def _facts(self) -> Iterator[Metric]:
        info = self._metrics.info
        if info is None:
            return
        cache = {"block_size": info.block_size, "num_gpu_blocks": info.num_kv_blocks, "cache_dtype": info.dtype}
        facts = GaugeMetricFamily(*names.CACHE_CONFIG, labels=(*names.LABELS, *cache))
        facts.add_metric((*self._labels, *map(str, cache.values())), 1.0)
        yield facts
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        lora = GaugeMetricFamily(*names.LORA_INFO, labels=(*names.LABELS, *adapters))
        lora.add_metric((*self._labels, *adapters.values()), time.time())
        yield lora


def registry_of(metrics: Metrics) -> CollectorRegistry:
    """For `prometheus_client.exposition`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(metrics))
    return registry
