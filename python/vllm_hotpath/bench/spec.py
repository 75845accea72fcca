"""What one op tells ``verify`` and ``bench`` about itself. The engines that use it know no op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from vllm_hotpath.bench.models import Model

Shape = TypeVar("Shape")
"""The sizes of an op that a model and its tensor-parallel size decide: hashable, ``str()`` names it."""


class Output(NamedTuple):
    """One tensor that an op wrote, and what it had to write."""

    name: str
    got: torch.Tensor
    want: torch.Tensor


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
        outputs: the tensors that ``ours`` and ``peer`` write, poisoned before a check.
        want: computes what the outputs must be.
    """

    subjects: Mapping[str, Callable[[], Sequence[torch.Tensor]]]
    outputs: Sequence[torch.Tensor]
    want: Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class BenchCase:
    """One row of a benchmark.

    Attributes:
        op: public name.
        params: sizes by name, in the order of the table's columns. The last is the x axis of the chart.
        bytes_read: bytes that the op has to read, each once.
        bytes_written: bytes that it has to write, each once.
        set_bytes: device memory of one buffer set.
        make: ``make(device, count)`` allocates that many buffer sets with random inputs.
    """

    op: str
    params: Mapping[str, int]
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
        shape: the shape of a model on one of ``tp`` ranks.
        verify_cases: ``verify_cases(op, shape)`` yields the calls to check.
        bench_shapes: the shapes of the full benchmark table.
        bench_cases: ``bench_cases(op, shape, quick)`` yields its rows; ``quick`` asks for few of them.
        peer: the op that others have for the same job, in words.
        torch_ops: what the torch column runs, in words.
    """

    stem: str
    shape: Callable[[Model, int], Shape]
    verify_cases: Callable[[str, Shape], Iterator[VerifyCase]]
    bench_shapes: Sequence[Shape]
    bench_cases: Callable[[str, Shape, bool], Iterator[BenchCase]]
    peer: str
    torch_ops: str
