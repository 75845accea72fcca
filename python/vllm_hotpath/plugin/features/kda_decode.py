"""Decode of Kimi Delta Attention in one launch: Kimi-K3 and Kimi-Linear.

Kimi-K3 in 0.33.0 has a kernel of this kind: ours takes its place, and is chosen where that one is not built
for (any number of heads, bf16 and fp16 states). Rows that only pad the batch cost nothing, and index arrays
may be strided. Kimi-Linear decodes in steps: convolution, recurrence, copy and, in 0.33.0, norm become one.

Batches with prefill or speculative rows stay vLLM's. q, k, v and the output are not rounded to bf16 between
the steps, so Kimi-Linear's results differ from stock within those roundings.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from vllm_hotpath import envs
from vllm_hotpath.plugin.plan import Feature, Patch, Plan
from vllm_hotpath.plugin.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

NAME = "kda_decode"
_K3_KDA = "vllm.models.kimi_k3.nvidia.kda"

LINEAR = Target(
    module="vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
    names=("KimiGatedDeltaNetAttention._forward",),
    signatures=(
        "self, mixed_qkv, g1, g2, beta, core_attn_out",
        "self, q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out",
    ),
    hashes={"9adbf39aaab07ba5": "0.33.0", "afef250fb14044fd": "0.22.1"},
)
K3_SUPPORTED = Target(
    module=_K3_KDA,
    names=("is_fused_kda_decode_supported",),
    signatures=(
        "num_heads, head_dim, conv_width, num_spec, input_dtype, conv_state_dtype, recurrent_state_dtype",
    ),
    hashes={"374f44f058331df8": "0.33.0"},
)
K3_INIT = Target(
    module=_K3_KDA,
    names=("KimiK3DeltaAttention.__init__",),
    signatures=("self, config, vllm_config, prefix='', aux_stream=None, run_gemm_rs_ar=False",),
    hashes={"ede445ca54e3994b": "0.33.0"},
)
K3_OP = Target(
    module="vllm._custom_ops",
    names=("fused_kda_decode",),
    signatures=(
        "x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out=None,"
        " lower_bound=None, output_gate=None, norm_weight=None, norm_eps=1e-05",
    ),
    hashes={"ca768dff5a7a995f": "0.33.0"},
)

_HEAD_DIM, _CONV_WIDTH = 128, 4
# Attribute of Kimi-K3's decode weights: the name of their layer.
_LAYER = "_vllm_hotpath_layer"


@functools.cache
def _runs_on(device: torch.device | None) -> bool:
    from vllm_hotpath.ops import is_supported

    return is_supported(NAME, device).ok


def _state_dtypes() -> set[torch.dtype]:
    import torch

    return {torch.float32, torch.bfloat16, torch.float16}


def _caches_fit(*caches: torch.Tensor) -> bool:
    """Whether slots lie at multiples of 16 bytes."""
    return not any(c.data_ptr() % 16 or c.stride(0) * c.element_size() % 16 for c in caches)


def _call(layer_name: str, *tensors: Any, **options: Any) -> None:
    """Run the op; its errors name the layer."""
    from vllm_hotpath.ops.kda_decode import kda_decode

    try:
        kda_decode(*tensors, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in {TypeError, ValueError, RuntimeError}:
            raise
        raise type(error)(f"{layer_name}: {error}") from error


_said: set[str] = set()


def _say(reason: str) -> None:
    from vllm_hotpath.plugin import report

    if reason not in _said:
        _said.add(reason)
        report.LOGGER.log(logging.INFO, "%s: %s", NAME, reason)


# ---- Kimi-K3 ----


def _k3_supported(original: Callable[..., bool]) -> Callable[..., bool]:
    import torch

    @functools.wraps(original)
    def is_fused_kda_decode_supported(
        num_heads: int,
        head_dim: int,
        conv_width: int,
        num_spec: int,
        input_dtype: torch.dtype,
        conv_state_dtype: torch.dtype,
        recurrent_state_dtype: torch.dtype,
    ) -> bool:
        if num_spec:
            _say(f"Kimi-K3 stays stock with {num_spec} speculative tokens")
        elif (
            num_heads > 0
            and (head_dim, conv_width) == (_HEAD_DIM, _CONV_WIDTH)
            and input_dtype == conv_state_dtype == torch.bfloat16
            and recurrent_state_dtype in _state_dtypes()
            and _runs_on(None)
        ):
            return True
        return original(
            num_heads,
            head_dim,
            conv_width,
            num_spec,
            input_dtype,
            conv_state_dtype,
            recurrent_state_dtype,
        )

    return is_fused_kda_decode_supported


def _k3_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if self.decode_conv1d_weight is not None and self.decode_norm_weight is not None:
            setattr(self.decode_conv1d_weight, _LAYER, self.prefix)
            _refill_after_loading(self)

    return __init__


def _refill_after_loading(layer: Any) -> None:
    """Have the copies of the weights that decode reads made of what was loaded, however it was.

    vLLM fills them in its weight loaders alone, which dummy weights and some formats pass by.
    """
    method = layer.conv1d.quant_method
    original = method.process_weights_after_loading

    def process_weights_after_loading(conv1d: Any) -> None:
        original(conv1d)
        # A method that layers share comes here with each of them.
        if conv1d is not layer.conv1d:
            return
        weight = conv1d.weight.data
        if weight.is_meta or layer.o_norm.weight.is_meta:
            return
        taps = weight.view(3, -1, _CONV_WIDTH).transpose(1, 2)
        layer.decode_conv1d_weight.copy_(taps)
        layer.decode_norm_weight.copy_(layer.o_norm.weight.data)

    method.process_weights_after_loading = process_weights_after_loading


def _k3_op(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def fused_kda_decode(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv_state: torch.Tensor,
        raw_g: torch.Tensor,
        raw_beta: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state_indices: torch.Tensor,
        state: torch.Tensor,
        out: torch.Tensor | None = None,
        lower_bound: float | None = None,
        output_gate: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        norm_eps: float = 1e-5,
    ) -> torch.Tensor:
        tensors = (x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state)
        options = {
            "lower_bound": lower_bound,
            "output_gate": output_gate,
            "norm_weight": norm_weight,
            "norm_eps": norm_eps,
        }
        if (
            torch.compiler.is_compiling()
            or x.dtype != torch.bfloat16
            or conv_state.dtype != torch.bfloat16
            or weight.dtype != torch.float32
            or state.dtype not in _state_dtypes()
            or not _caches_fit(conv_state, state)
            or raw_g.shape[-1] != _HEAD_DIM
            or not _runs_on(x.device)
        ):
            found: torch.Tensor = original(*tensors, out=out, **options)
            return found
        if out is None:
            out = torch.empty(raw_g.shape, dtype=x.dtype, device=x.device)
        _call(
            getattr(weight, _LAYER, "a KDA layer"),
            *(x, weight, conv_state, raw_g, raw_beta, A_log, dt_bias, state, state_indices),
            conv_bias=bias,
            out=out,
            **options,
        )
        return out

    return fused_kda_decode


# ---- Kimi-Linear ----


def _decodes(layer: Any, x: torch.Tensor, metadata: Any) -> bool:
    """Whether a batch is one token a request throughout, of a layer that our op takes."""
    import torch

    indices = metadata.non_spec_state_indices_tensor
    *conv_states, state = layer.kv_cache[: 4 if len(layer.kv_cache) > 2 else 2]
    if metadata.num_spec_decodes:
        _say("Kimi-Linear's speculative rows stay stock")
        return False
    return (
        metadata.num_prefills == 0
        and metadata.num_decodes > 0
        and indices is not None
        and indices.shape[0] >= metadata.num_actual_tokens
        and not torch.compiler.is_compiling()
        and (layer.head_dim, layer.conv_size) == (_HEAD_DIM, _CONV_WIDTH)
        and x.dtype in {torch.bfloat16, torch.float16}
        and all(conv_state.dtype == x.dtype for conv_state in conv_states)
        and _caches_fit(*conv_states, state)
        and state.dtype in _state_dtypes()
        and _runs_on(x.device)
    )


def _metadata(layer: Any) -> Any:
    """The layer's metadata; None where the call does not decode: profile runs."""
    from vllm.forward_context import get_forward_context

    every = get_forward_context().attn_metadata
    return every.get(layer.prefix) if isinstance(every, dict) else None


