"""CUDA-graph timing of several subjects, interleaved so that clock drift meets all of them alike."""

from __future__ import annotations

import gc
import math
import statistics
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Call = Callable[[], object]

MIN_REPLAY_US = 1000.0
"""One replay lasts at least about this long, so that the gap before its first kernel is lost in it."""

MAX_SETS = 4096
_L2_MULTIPLE = 3
_WARMUP_REPLAYS = 3
_COPY_BYTES_PER_US = 4e6
_SHORTEST_CALL_US = 1.0


@dataclass(frozen=True)
class Timing:
    """Microseconds per call, over ``replays`` replays of a graph of ``calls``: median and two percentiles."""

    median_us: float
    p10_us: float
    p90_us: float
    replays: int
    calls: int

    @property
    def spread(self) -> float:
        """Distance from the 10th to the 90th percentile as a fraction of the median."""
        return (self.p90_us - self.p10_us) / self.median_us


@dataclass(frozen=True)
class Subject:
    """What is timed: one call per buffer set, used in turn; only every ``every``-th round replays it."""

    calls: Sequence[Call]
    every: int = 1


def summarise(times_us: Sequence[float], calls: int) -> Timing:
    """Turn the times of whole replays, in microseconds, into the time of one call."""
    per_call = sorted(time / calls for time in times_us)
    if len(per_call) == 1:
        return Timing(per_call[0], per_call[0], per_call[0], 1, calls)
    deciles = statistics.quantiles(per_call, n=10, method="inclusive")
    return Timing(statistics.median(per_call), deciles[0], deciles[-1], len(per_call), calls)


def sets_needed(bytes_moved: int, l2_bytes: int) -> int:
    """Count the buffer sets whose traffic exceeds three times the L2: none is in it when used again."""
    return min(MAX_SETS, max(2, _L2_MULTIPLE * l2_bytes // max(1, bytes_moved) + 1))


def passes_needed(bytes_moved: int, sets: int) -> int:
    """Passes over all buffer sets in one graph for it to last ``MIN_REPLAY_US`` at copy speed."""
    estimate_us = max(_SHORTEST_CALL_US, bytes_moved / _COPY_BYTES_PER_US)
    return max(1, math.ceil(MIN_REPLAY_US / (estimate_us * sets)))


def measure(
    subjects: Mapping[str, Subject], *, bytes_moved: int, replays: int, device: torch.device
) -> dict[str, Timing]:
    """Time every subject.

    Each round replays each subject's graph once between two events, in an order that rotates from round to
    round. Nothing waits for the device until all rounds are queued.

    Args:
        subjects: what to time, by name. The calls must be legal in capture and use torch's current stream.
        bytes_moved: bytes that one call reads and writes, which decides how many calls a graph has.
        replays: rounds after the warm-up.
        device: the CUDA device of the buffers.
    """
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in subjects}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    counts: dict[str, int] = {}
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for name, subject in subjects.items():
            passes = passes_needed(bytes_moved, len(subject.calls))
            counts[name] = passes * len(subject.calls)
            graphs[name] = _capture(subject.calls, passes)
        for _ in range(_WARMUP_REPLAYS):
            for graph in graphs.values():
                graph.replay()
        names = list(subjects)
        for turn in range(replays):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                if turn % subjects[name].every:
                    continue
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graphs[name].replay()
                end.record()
                events[name].append((start, end))
        stream.synchronize()
    timings = {
        name: summarise([start.elapsed_time(end) * 1e3 for start, end in pairs], counts[name])
        for name, pairs in events.items()
    }
    for graph in graphs.values():
        graph.reset()
    return timings


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all measurements, so that the allocator does not keep a cache for each of many."""
    return torch.cuda.Stream(device)


def _capture(calls: Sequence[Call], passes: int) -> torch.cuda.CUDAGraph:
    """Capture ``passes`` rounds of ``calls`` on the current stream, after one call that may initialise.

    ``torch.cuda.graph`` collects garbage and empties the allocator's cache at every entry, which for a
    hundred rows takes longer than the measurement. A collection within a capture could free device memory
    and break it.
    """
    calls[0]()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin()
        try:
            for _ in range(passes):
                for call in calls:
                    call()
        finally:
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph
