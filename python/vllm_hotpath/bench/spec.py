"""What one op tells ``verify`` and ``bench`` about itself. The engines that use it know no op."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from vllm_hotpath.bench.models import Model
    from vllm_hotpath.bench.numerics import Tolerance

Shape = TypeVar("Shape")
"""The sizes of an op that a model and its tensor-parallel size decide: hashable, ``str()`` names it."""


class Output(NamedTuple):
    """One tensor that an op wrote, and what it had to write: bit by bit, or within a tolerance."""

    name: str
    got: torch.Tensor
    want: torch.Tensor
    tolerance: Tolerance | None = None


@dataclass(frozen=True)
class Floor:
    """What the time of a stem's ops is held against.

    Attributes:
        name: in column headings and as a subject of the results.
        title: what it does, in a few words, for the chart.
        text: what it does, in sentences, for the page.
        choice: heading of the column that names the fastest of several candidates; empty for one candidate.
    """

    name: str
    title: str
    text: str
    choice: str = ""


COPY = Floor(
    name="copy",
    title="device copy of the same bytes",
    text="`copy` is the floor: a device copy that reads and writes as many bytes in total. `stream` is a "
    "kernel that only reads and writes, with the op's own split of the two.",
)
"""The floor of ops that only move bytes. The benchmark runner makes it from a case's byte counts."""


@dataclass(frozen=True)
class VerifyCase:
    """One call to check: ``run(generator, device)`` makes inputs with a CPU generator and calls the op."""

    label: str
    run: Callable[[torch.Generator, torch.device], Sequence[Output]]


@dataclass(frozen=True)
class BufferSet:
    """Inputs and outputs of one timed call.

    Attributes:
        subjects: ``ours``, ``torch``, and ``peer`` where there is one; each runs on these buffers and returns
            the outputs in one order.
        outputs: the contiguous tensors that ``ours`` and ``peer`` overwrite, poisoned before a check.
        want: computes what the outputs must be, from the buffers as they are before a call.
        got: reads what has to agree with ``want`` after a call, where that is not what the subject returned:
            tensors updated in place, or samples of large ones.
        tolerances: one for each tensor of ``want``, None to compare bit by bit; empty for all of them so.
        floors: candidates of a floor that works on these buffers, by what tells them apart; empty for the
            copy floor.
    """

    subjects: Mapping[str, Callable[[], Sequence[torch.Tensor]]]
    outputs: Sequence[torch.Tensor]
    want: Callable[[], Sequence[torch.Tensor]]
    got: Callable[[], Sequence[torch.Tensor]] | None = None
    tolerances: Sequence[Tolerance | None] = ()
    floors: Mapping[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchCase:
    """One row of a benchmark.

    Attributes:
        op: public name.
        params: sizes and variants by name, in the order of the table's columns. The last is a size, the x
            axis of the chart.
        bytes_read: bytes that the op has to read, each once.
        bytes_written: bytes that it has to write, each once.
        set_bytes: device memory of one buffer set.
        make: ``make(device, count)`` allocates that many buffer sets with random inputs.
    """

    op: str
    params: Mapping[str, int | str]
    bytes_read: int
    bytes_written: int
    set_bytes: int
    make: Callable[[torch.device, int], list[BufferSet]]

    @property
    def bytes_moved(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written

    def __str__(self) -> str:
        return f"{self.op} " + " ".join(f"{name}={size}" for name, size in self.params.items())


@dataclass(frozen=True)
class OpSpec(Generic[Shape]):
    """All that is known of a stem's ops.

    Attributes:
        stem: the stem, as in ``bench.ops.OPS``.
        shape: the shape of a model on one of ``tp`` ranks, None for a model that has no use for the ops.
        verify_cases: ``verify_cases(op, shape)`` yields the calls to check.
        bench_shapes: the shapes of the full benchmark table.
        bench_cases: ``bench_cases(op, shape, quick)`` yields its rows; ``quick`` asks for few of them.
        peer: the op that others have for the same job, in words.
        torch_ops: what the torch column runs, in words; empty where there is no such column.
        floor: what the benchmark holds the time against.
        agreement: how results are compared with the reference before the clock starts, in words.
    """

    stem: str
    shape: Callable[[Model, int], Shape | None]
    verify_cases: Callable[[str, Shape], Iterator[VerifyCase]]
    bench_shapes: Sequence[Shape]
    bench_cases: Callable[[str, Shape, bool], Iterator[BenchCase]]
    peer: str
    torch_ops: str = ""
    floor: Floor = COPY
    agreement: str = "bit by bit"
