"""The compiled extension: argument checks, CPU implementations and CUDA launches. Not a public interface."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Allocate: TypeAlias = Callable[[str, Sequence[int], str], Any]
"""``allocate(device, shape, dtype)`` makes an uninitialised contiguous tensor; both names are torch's."""

def build_info() -> dict[str, Any]:
    """Version, kernel targets and kernel names of this build, and the nvcc that made them."""

def cuda_info() -> dict[str, Any]:
    """Driver version and devices; ``error`` says why there is none. Initialises CUDA."""

def exchange_api_version(type_: type) -> tuple[int, int] | None:
    """DLPack version of the C exchange table of a tensor type, None without one."""

def unsupported_reason(op: str, device_index: int) -> str | None:
    """Why ``op`` has no CUDA kernel for that device, None when it has one. Initialises CUDA."""

def needs_dispatcher(tensor: object) -> bool:
    """Whether ``tensor`` is a torch.Tensor subclass with its own ``__torch_dispatch__`` (FakeTensor and the like)."""

def borrow_tensors(*tensors: object) -> int:
    """Read every argument as an op would, and return how many there were. For the call-overhead benchmark."""

def mla_kv_concat(k_nope: object, k_pe: object, out: object | None, allocate: Allocate) -> Any: ...
def mla_kv_concat_quant_fp8(
    k_nope: object,
    k_pe: object,
    v: object,
    k_scale: object | None,
    v_scale: object | None,
    k_out: object | None,
    v_out: object | None,
    v_pad_to: int | None,
    allocate: Allocate,
) -> tuple[Any, Any]: ...
def bench_stream(src: object, dst: object) -> None:
    """Read all bytes of ``src`` and write all bytes of ``dst`` (both contiguous uint8), the traffic floor of the benchmarks."""

def fatbin(stem: str) -> bytes:
    """The embedded fatbin of ``kernels/<stem>.cu``, for the machine-code test."""
