"""The routing bias of a mixture of experts in the dtype that a kernel wants, cast once and not at every call.

FlashInfer's MoE kernels before 0.6.18 take the bias in bf16 only, and a cast in the layer is a launch a layer
and step. Newer ones take fp32, and there a cast would change the routing.

To make or to renew a copy waits for the current stream, which no op does otherwise: every later call then
finds it ready, on any stream.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of a bias and of its copies."""


class _Copy(NamedTuple):
    tensor: torch.Tensor
    version: tuple[object, ...]


# bias -> dtype -> copy. The copies of a bias live as long as it does. Written under the lock only.
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class _Writing:
    lock = threading.Lock()


# Another thread may hold it when the process forks.
os.register_at_fork(after_in_child=lambda: setattr(_Writing, "lock", threading.Lock()))


def cast_once(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``bias`` in ``dtype``: itself if it has it, else a copy that is made once.

    The copy keeps its address, so that CUDA graphs which read it see a refresh. It is renewed when torch
    knows that the bias has changed. For changes behind torch's back (``.data.copy_()``, kernels, anything in
    place to a tensor of inference mode, which counts no versions) there is :func:`refresh_routing_bias`.
    Making or renewing a copy waits for the current stream. Inside a stream capture nothing is made or
    renewed: a bias without a copy, or with one that is out of date, is cast in the graph.

    Args:
        bias: bf16, fp16 or fp32, any shape, on the CPU or a CUDA device.
        dtype: one of ``DTYPES``; rounded to nearest even.
    """
    if bias.dtype == dtype:
        return bias
    known, version = _known(bias, dtype), _version(bias)
    if known is not None and known.version == version:
        return known.tensor
    if _is_capturing(bias.device):
        return bias.detach().to(dtype)
    with _Writing.lock:
        # Another thread may have made it in the meantime.
        known = _known(bias, dtype)
        if known is None or known.version != version:
            known = _fill(bias, dtype, known)
            _wait(bias.device)
        return known.tensor


def refresh_routing_bias(bias: torch.Tensor | None = None) -> None:
    """Renew the kept casts of routing biases, in place: after a reload of weights, in every worker process.

    Waits for the current stream of each device that has such a cast.

    Args:
        bias: the very tensor that was given to ``moe_fp4_preamble`` as ``routing_bias``; a view of it, or its
            ``.data``, is another tensor. One without a kept cast is left alone. None renews all.

    Raises:
        TypeError: ``bias`` is no tensor.
        RuntimeError: the current stream is being captured into a CUDA graph, and nothing is renewed; or a
            bias could not be read, and all others are renewed.
    """
    if bias is not None and not isinstance(bias, torch.Tensor):
        raise TypeError(f"refresh_routing_bias: bias: expected a tensor or None, got {type(bias).__name__}")
    with _Writing.lock:
        found = [(known, copies) for known, copies in _copies.items() if bias is None or known is bias]
        devices = {known.device for known, _ in found}
        if any(map(_is_capturing, devices)):
            raise RuntimeError("refresh_routing_bias: the current stream is being captured into a CUDA graph")
        errors = [error for known, copies in found if (error := _refill(known, copies)) is not None]
        for device in devices:
            _wait(device)
    # One bias whose memory is gone is no reason to leave the others as they were.
    if errors:
        raise RuntimeError(f"refresh_routing_bias: bias: {errors[0]}") from errors[0]


def _known(bias: torch.Tensor, dtype: torch.dtype) -> _Copy | None:
    copies: dict[torch.dtype, _Copy] | None = _copies.get(bias)
    return copies.get(dtype) if copies else None


def _version(bias: torch.Tensor) -> tuple[object, ...]:
    """What changes when torch gives a tensor other contents, other memory or another view of it."""
    count = None if bias.is_inference() else bias._version
    return count, bias.data_ptr(), bias.dtype, tuple(bias.shape), bias.stride()


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _fill(bias: torch.Tensor, dtype: torch.dtype, known: _Copy | None) -> _Copy:
    version = _version(bias)
    # Under inference mode a new copy could not be renewed outside of it.
    with torch.inference_mode(False), torch.no_grad():
        if known is not None and (known.tensor.shape, known.tensor.device) == (bias.shape, bias.device):
            copy = known.tensor
        else:
            copy = torch.empty(bias.shape, dtype=dtype, device=bias.device)
        copy.copy_(bias)
    made = _Copy(copy, version)
    _copies.setdefault(bias, {})[dtype] = made
    return made


def _refill(bias: torch.Tensor, copies: dict[torch.dtype, _Copy]) -> RuntimeError | None:
    try:
        for dtype, copy in list(copies.items()):
            _fill(bias, dtype, copy)
    except RuntimeError as error:
        return error
    return None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
