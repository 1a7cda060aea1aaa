"""The engine's figures in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlcore_engine.engine import EmbeddedEngine

__all__ = ["exposition"]

_COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that were not computed again",
    "generated_tokens": "Sampled tokens",
    "decode_steps": "Decode steps",
    "decode_seconds": "Seconds in decode steps",
    "prefill_seconds": "Seconds in prefill",
    "weight_updates": "Weight updates",
}


class _Figures(Collector):
    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        worker = self._engine.worker
        active, waiting = worker.load()
        yield GaugeMetricFamily("rlcore_engine_running_requests", "Requests in slots", active)
        yield GaugeMetricFamily("rlcore_engine_waiting_requests", "Requests that wait for a slot", waiting)
        yield GaugeMetricFamily("rlcore_engine_paused", "1 while paused", int(worker.paused))
        yield GaugeMetricFamily("rlcore_engine_weight_version", "Version of the weights", worker.version)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"rlcore_engine_{name}", text, getattr(worker.stats, name))
        finished = CounterMetricFamily("rlcore_engine_requests", "Finished requests", labels=["finish"])
        for reason, count in sorted(worker.stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished


def exposition(engine: EmbeddedEngine) -> bytes:
    """The text of ``/metrics``."""
    registry = CollectorRegistry()
    registry.register(_Figures(engine))
    return generate_latest(registry)
