"""What the benchmarks of ops with a gate share: their sizes, and the floor that a gate is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_hotpath import _core
from vllm_hotpath.bench.spec import Floor

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = (1, 2, 4, 8, 16, 32)
QUICK_TOKENS = (1, 8, 32)
_LOADS = (1, 2, 4, 8)

READ = Floor(
    name="read",
    title="read of the gate's weight",
    text="`read` is the floor: a kernel that reads the gate's weight once and writes nothing, the fastest of "
    "1, 2, 4 and 8 loads of 16 bytes a thread; `loads` says which. It waits for the kernel before it; the op "
    "has its first loads of the weight, which no kernel writes, under way by then.",
    choice="loads",
)


def reads_of(weight: torch.Tensor, sink: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The candidates of the floor, by their loads. ``sink``: 16 bytes that are never written."""
    read = weight.contiguous().view(-1).view(torch.uint8)
    target = sink.view(-1).view(torch.uint8)[:16]

    def floor(loads: int) -> Callable[[], object]:
        return lambda: _core.bench_read(read, target, loads)

    return {str(loads): floor(loads) for loads in _LOADS}
