"""Kimi Delta Attention decode: convolution, gates, delta-rule state update and gated RMSNorm in one launch.

The public functions and their torch ops. Checks and kernels live in ``src/ops/kda_decode``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_hotpath import _core
from vllm_hotpath.ops import allocate, plain, register, through_dispatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    Tensors = torch.Tensor | Sequence[torch.Tensor]


def kda_decode(
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
    conv_bias: Tensors | None = None,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    null_index: int = 0,
    gate_is_log_decay: bool = False,
    beta_is_sigmoid: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token per row of Kimi Delta Attention (Kimi Linear, arXiv:2510.26692), in place on the caches.

    For each row with a live slot, each of ``H`` heads of ``D = 128``, in fp32 without rounding in between::

        q, k, v = silu(bias + s0 * w0 + s1 * w1 + s2 * w2 + x * w3)    # causal convolution; s becomes
            [s1, s2, x]
        q = q * rsqrt(sum(q * q) + 1e-6) * scale;  k = k * rsqrt(sum(k * k) + 1e-6)
        decay = exp(lower_bound * sigmoid(exp(a_log) * (gate + dt_bias)))
                or, without lower_bound, exp(-exp(a_log) * softplus(gate + dt_bias))
        h = state * decay;  h += k * ((v - h.k) * sigmoid(beta));  state = h;  o = h.q
        out = o * rsqrt(mean(o * o) + norm_eps) * norm_weight * sigmoid(output_gate)
        out = o, without a norm

    Activations below are all bf16 or all fp16. ``B`` is the number of rows, ``slots`` that of the pools.

    Args:
        x: ``[B, 3*H*D]``, q, k and v side by side, or three tensors ``[B, H*D]``. Row stride free, channel
            stride 1, any alignment.
        conv_weight: fp32 ``[3, 4, H*D]``, tap-major, contiguous; or three contiguous tensors
            ``[H*D, 1, 4]`` or ``[H*D, 4]``, fp32 or of the activations' dtype.
        conv_state: ``[slots, 3*H*D, W]`` with ``W >= 3``, of which the first three columns are used; or
            three tensors ``[slots, H*D, W]`` of equal inner strides. Slot stride free; base and slot stride
            are multiples of 16 bytes. The inner strides are read at the call, so both of vLLM's layouts
            work: SD ``(1, 3*H*D)`` and DS ``(W, 1)``. Updated in place.
        raw_gate: ``[B, H, D]`` or ``[1, B, H, D]``, activations' dtype or fp32. Row stride free, inner
            contiguous.
        raw_beta: ``[B, H]`` or ``[1, B, H]``, activations' dtype or fp32. Row stride free, head stride 1.
        a_log: fp32, ``H`` elements, contiguous. None with ``gate_is_log_decay``.
        dt_bias: fp32, ``H*D`` elements, contiguous. None with ``gate_is_log_decay``.
        state: ``[slots, H, V, K]`` with ``V = K = 128``, fp32, bf16 or fp16. Slot stride free (it may
            share pages with ``conv_state``), inner contiguous; base and slot stride multiples of 16
            bytes. Updated in place, rounded to nearest even.
        state_indices: ``[B]`` or ``[B, 1]``, int32 or int64, any stride. The slot of each row; live rows
            have distinct slots.
        conv_bias: ``3*H*D`` elements, or three of ``H*D``, dtype of ``conv_weight``, contiguous.
        lower_bound: bounds the log decay from below; None is the unbounded form.
        output_gate: ``[B, H, D]``, activations' dtype, row stride free, inner contiguous. With
            ``norm_weight``.
        norm_weight: fp32 ``[D]``, contiguous. With ``output_gate``; without both, o itself is stored.
        norm_eps: added to the mean of squares.
        scale: of q; None is ``D**-0.5``.
        null_index: rows whose index is not above it are padding: their output is +0.0 and no cache byte
            is read or written. 0 for vLLM's pools, -1 where slot 0 is real.
        gate_is_log_decay: ``raw_gate`` is the log decay: ``decay = exp(raw_gate)``.
        beta_is_sigmoid: ``raw_beta`` is in (0, 1) already.
        out: ``[B, H, D]`` or ``[1, B, H, D]``, activations' dtype, row stride free. None allocates ``[B,
            H, D]``.

    Returns:
        ``out``. Without rows nothing is launched.

    Raises:
        TypeError: a dtype that is not supported, or not the one required.
        ValueError: a shape, stride, alignment, device, overlap or combination of options that is not
            supported.
        RuntimeError: CUDA refused the launch, or this build has no kernel for the GPU.
    """
    # Lists of tensors are not looked into: one that torch has to see comes with others that are.
    if through_dispatcher(state, state_indices, raw_gate, raw_beta, x, conv_state):
        xs, weights, states, biases = _list(x), _list(conv_weight), _list(conv_state), _list(conv_bias)
        result = out
        if result is None:
            result = xs[0].new_empty((state_indices.shape[0], *state.shape[1:3]))
        torch.ops.vllm_hotpath.kda_decode(
            xs,
            weights,
            states,
            raw_gate,
            raw_beta,
            a_log,
            dt_bias,
            state,
            state_indices,
            result,
            biases,
            lower_bound,
            output_gate,
            norm_weight,
            norm_eps,
            scale,
            null_index,
            gate_is_log_decay,
            beta_is_sigmoid,
        )
        return result
    made: torch.Tensor = _core.kda_decode(
        x,
        conv_weight,
        conv_state,
        raw_gate,
        raw_beta,
        a_log,
        dt_bias,
        state,
        state_indices,
        None,
        conv_bias,
        lower_bound,
        output_gate,
        norm_weight,
        norm_eps,
        scale,
        null_index,
        gate_is_log_decay,
        beta_is_sigmoid,
        out,
        allocate,
    )
    return made


