"""What the CUDA driver says about graphs and contexts, and a producer kernel that writes late."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

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


# Written out in PTX, so that nothing but the driver is needed.
_LATE_COPY = b"""
.version 8.0
.target sm_90
.address_size 64

.visible .entry late_copy(.param .u64 source, .param .u64 target, .param .u32 words)
{
    .reg .pred %go;
    .reg .b32 %i, %step, %count, %block, %width, %thread, %left, %word;
    .reg .b64 %from, %to, %offset;

    griddepcontrol.launch_dependents;
    mov.u32 %left, 100;
sleep:
    nanosleep.u32 1000;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %go, %left, 0;
    @%go bra sleep;

    ld.param.u64 %from, [source];
    ld.param.u64 %to, [target];
    ld.param.u32 %count, [words];
    cvta.to.global.u64 %from, %from;
    cvta.to.global.u64 %to, %to;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %i, %block, %width, %thread;
    mov.u32 %step, %nctaid.x;
    mul.lo.u32 %step, %step, %width;
copy:
    setp.ge.u32 %go, %i, %count;
    @%go ret;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %offset, %offset, %from;
    ld.global.u32 %word, [%offset];
    sub.u64 %offset, %offset, %from;
    add.u64 %offset, %offset, %to;
    st.global.u32 [%offset], %word;
    add.u32 %i, %i, %step;
    bra copy;
}
"""


def load_late_copy() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A copy kernel that lets its dependents start at once and writes about 100 us later."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.current_stream().synchronize()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), _LATE_COPY))
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, b"late_copy"))

    def late_copy(source: torch.Tensor, target: torch.Tensor) -> None:
        values = (
            ctypes.c_uint64(source.data_ptr()),
            ctypes.c_uint64(target.data_ptr()),
            ctypes.c_uint32(source.numel() * source.element_size() // 4),
        )
        parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(_driver().cuLaunchKernel(function, 16, 1, 1, 256, 1, 1, 0, stream, parameters, None))

    return late_copy


_RECIPROCALS = b"""
.version 8.0
.target sm_90
.address_size 64

.visible .entry reciprocals(.param .u64 target, .param .u32 first)
{
    .reg .b32 %i, %block, %width, %thread, %first, %bits;
    .reg .f32 %x, %y;
    .reg .b64 %to, %offset;

    ld.param.u64 %to, [target];
    ld.param.u32 %first, [first];
    cvta.to.global.u64 %to, %to;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %i, %block, %width, %thread;
    add.u32 %bits, %first, %i;
    mov.b32 %x, %bits;
    rcp.approx.ftz.f32 %y, %x;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %to, %to, %offset;
    st.global.f32 [%to], %y;
    ret;
}
"""


def reciprocals(first: int, count: int) -> torch.Tensor:
    """``rcp.approx.ftz.f32`` of ``count`` (a multiple of 256) fp32 patterns from ``first`` on, as int32."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    out = torch.empty(count, dtype=torch.int32, device="cuda")
    _check(_driver().cuModuleLoadData(ctypes.byref(module), _RECIPROCALS))
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, b"reciprocals"))
    values = (ctypes.c_uint64(out.data_ptr()), ctypes.c_uint32(first))
    parameters = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _check(_driver().cuLaunchKernel(function, count // 256, 1, 1, 256, 1, 1, 0, stream, parameters, None))
    torch.cuda.synchronize()
    return out
