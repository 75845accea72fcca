"""The compiled extension: argument checks, CPU implementations and CUDA launches. Not a public interface."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

__all__ = [
    "SideStream",
    "add_rms_norm_nvfp4",
    "approximate_reciprocals",
    "bench_launch",
    "bench_read",
    "bench_rmw",
    "bench_stream",
    "borrow_tensors",
    "build_info",
    "cuda_info",
    "exchange_api_version",
    "fatbin",
    "kda_decode",
    "mla_kv_concat",
    "mla_kv_concat_quant_fp8",
    "moe_fp4_preamble",
    "moe_router",
    "needs_dispatcher",
    "nvfp4_quantize",
    "silu_mul_nvfp4",
    "unsupported_reason",
]

def build_info() -> dict[str, Any]:
    """Version, kernel targets and kernel names of this build, and the nvcc that made them."""

def cuda_info() -> dict[str, Any]:
    """Driver version and devices; ``error`` says why there is none. Initialises CUDA."""

def exchange_api_version(type_: type) -> tuple[int, int] | None:
    """DLPack version of the C exchange table of a tensor type, None without one."""

def unsupported_reason(op: str, device_index: int) -> str | None:
    """Why ``op`` has no CUDA kernel for that device, None when it has one. Initialises CUDA."""

def needs_dispatcher(*objects: object) -> bool:
    """Whether the type of one of them has its own ``__torch_dispatch__``, as FakeTensor has."""

def borrow_tensors(*tensors: object) -> int:
    """Read every argument as an op would, and return how many there were. For the call-overhead benchmark."""

def bench_stream(src: object, dst: object, /) -> None:
    """Read all of ``src`` and write all of ``dst``, contiguous uint8: the traffic floor of the benchmarks."""

def bench_launch(src: object, dst: object, launches: int, /) -> float:
    """Host nanoseconds of one ``bench_stream`` launch without Python, over ``launches`` in a row."""

def bench_read(src: object, sink: object, loads: int, /) -> None:
    """Read all of ``src`` with 1, 2, 4 or 8 16-byte loads a thread and write nothing, contiguous uint8.

    The traffic floor of ops that read far more than they write. ``sink`` has at least 16 bytes.
    """

def bench_rmw(
    pool: object, offset: int, stride: int, tiles: int, tile_bytes: int, split: int, order: object | None, /
) -> None:
    """Read and rewrite ``tiles`` stretches of ``tile_bytes`` in a contiguous uint8 ``pool``.

    Tile i starts ``offset + i * stride`` bytes into the pool; 1 to 16 thread blocks (``split``, a power
    of two) share 64 KiB. ``order``, int32 ``[tiles, places]``, says which stretch each tile reads and, from
    its second column on, to which it writes instead of rewriting that one; None is the order of memory. The
    traffic floor of ops that update a state in place.
    """

@final
class SideStream:
    """The auxiliary stream of a device, made at its first use in the process, and ``SLOTS`` event pairs."""

    SLOTS: ClassVar[int]

    def __new__(cls, device_index: int) -> SideStream: ...
    @property
    def handle(self) -> int:
        """The driver's handle."""

    @property
    def open(self) -> int:
        """Forks of all threads that wait for their join."""

    def fork(self, main: int, slot: int, again: bool, /) -> bool:
        """Let the stream go on from where ``main`` is now; ``again`` without a join since the last time.

        False where the two must not meet: nothing was done.
        """

    def mark(self, slot: int, /) -> None:
        """Mark the end of a slot's work."""

    def join(self, main: int, slot: int, /) -> None:
        """Let ``main`` wait for the mark."""

    def close(self) -> None:
        """Count a fork as joined that cannot be."""

def approximate_reciprocals() -> bytes:
    """The CPU's ``rcp.approx.ftz.f32`` of 1 to 2 in steps of 2^-23, fp32. For the tests."""

def fatbin(stem: str) -> bytes:
    """The embedded fatbin of ``kernels/<stem>.cu``, for the machine-code test."""

# An op's last argument, ``allocate(device, shape, dtype)``, makes an uninitialised contiguous tensor where
# no output is given; ``device`` and ``dtype`` are torch's names.

def mla_kv_concat(
    k_nope: object, k_pe: object, out: object | None, allocate: Callable[[str, Sequence[int], str], Any], /
) -> Any: ...
def mla_kv_concat_quant_fp8(
    k_nope: object,
    k_pe: object,
    v: object,
    k_scale: object | None,
    v_scale: object | None,
    k_out: object | None,
    v_out: object | None,
    v_pad_to: int | None,
    allocate: Callable[[str, Sequence[int], str], Any],
    /,
) -> tuple[Any, Any]: ...
def kda_decode(
    x: object,
    conv_weight: object,
    conv_state: object,
    raw_gate: object,
    raw_beta: object,
    a_log: object | None,
    dt_bias: object | None,
    state: object,
    state_indices: object,
    spec: tuple[object, object] | None,
    conv_bias: object | None,
    lower_bound: float | None,
    output_gate: object | None,
    norm_weight: object | None,
    norm_eps: float,
    scale: float | None,
    null_index: int,
    gate_is_log_decay: bool,
    beta_is_sigmoid: bool,
    out: object | None,
    allocate: Callable[[str, Sequence[int], str], Any],
    /,
) -> Any: ...
def moe_fp4_preamble(
    hidden_states: object,
    global_scale: object,
    gate_weight: object | None,
    logits_dtype: str | None,
    routing_bias: object | None,
    layout: str,
    out: object | None,
    out_scale: object | None,
    out_logits: object | None,
    allocate: Callable[[str, Sequence[int], str], Any],
    /,
) -> tuple[Any, Any, Any | None]: ...
def moe_router(
    hidden_states: object,
    gate_weight: object,
    top_k: int,
    bias: object | None,
    n_group: int,
    topk_group: int,
    scoring: str,
    renormalize: bool,
    routed_scaling_factor: float,
    logits_dtype: str | None,
    out_logits: object | None,
    topk_weights: object | None,
    topk_ids: object | None,
    workspace: object | None,
    allocate: Callable[[str, Sequence[int], str], Any],
    /,
) -> tuple[Any, Any]: ...
def nvfp4_quantize(
    x: Any,
    global_scale: Any,
    layout: str,
    out: Any | None,
    out_scale: Any | None,
    allocate: Callable[[str, Sequence[int], str], Any],
    /,
) -> tuple[Any, Any]:
    """``ops.nvfp4_quant.nvfp4_quantize``; ``allocate(device, shape, dtype)`` makes missing outputs."""

def silu_mul_nvfp4(
    gate_up: Any,
    global_scale: Any,
    layout: str,
    mask_m: Any | None,
    out: Any | None,
    out_scale: Any | None,
    allocate: Callable[[str, Sequence[int], str], Any],
    /,
) -> tuple[Any, Any]:
    """``ops.nvfp4_quant.silu_mul_nvfp4``; ``allocate(device, shape, dtype)`` makes missing outputs."""

def add_rms_norm_nvfp4(
    x: Any,
    residual: Any,
    weight: Any,
    eps: float,
    global_scale: Any,
    layout: str,
    out: Any | None,
    out_scale: Any | None,
    out_norm: Any | None,
    second_scale: Any | None,
    second_layout: str,
    second_out: Any | None,
    second_out_scale: Any | None,
    allocate: Callable[[str, Sequence[int], str], Any],
    /,
) -> tuple[Any, ...]:
    """``ops.nvfp4_quant.add_rms_norm_nvfp4``; ``allocate(device, shape, dtype)`` makes missing outputs."""
