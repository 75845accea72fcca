"""Runs benchmark cases on a GPU: numerics first, then ours, floors, torch ops and peer in one measurement."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_hotpath import _core
from vllm_hotpath.bench.numerics import compare, poison
from vllm_hotpath.bench.timing import Subject, Timing, measure, sets_needed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_hotpath.bench.spec import BenchCase, BufferSet

MAX_SET_BYTES = 2_500_000_000
"""Cases whose buffer set is larger are left out."""

REPLAYS = 20
QUICK_REPLAYS = 15
_TORCH_EVERY = 4
_ALIGNMENT = 256


class NumericsError(Exception):
    """An op's output differs from its reference, so there is nothing to time."""


@dataclass(frozen=True)
class Row:
    """One measured case.

    Attributes:
        op: public name.
        params: sizes by name.
        bytes_read: bytes the op has to read.
        bytes_written: bytes it has to write.
        timings: by subject: ``ours``, ``copy`` (the floor: a device copy that moves as many bytes),
            ``stream`` (a kernel that only reads and writes, split as the op does), ``torch`` and ``peer``.
        notes: why a subject was not timed, by subject.
    """

    op: str
    params: Mapping[str, int]
    bytes_read: int
    bytes_written: int
    timings: Mapping[str, Timing]
    notes: Mapping[str, str]

    def us(self, subject: str) -> float | None:
        """Median microseconds per call, None if the subject was not timed."""
        timing = self.timings.get(subject)
        return None if timing is None else timing.median_us

    def ratio(self, subject: str, to: str) -> float | None:
        """Time of ``subject`` over time of ``to``."""
        above, below = self.us(subject), self.us(to)
        return None if above is None or below is None else above / below

    @property
    def tb_per_s(self) -> float:
        """10^12 bytes read and written per second by our op."""
        return (self.bytes_read + self.bytes_written) / self.timings["ours"].median_us / 1e6

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values, ratios included."""
        names = [("ours", "copy"), ("ours", "stream"), ("torch", "ours"), ("peer", "ours"), ("peer", "copy")]
        return {
            "op": self.op,
            **self.params,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "tb_per_s": self.tb_per_s,
            "timings": {name: asdict(timing) for name, timing in self.timings.items()},
            "ratios": {f"{a}/{b}": ratio for a, b in names if (ratio := self.ratio(a, b)) is not None},
            "notes": dict(self.notes),
        }


def run_case(case: BenchCase, device: torch.device, replays: int = REPLAYS) -> Row:
    """Check and time one case.

    Raises:
        NumericsError: our output differs from the reference. A peer or torch op that differs is not timed,
            and noted.
    """
    properties = torch.cuda.get_device_properties(device)
    count = sets_needed(case.bytes_moved, properties.L2_cache_size)
    sets = case.make(device, count)
    notes: dict[str, str] = {}
    subjects: dict[str, Subject] = {}
    for name in sets[0].subjects:
        wrong = check(sets, name)
        if wrong and name == "ours":
            raise NumericsError(f"{case}: {wrong}")
        if wrong:
            notes[name] = f"not timed, its result differs: {wrong}"
            continue
        subjects[name] = Subject([one.subjects[name] for one in sets], _TORCH_EVERY if name == "torch" else 1)
    floors = _floors(case, device, count)
    timings = measure({**subjects, **floors}, bytes_moved=case.bytes_moved, replays=replays, device=device)
    return Row(case.op, case.params, case.bytes_read, case.bytes_written, timings, notes)


def check(sets: Sequence[BufferSet], subject: str) -> str:
    """Run ``subject`` on the first and last buffer set; how it differs from the reference, or nothing."""
    for one in (sets[0], sets[-1]):
        poison(tuple(one.outputs))
        outputs = one.subjects[subject]()
        for position, (got, want) in enumerate(zip(outputs, one.want(), strict=True)):
            mismatch = compare(got, want)
            if mismatch is not None:
                return f"{subject}, output {position}: {mismatch}"
    return ""


def run(
    cases: Sequence[BenchCase],
    device: torch.device,
    replays: int = REPLAYS,
    done: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Run the cases that fit, calling ``done`` after each."""
    rows = []
    limit = torch.cuda.get_device_properties(device).total_memory // 3
    for case in cases:
        if torch.cuda.memory_reserved(device) > limit:
            torch.cuda.empty_cache()
        if case.set_bytes > MAX_SET_BYTES:
            continue
        row = run_case(case, device, replays)
        rows.append(row)
        done(row)
    return rows


def _floors(case: BenchCase, device: torch.device, count: int) -> dict[str, Subject]:
    """Make a copy of half the bytes, so that as many move, and a kernel that reads and writes as the op."""
    half = case.bytes_moved // 2
    sources = _slices(max(half, case.bytes_read), count, device)
    targets = _slices(max(half, case.bytes_written), count, device)

    def copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        return lambda: target.copy_(source)

    def stream(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        return lambda: _core.bench_stream(source, target)

    read, written = case.bytes_read, case.bytes_written
    return {
        "copy": Subject([copy(s[:half], t[:half]) for s, t in zip(sources, targets, strict=True)]),
        "stream": Subject([stream(s[:read], t[:written]) for s, t in zip(sources, targets, strict=True)]),
    }


def _slices(size: int, count: int, device: torch.device) -> list[torch.Tensor]:
    step = -(-size // _ALIGNMENT) * _ALIGNMENT
    pool = torch.randint(2**62, (count, step // 8), dtype=torch.int64, device=device)
    return list(pool.view(torch.uint8))
