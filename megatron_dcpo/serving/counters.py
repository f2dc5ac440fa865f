"""What ``/metrics`` says, in the text format of Prometheus."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from megatron_dcpo.calibration.metrics import DEFAULT_BINS, bin_rows
from megatron_dcpo.serving.scorer import Scored

MOST_CONFIDENCES = 2000  # the last ones, whose distribution is compared with the fitted one
_LATENCIES = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
# Kolmogorov-Smirnov: 5 % of samples from one distribution differ by more, times sqrt((n+m)/(n m))
_CRITICAL = 1.358


class Counters:
    """Counts requests and confidences. ``fitted`` [20] is the histogram of the confidences of the
    fit, None if there is none.
    """

    def __init__(self, registry: CollectorRegistry, fitted: np.ndarray | None = None) -> None:
        self.recent: deque[float] = deque(maxlen=MOST_CONFIDENCES)
        self.requests = Counter(
            "dcpo_requests",
            "Requests for completions, by path and status (499: the client left)",
            ("path", "status"),
            registry=registry,
        )
        self.seconds = Histogram(
            "dcpo_request_seconds",
            "Seconds from a request's first byte to its answer's last one",
            ("path",),
            buckets=_LATENCIES,
            registry=registry,
        )
        self.confidences = Histogram(
            "dcpo_confidence",
            "Confidences of the choices that were served",
            buckets=[(bin_ + 1) / DEFAULT_BINS for bin_ in range(DEFAULT_BINS)],
            registry=registry,
        )
        self.missing = Counter(
            "dcpo_confidence_missing",
            "Choices without a confidence, by reason",
            ("reason",),
            registry=registry,
        )
        self.abstentions = Counter(
            "dcpo_abstentions", "Choices whose confidence is below the threshold", registry=registry
        )
        if fitted is None:
            return
        drift = Gauge(
            "dcpo_confidence_drift",
            "Largest difference between the cumulative distributions of the last confidences and "
            "of the fitted ones, over 20 bins",
            registry=registry,
        )
        drift.set_function(lambda: drift_of(fitted, list(self.recent))[0])
        limit = Gauge(
            "dcpo_confidence_drift_limit",
            "Drift that 95 % of samples from the distribution of the fit stay below",
            registry=registry,
        )
        limit.set_function(lambda: drift_of(fitted, list(self.recent))[1])

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def choice(self, scored: Scored) -> None:
        """Count a choice."""
        if scored.confidence is None:
            self.missing.labels(scored.reason.partition(":")[0]).inc()
            return
        self.confidences.observe(scored.confidence)
        self.recent.append(scored.confidence)
        if scored.abstains:
            self.abstentions.inc()


def drift_of(fitted: np.ndarray, confidences: list[float]) -> tuple[float, float]:
    """Return the Kolmogorov-Smirnov distance between a histogram [20] and confidences, and the
    distance below which 95 % of samples from one distribution stay; NaN without confidences.
    """
    n = len(confidences)
    m = int(fitted.sum())
    if not n or not m:
        return math.nan, math.nan
    served = bin_rows(confidences, np.zeros(n)).count
    difference = np.cumsum(served) / n - np.cumsum(fitted) / m
    limit = _CRITICAL * math.sqrt((n + m) / (n * m))
    return float(np.abs(difference).max()), limit
