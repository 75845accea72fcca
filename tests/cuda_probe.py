"""What the CUDA driver itself says: nodes of a captured graph, the current context; and a slow producer kernel."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

KERNEL_NODE = 0


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int) -> None:
    assert code == 0, f"CUDA driver error {code}"


def node_types(graph: torch.cuda.CUDAGraph) -> list[int]:
    """Node types (CUgraphNodeType) of a graph captured with ``keep_graph=True``."""
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _check(_driver().cuGraphGetNodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        _check(_driver().cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
    types = []
    for node in nodes:
        kind = ctypes.c_int()
        _check(_driver().cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        types.append(kind.value)
    return types


def current_context() -> int | None:
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    return context.value


_PRODUCER = r"""
extern "C" __global__ void late_copy(const int* from, int* to, int words) {
    asm volatile("griddepcontrol.launch_dependents;");
    for (int i = 0; i < 100; ++i) __nanosleep(1000);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""


def compile_late_copy() -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """A copy that lets its dependents start first and writes 100 us later; None where torch cannot compile it."""
    compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        return None
    kernel = compile_kernel(_PRODUCER, "late_copy")

    def late_copy(source: torch.Tensor, destination: torch.Tensor) -> None:
        words = source.numel() * source.element_size() // 4
        kernel(grid=(16, 1, 1), block=(256, 1, 1), args=[source, destination, words])

    return late_copy
