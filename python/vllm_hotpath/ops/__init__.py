"""The ops, one module per stem, and the question whether an op runs on a device.

What an op needs from torch beyond its own module lives here: output allocation and the registration helper.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

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


def is_supported(op: str, device: torch.device | str | int | None = None) -> Support:
    """Say whether ``op`` runs on ``device``, without running it.

    Args:
        op: public name of the op, such as ``"mla_kv_concat"``.
        device: a torch device, its name or a CUDA index; None is the current CUDA device, or the CPU
            where there is no CUDA.

    Returns:
        ``Support(ok, reason)``; ``reason`` is empty when the op runs there.

    Raises:
        ValueError: ``op`` is not an op of this package.
    """
    if op not in STEMS:
        raise ValueError(f"is_supported: op: expected one of {', '.join(sorted(STEMS))}, got {op!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if where.type == "cpu":
        return Support(True, "")
    if where.type != "cuda":
        return Support(False, f"{op} has kernels for CUDA and CPU devices, not for {where.type}")
    index = (
        torch.cuda.current_device() if where.index is None and torch.cuda.is_available() else where.index or 0
    )
    reason = _core.unsupported_reason(op, index)
    return Support(reason is None, reason or "")


_device = cache(torch.device)


def allocate(device: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Make an uninitialised contiguous output. ``device`` and ``dtype`` are torch's names of them."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device=_device(device))


_LIBRARY = torch.library.Library("vllm_hotpath", "FRAGMENT")


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
