"""The ops, one module per stem, and the question whether an op runs on a device.

What an op needs from torch beyond its own module lives here: output allocation and the registration helper.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from vllm_hotpath import _core
from vllm_hotpath._registry import OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Public op name -> stem: the names of its module here, its folder in src/ops and its file in kernels.
STEMS = {op: stem for stem, ops in OPS.items() for op in ops}


class Support(NamedTuple):
    """Whether an op runs on a device. True in a boolean context when it does."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def is_supported(op: str, device: torch.device | str | int | None = None, **sizes: int) -> Support:
    """Say whether ``op`` runs on ``device``, without running it. For a CUDA device, initialises CUDA.

    Args:
        op: public name of the op, such as ``"mla_kv_concat"``.
        device: a torch device, its name or a CUDA index; None is the current CUDA device, or the CPU
            where there is no CUDA.
        sizes: of the call, for ops that have limits: ``moe_router`` takes ``tokens``, ``experts``, ``top_k``
            and ``n_group``, ``moe_fp4_preamble`` the ``tokens`` and ``experts`` of a call with a gate (other
            calls of it take any number of tokens).

    Returns:
        ``Support(ok, reason)``; ``reason`` is empty when the op runs there.

    Raises:
        ValueError: ``op`` is not an op of this package.
        TypeError: ``op`` has no limit on one of ``sizes``.
    """
    if op not in STEMS:
        raise ValueError(f"is_supported: op: expected one of {', '.join(sorted(STEMS))}, got {op!r}")
    limits = _LIMITS.get(op, {})
    for name, size in sizes.items():
        if name not in limits:
            known = ", ".join(limits) or "no sizes"
            raise TypeError(f"is_supported: {name}: {op} has limits on {known}")
        low, high = limits[name]
        if not low <= size <= high:
            return Support(False, f"{op}: {name}: expected {low} to {high}, got {size}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # torch.device keeps an index in 8 bits, so a number is taken as it is.
    kind, _, number = ("cuda", "", str(device)) if isinstance(device, int) else str(device).partition(":")
    if kind == "cpu":
        return Support(True, "")
    if kind != "cuda":
        return Support(False, f"{op} has kernels for CUDA and CPU devices, not for {kind}")
    index = int(number) if number else torch.cuda.current_device() if torch.cuda.is_available() else 0
    if not 0 <= index < 2**31:
        return Support(False, f"there is no cuda:{index}")
    reason = _core.unsupported_reason(op, index)
    return Support(reason is None, reason or "")


_LIMITS: dict[str, dict[str, tuple[int, int]]] = {}


def limit(op: str, **sizes: tuple[int, int]) -> None:
    """Say which sizes, from the least to the largest, a call of ``op`` may have."""
    _LIMITS[op] = sizes


_device = cache(torch.device)


def allocate(device: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Make an uninitialised contiguous output. ``device`` and ``dtype`` are torch's names of them."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device=_device(device))


# A reload of this module keeps the library, and the ops with it.
_LIBRARY: torch.library.Library = globals().get("_LIBRARY") or torch.library.Library(
    "vllm_hotpath", "FRAGMENT"
)


def through_dispatcher(*arguments: object) -> bool:
    """Whether torch has to see a call: Dynamo compiles it, a mode or tracer records it, or an argument does.

    Eager calls otherwise go to the extension directly.
    """
    return bool(_is_compiling() or _modes() or _is_tracing() or _core.needs_dispatcher(*arguments))


_is_compiling = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing


TensorOrNone = TypeVar("TensorOrNone", torch.Tensor, torch.Tensor | None)


def plain(tensor: TensorOrNone) -> TensorOrNone:
    """The tensor as the extension reads it, below the dispatcher that has handled its type."""
    if tensor is None or not _core.needs_dispatcher(tensor):
        return tensor
    return tensor.as_subclass(torch.Tensor)


def register(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Register ``vllm_hotpath::<name><schema>`` for CPU and CUDA; a second registration changes nothing.

    The FX cache does not key on an op's schema: a changed schema needs a new op name.
    """
    packet = getattr(torch.ops.vllm_hotpath, name.split(".", maxsplit=1)[0], None)
    overload = name.partition(".")[2] or "default"
    if packet is not None and overload in packet.overloads():
        return
    # Exact strides: the ops read strided views, and a compiler that copied them first would undo the gain.
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _LIBRARY.impl(name, implementation, "CPU")
    _LIBRARY.impl(name, implementation, "CUDA")
    # No gradients, as in the eager call: results do not require grad even where an input does.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"vllm_hotpath::{name}", fake, lib=_LIBRARY)


# Importing this package registers every op.
for _stem in OPS:
    import_module(f"{__name__}.{_stem}")
