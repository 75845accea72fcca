"""What stands before an NVFP4 MoE kernel: the quantisation of its input, the gate, the cast of its bias.

Level 1 is lossless: where a layer's prepare step asks vLLM's quantiser for linear scales, it gets ours, and
vLLM 0.22.1's cast of the routing bias to bf16 becomes one that is made once. Level 2 also takes the gate of
layers whose kernel selects the experts itself, for few tokens: its call gives the logits, as ever, and with
them the codes that the same launch has made of its input. They travel as an attribute of the logits' tensor,
and the prepare step takes them if it is given that very tensor, that very input and the quantisation that the
gate has seen it use before. Everything else is quantised by itself.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_hotpath import envs
from vllm_hotpath.plugin import moe_gate
from vllm_hotpath.plugin.plan import Feature, Patch, Plan
from vllm_hotpath.plugin.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

NAME = "moe_fp4_preamble"
_MOE = "vllm.model_executor.layers.fused_moe"
_PREPARE = f"{_MOE}.prepare_finalize.no_dp_ep"

QUANTIZE = Target(
    module=_PREPARE,
    names=("_quantize_input",),
    signatures=("a1, quant_config, defer_input_quant=False",),
    hashes={"79b8cd6f9a4c2b2c": "0.33.0", "241d5cec59a1f459": "0.22.1"},
)
PREPARE = Target(
    module=_PREPARE,
    names=("MoEPrepareAndFinalizeNoDPEPMonolithic.prepare",),
    signatures=("self, a1, router_logits, quant_config, defer_input_quant=False",),
    hashes={"f178c4bd7b4b28f7": "0.33.0 and 0.22.1"},
)
RUNNER = Target(
    module=f"{_MOE}.runner.moe_runner",
    names=("MoERunner._forward_impl",),
    signatures=(
        "self, hidden_states, router_logits, shared_experts_input, input_ids=None",
        "self, layer, hidden_states, router_logits, shared_experts_input, input_ids=None",
    ),
    hashes={"2d358e9a2a7a5b4c": "0.33.0", "c2861cf2768b8e2b": "0.22.1"},
)
# vLLM 0.33.0 hands the fp32 bias on as it is, and so must we: in bf16 other experts are selected.
BIAS = Target(
    module=f"{_MOE}.experts.trtllm_nvfp4_moe",
    names=("TrtLlmNvFp4ExpertsMonolithic.apply",),
    signatures=(
        "self, hidden_states, w1, w2, router_logits, activation, global_num_experts, expert_map, a1q_scale, "
        "apply_router_weight_on_input, num_expert_group=None, e_score_correction_bias=None, "
        "routed_scaling_factor=None, topk_group=None",
    ),
    hashes={"7b90a51960a0ea8a": "0.22.1"},
    settled={"8580333b579a6d7e": "0.33.0"},
)
# Ends every reload of weights that goes layer by layer; it writes where torch does not count versions.
RELOAD = Target(
    module="vllm.model_executor.model_loader.reload.layerwise",
    names=("finalize_layerwise_processing",),
    signatures=("model, model_config",),
    hashes={"1b26a2a66d99aca7": "0.22.1"},
    settled={"db59bf9798b9eaed": "0.33.0"},
)

GATE_TOKENS = 16
"""Tokens of a call whose gate is taken."""

_BLOCK = 16
# Attributes of a runner that has been looked at, of the logits, of a quantisation's description, of a bias.
_SEEN = "_vllm_hotpath_preamble_seen"
_PREPARED = "_vllm_hotpath_prepared"
_SCALE = "_vllm_hotpath_scale"
_FOLLOWED = "_vllm_hotpath_followed"


# ---- Level 1: the quantiser ----


class _Thread(threading.local):
    """The layer that the calling thread runs."""

    layer_name: str | None = None


_thread = _Thread()


def _scale(quant_config: Any, defer_input_quant: bool) -> torch.Tensor | None:
    """The global scale of a quantisation to NVFP4 with linear scales, of one element; None for any other."""
    import torch

    if defer_input_quant or not quant_config.use_nvfp4_w4a4 or quant_config.is_scale_swizzled:
        return None
    given = quant_config.a1_gscale
    if not isinstance(given, torch.Tensor) or given.dtype != torch.float32 or not given.numel():
        return None
    known: tuple[torch.Tensor, torch.Tensor] | None = getattr(quant_config, _SCALE, None)
    if known is None or known[0] is not given:
        # vLLM's kernel reads the first element of any number.
        known = given, given.detach().reshape(-1)[:1]
        object.__setattr__(quant_config, _SCALE, known)
    return known[1]


@functools.cache
def _runs_on(device: torch.device) -> bool:
    from vllm_hotpath.ops import is_supported

    return bool(is_supported(NAME, device))


def _takes(x: torch.Tensor) -> bool:
    import torch

    return (
        not torch.compiler.is_compiling()
        and x.dim() == 2
        and x.shape[0] > 0
        and x.shape[1] > 0
        and x.shape[1] % _BLOCK == 0
        and x.stride(1) == 1
        and x.dtype in {torch.bfloat16, torch.float16}
        and _runs_on(x.device)
    )


def _quantize(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    from vllm_hotpath.ops.moe_fp4_preamble import moe_fp4_preamble

    @functools.wraps(original)
    def _quantize_input(a1: torch.Tensor, quant_config: Any, defer_input_quant: bool = False) -> Any:
        scale = _scale(quant_config, defer_input_quant)
        if scale is None or not _takes(a1):
            return original(a1, quant_config, defer_input_quant)
        with moe_gate.errors_of(_thread.layer_name):
            made = moe_fp4_preamble(a1, scale)
        return made.packed, made.scales.view(torch.float8_e4m3fn)

    return _quantize_input


# ---- Level 2: the gate ----


class _Prepared(NamedTuple):
    """What a gate's call leaves with its logits: whose they are, and the codes of its input if there are."""

    gate: _Gate
    x: torch.Tensor | None = None
    quant_config: Any = None
    packed: torch.Tensor | None = None
    scales: torch.Tensor | None = None