def _conv_states(states: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """``[slots, channels, width - 1]`` views, whatever the layout of the cache."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return [state if is_conv_state_dim_first() else state.transpose(-1, -2) for state in states]


def _linear_steps(original: Callable[..., None]) -> Callable[..., None]:
    """0.22.1: three projections and caches; gate and beta come activated, the norm is traced code."""

    @functools.wraps(original)
    def _forward(
        self: Any,
        q_proj_states: torch.Tensor,
        k_proj_states: torch.Tensor,
        v_proj_states: torch.Tensor,
        g1: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        metadata = _metadata(self)
        xs = (q_proj_states, k_proj_states, v_proj_states)
        if metadata is None or not _decodes(self, xs[0], metadata):
            original(self, *xs, g1, beta, core_attn_out)
            return
        rows = metadata.num_actual_tokens
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        biases = [conv.bias for conv in convs]
        *states, state = self.kv_cache[:4]
        _call(
            self.prefix,
            [x[:rows] for x in xs],
            [conv.weight for conv in convs],
            _conv_states(tuple(states)),
            g1[:, :rows],
            beta[:, :rows],
            None,
            None,
            state,
            metadata.non_spec_state_indices_tensor[:rows],
            conv_bias=None if biases[0] is None else biases,
            gate_is_log_decay=True,
            beta_is_sigmoid=True,
            out=core_attn_out[:, :rows],
        )

    return _forward


def _linear_packed(original: Callable[..., None]) -> Callable[..., None]:
    """0.33.0: one projection and one cache, raw gate and beta, and the norm."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    # Ours goes where the stock body is: inside of what ends a graph's segment.
    inner = getattr(original, "__wrapped__", original)

    @functools.wraps(inner)
    def _forward(
        self: Any,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        metadata = _metadata(self)
        if metadata is None or not _decodes(self, mixed_qkv, metadata):
            inner(self, mixed_qkv, g1, g2, beta, core_attn_out)
            return
        rows, width = metadata.num_actual_tokens, self.local_projection_size
        conv_state, state = self.kv_cache[:2]
        bias = self.conv1d.bias
        _call(
            self.prefix,
            mixed_qkv[:rows].split(width, dim=-1),
            self.conv1d.weight.split(width),
            _conv_states((conv_state,))[0].split(width, dim=-2),
            g1[:, :rows],
            beta[:, :rows],
            self.A_log,
            self.dt_bias,
            state,
            metadata.non_spec_state_indices_tensor[:rows],
            conv_bias=None if bias is None else bias.split(width),
            lower_bound=self.gate_lower_bound,
            output_gate=g2[:rows],
            norm_weight=self.o_norm.weight.float(),
            norm_eps=self.o_norm.eps,
            out=core_attn_out[:, :rows],
        )

    return eager_break_during_capture(_forward) if inner is not original else _forward


def _linear(original: Callable[..., None]) -> Callable[..., None]:
    import inspect

    packed = "mixed_qkv" in inspect.signature(original).parameters
    return _linear_packed(original) if packed else _linear_steps(original)


def _plan(environ: Mapping[str, str]) -> Plan | None:
    if not envs.read(envs.KDA_DECODE, environ):
        return None
    return Plan(
        (
            Patch(LINEAR, _linear),
            Patch(K3_SUPPORTED, _k3_supported, optional=True),
            Patch(K3_INIT, _k3_init, optional=True),
            Patch(K3_OP, _k3_op, optional=True),
        )
    )


KDA_DECODE = Feature(NAME, (envs.KDA_DECODE,), _plan)
