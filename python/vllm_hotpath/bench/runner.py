"""Runs benchmark cases on a GPU: numerics first, then ours, floors, torch ops and peer in one measurement."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vllm_hotpath import _core
from vllm_hotpath.bench.numerics import compare, poison
from vllm_hotpath.bench.ops import load, stem_of
from vllm_hotpath.bench.spec import COPY
from vllm_hotpath.bench.timing import Subject, Timing, measure, sets_needed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_hotpath.bench.spec import BenchCase, BufferSet, Floor

MAX_SET_BYTES = 2_500_000_000
"""Cases whose buffer set is larger are left out."""

REPLAYS = 20
QUICK_REPLAYS = 15
PEER_SLACK = 10
"""How many times as far as ours the results of others may be from the reference and still be timed."""

_TORCH_EVERY = 4
_ALIGNMENT = 256


class NumericsError(Exception):
    """An op's output differs from its reference, so there is nothing to time."""


@dataclass(frozen=True)
class Row:
    """One measured case.

    Attributes:
        op: public name.
        params: sizes and variants by name.
        bytes_read: bytes the op has to read.
        bytes_written: bytes it has to write.
        timings: by subject: ``ours``, the floor under its name, ``torch`` and ``peer``, and beside the copy
            floor ``stream`` (a kernel that only reads and writes, split as the op does).
        notes: why a subject was not timed, by subject.
        floor: the floor of the op.
        candidates: timings of the floor's candidates, of which ``timings`` has the fastest.
    """

    op: str
    params: Mapping[str, int | str]
    bytes_read: int
    bytes_written: int
    timings: Mapping[str, Timing]
    notes: Mapping[str, str]
    floor: Floor = COPY
    candidates: Mapping[str, Timing] = field(default_factory=dict)

    def us(self, subject: str) -> float | None:
        """Median microseconds per call, None if the subject was not timed."""
        timing = self.timings.get(subject)
        return None if timing is None else timing.median_us

    def ratio(self, subject: str, to: str) -> float | None:
        """Time of ``subject`` over time of ``to``."""
        above, below = self.us(subject), self.us(to)
        return None if above is None or below is None else above / below

    @property
    def choice(self) -> str:
        """The fastest candidate of the floor, nothing if there is one floor only."""
        return fastest(self.candidates) if self.candidates else ""

    @property
    def tb_per_s(self) -> float:
        """10^12 bytes read and written per second by our op."""
        return (self.bytes_read + self.bytes_written) / self.timings["ours"].median_us / 1e6

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values, ratios included."""
        floor = self.floor.name
        names = [("ours", floor), ("ours", "stream"), ("torch", "ours"), ("peer", "ours"), ("peer", floor)]
        several = {
            f"{floor}_{self.floor.choice}": self.choice,
            f"{floor}_candidates_us": {name: timing.median_us for name, timing in self.candidates.items()},
        }
        return {
            "op": self.op,
            **self.params,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "tb_per_s": self.tb_per_s,
            "timings": {name: asdict(timing) for name, timing in self.timings.items()},
            "ratios": {f"{a}/{b}": ratio for a, b in names if (ratio := self.ratio(a, b)) is not None},
            "notes": dict(self.notes),
            **(several if self.candidates else {}),
        }


def fastest(timings: Mapping[str, Timing]) -> str:
    """The name of the lowest median."""
    return min(timings, key=lambda name: timings[name].median_us)


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
    floor = load(stem_of(case.op)).floor
    floors = {f"{floor.name} {name}": Subject([one.floors[name] for one in sets]) for name in sets[0].floors}
    made = floors or _copy_floors(case, device, count)
    timings = measure({**subjects, **made}, bytes_moved=case.bytes_moved, replays=replays, device=device)
    candidates = {name: timings.pop(f"{floor.name} {name}") for name in sets[0].floors}
    if candidates:
        timings[floor.name] = candidates[fastest(candidates)]
    return Row(case.op, case.params, case.bytes_read, case.bytes_written, timings, notes, floor, candidates)


def check(sets: Sequence[BufferSet], subject: str) -> str:
    """Run ``subject`` on the first and last buffer set; how it differs from the reference, or nothing."""
    slack = 1 if subject == "ours" else PEER_SLACK
    for one in (sets[0], sets[-1]):
        wanted = one.want()
        poison(tuple(one.outputs))
        returned = one.subjects[subject]()
        outputs = returned if one.got is None else one.got()
        tolerances = one.tolerances or [None] * len(wanted)
        for position, (got, want, near) in enumerate(zip(outputs, wanted, tolerances, strict=True)):
            mismatch = compare(got, want, near and near * slack)
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


def _copy_floors(case: BenchCase, device: torch.device, count: int) -> dict[str, Subject]:
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
