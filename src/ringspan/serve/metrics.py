"""Which metrics does a server have? Counters, gauges and times in Prometheus' text format."""

from bisect import bisect_left
from collections import defaultdict

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_COUNTERS = {
    "requests_total": "Requests that ended, by how.",
    "errors_total": "Requests that got an error instead of an answer, by HTTP status.",
    "prompt_tokens_total": "Tokens of prompts.",
    "cached_tokens_total": "Tokens of prompts that were cached already.",
    "generated_tokens_total": "Tokens that were generated.",
    "turns_total": "Prefill turns, by algorithm.",
    "evictions_total": "Conversations that were evicted from the cache.",
    "saves_total": "Conversations that were saved to disk when they were evicted.",
    "loads_total": "Conversations that were loaded from disk.",
    "restarts_total": "Times the ranks were started again.",
}
_GAUGES = {
    "requests_waiting": "Requests in the queue.",
    "requests_running": "Requests that are answered now.",
    "cache_bytes": "Upper bound of the KV cache in use on any rank, with room for answers under way.",
    "ready": "1 if the ranks can answer.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "time_per_token_seconds": "Between two tokens of an answer.",
}


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = {name: {"": 0.0} for name in _COUNTERS | _GAUGES}
        self._times: dict[str, list[int]] = {name: [0] * (len(_BOUNDS_S) + 1) for name in _HISTOGRAMS}
        self._sums: dict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        series = self._values[name]
        if text:
            series.pop("", None)
        series[text] = series.get(text, 0.0) + amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge, or a counter that is counted elsewhere."""
        self._values[name][""] = value

    def observe(self, name: str, seconds: float) -> None:
        """Add a measured time to a histogram."""
        self._times[name][bisect_left(_BOUNDS_S, seconds)] += 1
        self._sums[name] += seconds

    def text(self) -> str:
        """All metrics as text."""
        lines: list[str] = []
        for kind, names in (("counter", _COUNTERS), ("gauge", _GAUGES)):
            for name, about in names.items():
                lines += [f"# HELP ringspan_{name} {about}", f"# TYPE ringspan_{name} {kind}"]
                for labels, value in self._values[name].items():
                    lines.append(f"ringspan_{name}{f'{{{labels}}}' if labels else ''} {value:.15g}")
        for name, about in _HISTOGRAMS.items():
            lines += [f"# HELP ringspan_{name} {about}", f"# TYPE ringspan_{name} histogram"]
            total = 0
            for bound, count in zip([*map(str, _BOUNDS_S), "+Inf"], self._times[name], strict=True):
                total += count
                lines.append(f'ringspan_{name}_bucket{{le="{bound}"}} {total}')
            lines += [f"ringspan_{name}_sum {self._sums[name]:.9g}", f"ringspan_{name}_count {total}"]
        return "\n".join(lines) + "\n"
