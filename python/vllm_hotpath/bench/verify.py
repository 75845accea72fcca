"""Runs ops against their references on one device. Prints nothing."""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vllm_hotpath.bench.numerics import compare
from vllm_hotpath.bench.ops import load, stem_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm_hotpath.bench.models import Model
    from vllm_hotpath.bench.spec import VerifyCase

_KEPT_FAILURES = 20


@dataclass(frozen=True)
class Failure:
    """One case that went wrong; ``index``, ``got`` and ``want`` are of the first element that differs."""

    case: str
    output: str
    message: str
    index: tuple[int, ...] | None = None
    got: str | None = None
    want: str | None = None


@dataclass
class Unit:
    """All cases of one op at one shape, which several models may share.

    ``elements`` counts what was compared, ``near`` how many of them by a tolerance and not bit by bit.
    """

    op: str
    shape: Any
    placements: list[str]
    cases: int = 0
    elements: int = 0
    near: int = 0
    failed: int = 0
    failures: list[Failure] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """The unit as JSON values."""
        return {**asdict(self), "shape": str(self.shape)}


def plan(ops: Iterable[str], placements: Iterable[tuple[Model, int]]) -> list[Unit]:
    """Make a unit per op and distinct shape, each naming the models and parallel sizes that it stands for.

    A model that has no use for an op has no unit of it.
    """
    units: dict[tuple[str, Any], Unit] = {}
    chosen = list(placements)
    for op in ops:
        spec = load(stem_of(op))
        for model, tp in chosen:
            shape = spec.shape(model, tp)
            if shape is not None:
                unit = units.setdefault((op, shape), Unit(op, shape, []))
                unit.placements.append(f"{model.name} tp{tp}")
    return list(units.values())


def run(unit: Unit, device: torch.device, seed: int) -> Iterator[str]:
    """Run the cases of ``unit`` and record the outcome in it, yielding the label of each case before it runs.

    The inputs of a case depend on ``seed``, op, shape and label only, not on what else is run.
    """
    for case in load(stem_of(unit.op)).verify_cases(unit.op, unit.shape):
        yield case.label
        unit.cases += 1
        failures = list(_failures(unit, case, device, seed))
        unit.failed += bool(failures)
        unit.failures += failures[: _KEPT_FAILURES - len(unit.failures)]


def _failures(unit: Unit, case: VerifyCase, device: torch.device, seed: int) -> Iterator[Failure]:
    generator = torch.Generator()
    generator.manual_seed(seed << 32 | zlib.crc32(f"{unit.op} {unit.shape} {case.label}".encode()))
    try:
        outputs = case.run(generator, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (RuntimeError, ValueError, TypeError) as error:
        yield Failure(case.label, "-", f"{type(error).__name__}: {error}")
        return
    for name, got, want, tolerance in outputs:
        unit.elements += want.numel()
        unit.near += 0 if tolerance is None else want.numel()
        mismatch = compare(got, want, tolerance)
        if mismatch is not None:
            yield Failure(case.label, name, str(mismatch), mismatch.index, mismatch.got, mismatch.want)
