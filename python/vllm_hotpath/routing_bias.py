"""The routing bias of a mixture of experts in the dtype that a kernel wants, cast once and not at every call.

FlashInfer's MoE kernels before 0.6.18 take the bias in bf16 only, and a cast in the layer is a launch a layer
and step. Newer ones take fp32, and there a cast would change the routing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of a bias and of its copies."""


class _Copy(NamedTuple):
    tensor: torch.Tensor
    version: tuple[int, int | None]


# bias -> dtype -> copy. The copies of a bias live as long as it does.
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def routing_bias(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``bias`` in ``dtype``: itself if it has it, else a copy that is made once.

    The copy keeps its address, so that CUDA graphs which read it see a refresh. It is renewed when torch
    knows that the bias has changed; for changes behind torch's back (``.data.copy_()``, kernels) there is
    :func:`refresh_routing_bias`. Making or renewing a copy waits for the current stream, so that calls on
    other streams find it ready; inside a stream capture nothing is kept, and a bias without a copy is cast in
    the graph.

    Args:
        bias: bf16, fp16 or fp32, any shape, on the CPU or a CUDA device.
        dtype: bf16, fp16 or fp32; rounded to nearest even.

    Raises:
        TypeError: another dtype.
    """
    for name, given in (("routing_bias", bias.dtype), ("bias_dtype", dtype)):
        if given not in DTYPES:
            raise TypeError(
                f"routing_bias: {name}: expected dtype bfloat16 or float16 or float32, got {given}"
            )
    if bias.dtype == dtype:
        return bias
    copies: dict[torch.dtype, _Copy] | None = _copies.get(bias)
    known = copies.get(dtype) if copies else None
    version = _version(bias)
    if known is not None and known.version == version:
        return known.tensor
    if bias.is_cuda and torch.cuda.is_current_stream_capturing():
        return bias.detach().to(dtype)
    return _fill(bias, dtype, known, version)


def refresh_routing_bias(bias: torch.Tensor | None = None) -> None:
    """Renew the copies of ``bias``, of every bias for None, in place. For after a reload of weights."""
    for known, copies in list(_copies.items()):
        if bias is None or known is bias:
            for dtype, copy in list(copies.items()):
                _fill(known, dtype, copy, _version(known))


def _version(bias: torch.Tensor) -> tuple[int, int | None]:
    # Inference tensors count no versions.
    return bias.data_ptr(), None if bias.is_inference() else bias._version


def _fill(
    bias: torch.Tensor, dtype: torch.dtype, known: _Copy | None, version: tuple[int, int | None]
) -> torch.Tensor:
    # Under inference mode a new copy could not be renewed outside of it.
    with torch.inference_mode(False), torch.no_grad():
        if known is not None and (known.tensor.shape, known.tensor.device) == (bias.shape, bias.device):
            copy = known.tensor
        else:
            copy = torch.empty(bias.shape, dtype=dtype, device=bias.device)
        copy.copy_(bias)
        if copy.is_cuda:
            torch.cuda.current_stream(copy.device).synchronize()
    _copies.setdefault(bias, {})[dtype] = _Copy(copy, version)
    return copy