def kda_decode_spec(
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
    conv_bias: Tensors | None = None,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    null_index: int = 0,
    gate_is_log_decay: bool = False,
    beta_is_sigmoid: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Several tokens per row of Kimi Delta Attention, as speculative decoding verifies them.

    Row ``n`` has the tokens ``query_start_loc[n]`` to ``query_start_loc[n + 1] - 1`` of x, gates, beta and
    out, each of which goes through the steps of :func:`kda_decode`, one after the other. Its state is read
    once, from slot ``state_indices[n, num_accepted_tokens[n] - 1]``, stays in fp32 between its tokens and is
    stored behind token ``j`` to slot ``state_indices[n, j]``, or nowhere where that index is null.

    The convolution state is that of slot ``state_indices[n, 0]``. With ``a`` accepted tokens, the first token
    meets its columns ``a - 1`` to ``a + 1``; afterwards it is ``[s[a], s[a + 1], x of the row's tokens]`` and
    whatever was in the columns behind. This is what vLLM 0.33.0's ``causal_conv1d_update`` leaves.

    Padding: a row without tokens does nothing. A row is padding too where ``num_accepted_tokens[n]`` is not
    1 to ``S``, its first slot or the one it starts from is null, it has more than ``S`` tokens, or tokens
    that x does not have: outputs of its tokens are +0.0, and no cache byte is read or written. Tokens that no
    row has get +0.0 as well.

    ``T`` is the number of tokens, ``N`` that of rows, ``S`` the most tokens of a row, 1 to 8. One token a row
    with one accepted token gives the bits of :func:`kda_decode`.

    Args:
        x: as in :func:`kda_decode`, with ``T`` rows.
        conv_weight: as in :func:`kda_decode`.
        conv_state: as in :func:`kda_decode` with ``W >= S + 2``.
        raw_gate: ``[T, H, D]``.
        raw_beta: ``[T, H]``.
        a_log: as in :func:`kda_decode`.
        dt_bias: as in :func:`kda_decode`.
        state: as in :func:`kda_decode`.
        state_indices: ``[N, S]``, int32 or int64, any strides. No slot of a live row is another's.
        query_start_loc: ``[N + 1]``, int32 or int64, any stride, from 0 and not descending.
        num_accepted_tokens: ``[N]``, int32 or int64, any stride.
        conv_bias: as in :func:`kda_decode`, and so are the options that follow.
        lower_bound: see there.
        output_gate: ``[T, H, D]``.
        norm_weight: see there.
        norm_eps: see there.
        scale: see there.
        null_index: slots not above it are null.
        gate_is_log_decay: see there.
        beta_is_sigmoid: see there.
        out: ``[T, H, D]`` or ``[1, T, H, D]``. None allocates ``[T, H, D]``.

    Returns:
        ``out``. Without rows nothing is launched, and there may be no tokens.

    Raises:
        TypeError: a dtype that is not supported, or not the one required.
        ValueError: a shape, stride, alignment, device, overlap or combination of options that is not
            supported.
        RuntimeError: CUDA refused the launch, or this build has no kernel for the GPU.
    """
    if through_dispatcher(state, state_indices, query_start_loc, raw_gate, raw_beta, x, conv_state):
        xs, weights, states, biases = _list(x), _list(conv_weight), _list(conv_state), _list(conv_bias)
        result = out
        if result is None:
            result = xs[0].new_empty((xs[0].shape[0], *state.shape[1:3]))
        torch.ops.vllm_hotpath.kda_decode_spec(
            xs,
            weights,
            states,
            raw_gate,
            raw_beta,
            a_log,
            dt_bias,
            state,
            state_indices,
            query_start_loc,
            num_accepted_tokens,
            result,
            biases,
            lower_bound,
            output_gate,
            norm_weight,
            norm_eps,
            scale,
            null_index,
            gate_is_log_decay,
            beta_is_sigmoid,
        )
        return result
    made: torch.Tensor = _core.kda_decode(
        x,
        conv_weight,
        conv_state,
        raw_gate,
        raw_beta,
        a_log,
        dt_bias,
        state,
        state_indices,
        (query_start_loc, num_accepted_tokens),
        conv_bias,
        lower_bound,
        output_gate,
        norm_weight,
        norm_eps,
        scale,
        null_index,
        gate_is_log_decay,
        beta_is_sigmoid,
        out,
        allocate,
    )
    return made


def _list(tensors: Tensors | None) -> list[torch.Tensor]:
    if tensors is None:
        return []
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _one_or_three(tensors: list[torch.Tensor]) -> Tensors | None:
    if not tensors:
        return None
    return plain(tensors[0]) if len(tensors) == 1 else [plain(tensor) for tensor in tensors]


def _launch(
    spec: tuple[torch.Tensor, torch.Tensor] | None,
    x: list[torch.Tensor],
    conv_weight: list[torch.Tensor],
    conv_state: list[torch.Tensor],
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    out: torch.Tensor,
    conv_bias: list[torch.Tensor],
    lower_bound: float | None,
    output_gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    scale: float | None,
    null_index: int,
    gate_is_log_decay: bool,
    beta_is_sigmoid: bool,
) -> None:
    _core.kda_decode(
        _one_or_three(x),
        _one_or_three(conv_weight),
        _one_or_three(conv_state),
        plain(raw_gate),
        plain(raw_beta),
        plain(a_log),
        plain(dt_bias),
        plain(state),
        plain(state_indices),
        spec,
        _one_or_three(conv_bias),
        lower_bound,
        plain(output_gate),
        plain(norm_weight),
        norm_eps,
        scale,
        null_index,
        gate_is_log_decay,
        beta_is_sigmoid,
        plain(out),
        allocate,
    )


def _kda_decode(*arguments: Any) -> None:
    _launch(None, *arguments)


def _kda_decode_spec(*arguments: Any) -> None:
    query_start_loc, num_accepted_tokens = arguments[9:11]
    spec = (plain(query_start_loc), plain(num_accepted_tokens))
    _launch(spec, *arguments[:9], *arguments[11:])


def _fake_kda_decode(*arguments: object) -> None:
    pass


register(
    "kda_decode",
    "(Tensor[] x, Tensor[] conv_weight, Tensor(a!)[] conv_state, Tensor raw_gate, Tensor raw_beta, "
    "Tensor? a_log, Tensor? dt_bias, Tensor(b!) state, Tensor state_indices, Tensor(c!) out, "
    "Tensor[] conv_bias, float? lower_bound, Tensor? output_gate, Tensor? norm_weight, float norm_eps, "
    "float? scale, int null_index, bool gate_is_log_decay, bool beta_is_sigmoid) -> ()",
    _kda_decode,
    _fake_kda_decode,
)

register(
    "kda_decode_spec",
    "(Tensor[] x, Tensor[] conv_weight, Tensor(a!)[] conv_state, Tensor raw_gate, Tensor raw_beta, "
    "Tensor? a_log, Tensor? dt_bias, Tensor(b!) state, Tensor state_indices, Tensor query_start_loc, "
    "Tensor num_accepted_tokens, Tensor(c!) out, "
    "Tensor[] conv_bias, float? lower_bound, Tensor? output_gate, Tensor? norm_weight, float norm_eps, "
    "float? scale, int null_index, bool gate_is_log_decay, bool beta_is_sigmoid) -> ()",
    _kda_decode_spec,
    _fake_kda_decode,
)
