"""What ``kda_decode`` and ``kda_decode_spec`` must return and leave in their caches, in plain torch.

From the published recurrence.

Three steps, a function each: causal convolution with SiLU, gated delta rule, gated RMSNorm. ``decode`` runs
them in one floating-point type without rounding between them, as the contract has it; ``chain`` rounds after
each as separate kernels do that hand bf16 (or fp16) tensors to each other. Nothing is modified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    Tensors = torch.Tensor | Sequence[torch.Tensor]

TAPS = 4
L2_EPS = 1e-6


class Decoded(NamedTuple):
    """Results of the live rows, and of all rows where that is said."""

    rows: torch.Tensor
    """Numbers of the rows whose slot is live."""
    slots: torch.Tensor
    """Their slots."""
    out: torch.Tensor
    """``[B, H, D]`` of all rows, zero where the row is padding, not rounded to the activations' type."""
    conv: torch.Tensor
    """``[live, 3, H*D, 3]``: the convolution window afterwards, bits as they lay in x and cache."""
    state: torch.Tensor
    """``[live, H, V, K]``, not rounded to the state's type."""


def _thirds(tensors: Tensors, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """The q, k and v parts, of ``shape`` each, of one packed tensor (parts side by side) or of three."""
    if not isinstance(tensors, torch.Tensor):
        return [tensor.detach().reshape(shape) for tensor in tensors]
    return [part.reshape(shape) for part in tensors.detach().chunk(3, dim=1 if tensors.dim() > 1 else 0)]


def _taps(weight: Tensors, channels: int) -> list[torch.Tensor]:
    """Weights of q, k and v as ``[4, H*D]``."""
    if isinstance(weight, torch.Tensor):
        return list(weight.detach().unbind(0))
    return [part.detach().reshape(channels, TAPS).T for part in weight]


def convolve(
    window: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``silu(bias + window * weight[:3] + x * weight[3])`` for ``window [n, C, 3]`` and ``x [n, C]``."""
    taps = torch.cat([window, x.unsqueeze(-1)], dim=-1).to(dtype)
    c = (taps * weight.T.to(dtype)).sum(-1)
    if bias is not None:
        c = c + bias.detach().to(dtype)
    return c * torch.sigmoid(c)


def decay(
    gate: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Factor in 0..1 of every key channel, ``[n, H, D]``; without ``a_log`` the gate is its logarithm."""
    if a_log is None or dt_bias is None:
        return torch.exp(gate.to(dtype))
    heads, width = gate.shape[1:]
    rate = torch.exp(a_log.detach().to(dtype)).view(heads, 1)
    shifted = gate.to(dtype) + dt_bias.detach().to(dtype).view(heads, width)
    if lower_bound is not None:
        return torch.exp(lower_bound * torch.sigmoid(rate * shifted))
    softplus = torch.where(shifted > 20, shifted, torch.log1p(torch.exp(shifted.clamp(max=20))))
    return torch.exp(-rate * softplus)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factor: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(o, new state)`` for q, k, v and factor ``[n, H, D]``, beta ``[n, H]`` and state ``[n, H, V, K]``."""
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + L2_EPS) * scale
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + L2_EPS)
    h = state * factor.unsqueeze(-2)
    predicted = torch.matmul(h, k.unsqueeze(-1)).squeeze(-1)
    h = h + ((v - predicted) * beta.unsqueeze(-1)).unsqueeze(-1) * k.unsqueeze(-2)
    return torch.matmul(h, q.unsqueeze(-1)).squeeze(-1), h


def gated_norm(o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """``o / rms(o) * weight * sigmoid(gate)`` over the last dimension."""
    dtype = o.dtype
    normed = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + eps)
    return normed * weight.detach().to(dtype) * torch.sigmoid(gate.to(dtype))


def _decode(
    x: Tensors,
    conv_weight: Tensors,
    conv_state: Tensors,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    dtype: torch.dtype,
    rounded: bool,
    conv_bias: Tensors | None = None,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    null_index: int = 0,
    gate_is_log_decay: bool = False,
    beta_is_sigmoid: bool = False,
) -> Decoded:
    heads, values, width = state.shape[1:]
    channels = heads * width
    indices = state_indices.reshape(-1).long()
    batch = indices.numel()
    rows = (indices > null_index).nonzero().reshape(-1)
    slots = indices[rows]
    live = rows.numel()

    tokens = [part[rows] for part in _thirds(x, (batch, channels))]
    activation = tokens[0].dtype
    if isinstance(conv_state, torch.Tensor):
        windows = list(conv_state.detach()[slots][..., :3].unflatten(1, (3, channels)).unbind(1))
    else:
        windows = [part.detach()[slots][..., :3] for part in conv_state]
    biases = [None] * 3 if conv_bias is None else _thirds(conv_bias, (channels,))

    def handed_over(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(activation).to(dtype) if rounded else tensor

    mixed = [
        handed_over(convolve(window, token, weight, bias, dtype)).view(live, heads, width)
        for window, token, weight, bias in zip(
            windows, tokens, _taps(conv_weight, channels), biases, strict=True
        )
    ]
    conv = torch.stack(
        [
            torch.cat([window[..., 1:], token.unsqueeze(-1)], -1)
            for window, token in zip(windows, tokens, strict=True)
        ],
        dim=1,
    )

    gate = raw_gate.detach().reshape(batch, heads, width)[rows]
    factor = (
        decay(gate, None, None, None, dtype)
        if gate_is_log_decay
        else decay(gate, a_log, dt_bias, lower_bound, dtype)
    )
    beta = raw_beta.detach().reshape(batch, heads)[rows].to(dtype)
    beta = beta if beta_is_sigmoid else torch.sigmoid(beta)
    scale = width**-0.5 if scale is None else scale
    o, h = delta_rule(*mixed, factor, beta, state.detach()[slots].to(dtype), scale)
    if norm_weight is not None and output_gate is not None:
        gates = output_gate.detach().reshape(batch, heads, values)[rows]
        o = gated_norm(handed_over(o), norm_weight, gates, norm_eps)

    out = torch.zeros(batch, heads, values, dtype=dtype, device=state.device)
    out[rows] = handed_over(o)
    return Decoded(rows, slots, out, conv, h)


def decode(*arguments: object, dtype: torch.dtype = torch.float64, **options: object) -> Decoded:
    """The op's arguments, all but ``out``, evaluated in ``dtype`` without rounding between the steps."""
    return _decode(*arguments, dtype=dtype, rounded=False, **options)  # type: ignore[arg-type]


def chain(*arguments: object, dtype: torch.dtype = torch.float32, **options: object) -> Decoded:
    """As ``decode``, but q, k, v, o and out are rounded to the activations' type where kernels meet."""
    return _decode(*arguments, dtype=dtype, rounded=True, **options)  # type: ignore[arg-type]


class DecodedSpec(NamedTuple):
    """Results of ``decode_spec``: of slots, and of all tokens."""

    out: torch.Tensor
    """``[T, H, D]`` of all tokens, zero where the row is padding or there is none."""
    live: torch.Tensor
    """Whether a token's row is live, ``[T]``."""
    conv: dict[int, torch.Tensor]
    """Slot to ``[3, H*D, 2 + tokens]``: the columns afterwards, bits as they lay in cache and x."""
    state: dict[int, torch.Tensor]
    """Slot to ``[H, V, K]``, not rounded to the state's type."""


def decode_spec(
    x: Tensors,
    conv_weight: Tensors,
    conv_state: Tensors,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    conv_bias: Tensors | None = None,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    null_index: int = 0,
    gate_is_log_decay: bool = False,
    beta_is_sigmoid: bool = False,
) -> DecodedSpec:
    """Row by row and token by token: the steps above on a sliding window and the state as it comes."""
    heads, values, width = state.shape[1:]
    channels = heads * width
    tokens = x.shape[0] if isinstance(x, torch.Tensor) else x[0].shape[0]
    parts = _thirds(x, (tokens, channels))
    if isinstance(conv_state, torch.Tensor):
        pools = list(conv_state.detach().unflatten(1, (3, channels)).unbind(1))
    else:
        pools = [part.detach() for part in conv_state]
    weights = _taps(conv_weight, channels)
    biases = [None] * 3 if conv_bias is None else _thirds(conv_bias, (channels,))
    rates = (None, None, None) if gate_is_log_decay else (a_log, dt_bias, lower_bound)
    factors = decay(raw_gate.detach().reshape(tokens, heads, width), *rates, dtype)
    betas = raw_beta.detach().reshape(tokens, heads).to(dtype)
    betas = betas if beta_is_sigmoid else torch.sigmoid(betas)
    scale = width**-0.5 if scale is None else scale

    result = DecodedSpec(
        torch.zeros(tokens, heads, values, dtype=dtype, device=state.device),
        torch.zeros(tokens, dtype=torch.bool, device=state.device),
        {},
        {},
    )
    starts = query_start_loc.tolist()
    for begin, end, slots, accepted in zip(
        starts[:-1], starts[1:], state_indices.tolist(), num_accepted_tokens.tolist(), strict=True
    ):
        fits = 0 <= begin < end <= tokens and end - begin <= len(slots) and 1 <= accepted <= len(slots)
        if not fits or slots[0] <= null_index or slots[accepted - 1] <= null_index:
            continue
        result.live[begin:end] = True
        windows = [pool[slots[0], :, accepted - 1 : accepted + 2].unsqueeze(0) for pool in pools]
        seen = [part[begin:end].T for part in parts]
        result.conv[slots[0]] = torch.stack(
            [torch.cat([window[0, :, 1:], new], -1) for window, new in zip(windows, seen, strict=True)]
        )
        h = state.detach()[slots[accepted - 1]].to(dtype).unsqueeze(0)
        for position, token in enumerate(range(begin, end)):
            now = [part[token : token + 1] for part in parts]
            mixed = [
                convolve(window, new, weight, bias, dtype).view(1, heads, width)
                for window, new, weight, bias in zip(windows, now, weights, biases, strict=True)
            ]
            windows = [
                torch.cat([window[..., 1:], new.unsqueeze(-1)], -1)
                for window, new in zip(windows, now, strict=True)
            ]
            one = slice(token, token + 1)
            o, h = delta_rule(*mixed, factors[one], betas[one], h, scale)
            if norm_weight is not None and output_gate is not None:
                gates = output_gate.detach().reshape(tokens, heads, values)[one]
                o = gated_norm(o, norm_weight, gates, norm_eps)
            result.out[token] = o[0]
            if slots[position] > null_index:
                result.state[slots[position]] = h[0]
    return result