class _Gate(moe_gate.Gate):
    def __init__(self, runner: Any, gate: Any) -> None:
        from vllm_hotpath.ops.moe_fp4_preamble import moe_fp4_preamble

        super().__init__(runner, gate)
        self._op = moe_fp4_preamble
        self._quant_config: Any = None

    def __call__(self, x: torch.Tensor) -> Any:
        import torch

        config = self._quant_config
        scale = None if config is None else _scale(config, False)
        if scale is None or not self.takes(x, GATE_TOKENS) or not _takes(x):
            result = self.stock(x)
            logits = result[0] if isinstance(result, tuple) else result
            if not torch.compiler.is_compiling():
                setattr(logits, _PREPARED, _Prepared(self))
            return result
        with moe_gate.errors_of(self.layer_name):
            made = self._op(
                x, scale, gate_weight=self.gate.weight, logits_dtype=self.logits_dtype(x.shape[0])
            )
        logits = made.router_logits
        assert logits is not None
        scales = made.scales.view(torch.float8_e4m3fn)
        setattr(logits, _PREPARED, _Prepared(self, x, config, made.packed, scales))
        return self.result(logits)

    def learn(self, quant_config: Any, defer_input_quant: bool) -> None:
        """Remember how the layer has its input quantised; give the gate back where that is not ours to do."""
        if _scale(quant_config, defer_input_quant) is not None:
            self._quant_config = quant_config
            return
        if vars(self.gate).get("forward") is self:
            del self.gate.forward
        _say(self.layer_name, "its input is not quantised to NVFP4 with linear scales")


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(
        self: Any,
        a1: torch.Tensor,
        router_logits: torch.Tensor,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        made: _Prepared | None = getattr(router_logits, _PREPARED, None)
        if made is not None:
            if made.x is a1 and made.quant_config is quant_config and not defer_input_quant:
                return made.packed, made.scales, router_logits
            made.gate.learn(quant_config, defer_input_quant)
        return original(self, a1, router_logits, quant_config, defer_input_quant)

    return prepare


def _reason(runner: Any, gate: Any) -> str:
    """Why a layer keeps vLLM's gate; empty if it does not."""
    import torch
    from vllm import envs as vllm_envs

    from vllm_hotpath.ops import is_supported

    if reason := moe_gate.reason(runner, gate):
        return reason
    if not runner._quant_method.is_monolithic:
        return "its kernel does not select the experts itself"
    if vllm_envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1"
    weight = gate.weight
    if weight.dtype != torch.bfloat16 or weight.dim() != 2 or weight.stride(1) != 1:
        return f"its gate weight is {weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}"
    if weight.shape[1] % _BLOCK:
        return f"{weight.shape[1]} channels are no multiple of {_BLOCK}"
    logits_dtype = moe_gate.out_dtype(gate)
    if logits_dtype not in {None, torch.bfloat16, torch.float32}:
        return f"its logits are {logits_dtype}"
    support = is_supported(NAME, weight.device, experts=weight.shape[0])
    return "" if support.ok else support.reason


_say = moe_gate.Notices(NAME)


def _hook(runner: Any) -> None:
    """Hook the gate of a layer, or say once per reason why not."""
    setattr(runner, _SEEN, True)
    try:
        reason = _reason(runner, runner.gate)
        if not reason:
            runner.gate.forward = _Gate(runner, runner.gate)
            return
    except Exception as error:
        _say(runner.layer_name, f"{type(error).__name__}: {error}", logging.WARNING)
    else:
        _say(runner.layer_name, reason)


def _runner(original: Callable[..., Any], *, gate: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def _forward_impl(self: Any, *arguments: Any, **options: Any) -> Any:
        if gate and not hasattr(self, _SEEN):
            _hook(self)
        outer, _thread.layer_name = _thread.layer_name, self.layer_name
        try:
            return original(self, *arguments, **options)
        finally:
            _thread.layer_name = outer

    return _forward_impl


# ---- vLLM 0.22.1: the routing bias ----


def _follow(bias: torch.Tensor) -> bool:
    """Have loads of a bias renew its copies: loaders write where torch does not count versions."""
    if hasattr(bias, _FOLLOWED):
        return True
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    original = getattr(bias, "weight_loader", default_weight_loader)

    @functools.wraps(original)
    def weight_loader(param: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        from vllm_hotpath.routing_bias import refresh_routing_bias

        result = original(param, *arguments, **options)
        refresh_routing_bias(param)
        return result

    try:
        bias.weight_loader = weight_loader  # type: ignore[attr-defined]
    except AttributeError:
        return False
    setattr(bias, _FOLLOWED, True)
    return True


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    from vllm_hotpath.routing_bias import DTYPES, routing_bias

    @functools.wraps(original)
    def apply(self: Any, *arguments: Any, **options: Any) -> Any:
        bias = options.get("e_score_correction_bias")
        if (
            isinstance(bias, torch.Tensor)
            and bias.dtype in DTYPES
            and not torch.compiler.is_compiling()
            and _follow(bias)
        ):
            options["e_score_correction_bias"] = routing_bias(bias, torch.bfloat16)
        return original(self, *arguments, **options)

    return apply


def _reload(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_hotpath.routing_bias import refresh_routing_bias

    @functools.wraps(original)
    def finalize_layerwise_processing(model: Any, model_config: Any) -> Any:
        result = original(model, model_config)
        refresh_routing_bias()
        return result

    return finalize_layerwise_processing


# ---- What the flag asks for ----


def _plan(environ: Mapping[str, str]) -> Plan | None:
    level = envs.level(envs.MOE_FP4_PREAMBLE, 2, environ)
    if not level:
        return None
    patches = (
        Patch(QUANTIZE, _quantize),
        Patch(RUNNER, functools.partial(_runner, gate=level == 2)),
        Patch(BIAS, _apply, optional=True),
        Patch(RELOAD, _reload, optional=True),
    )
    return Plan((*patches, Patch(PREPARE, _prepare)) if level == 2 else patches)


MOE_FP4_PREAMBLE = Feature(NAME, (envs.MOE_FP4_PREAMBLE,), _plan)
