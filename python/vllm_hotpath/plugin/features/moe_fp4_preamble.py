"""What stands before an NVFP4 MoE kernel: the quantisation of its input, the gate, the cast of its bias.

Level 1 is lossless: where a layer's prepare step asks vLLM's quantiser for linear scales, it gets ours, and
vLLM 0.22.1's cast of the routing bias to bf16 becomes one that is made once. Level 2 also takes the gate of
layers whose kernel selects the experts itself, for few tokens: its call gives the logits, as ever, and with
them the codes that the same launch has made of its input. They travel as an attribute of the logits' tensor,
and the prepare step takes them if it is given that very tensor, that very input and the quantisation that the
gate has seen it use before. Everything else is quantised by itself.
"""

from __future__ import annotations

import contextlib
import functools
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
RUNNER = moe_gate.RUNNER
PREPARE = Target(
    module=_PREPARE,
    names=("MoEPrepareAndFinalizeNoDPEPMonolithic.prepare",),
    signatures=("self, a1, router_logits, quant_config, defer_input_quant=False",),
    hashes={"f178c4bd7b4b28f7": "0.33.0 and 0.22.1"},
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
# Where reloads of weights end. They write where torch counts no versions, or between replays of a graph, when
# nothing asks for the bias.
_WORKER = "vllm.v1.worker.gpu_worker"
RELOADS = (
    Target(
        module="vllm.model_executor.model_loader.reload.layerwise",
        names=("finalize_layerwise_processing",),
        signatures=("model, model_config",),
        hashes={"1b26a2a66d99aca7": "0.22.1"},
        settled={"db59bf9798b9eaed": "0.33.0"},
    ),
    Target(
        module=_WORKER,
        names=("Worker.reload_weights",),
        signatures=("self, *args, **kwargs",),
        hashes={"0e666b031d264e81": "0.22.1"},
        settled={"2a950f95ebd5d37b": "0.33.0"},
    ),
    Target(
        module=_WORKER,
        names=("Worker.finish_weight_update",),
        signatures=("self",),
        hashes={"104bf769f700a016": "0.22.1"},
        settled={"044fc64de1cb0d49": "0.33.0"},
    ),
)

_say = moe_gate.Notices(NAME)

GATE_TOKENS = 16
"""Tokens of a call whose gate is taken: what the op is meant to win at. Not measured yet."""

_BLOCK = 16
# Attributes of a runner that has been looked at, of the logits, of a quantisation's description.
_SEEN = "_vllm_hotpath_preamble_seen"
_PREPARED = "_vllm_hotpath_prepared"
_SCALE = "_vllm_hotpath_scale"


# ---- Level 1: the quantiser ----


class _Thread(threading.local):
    """The layer that the calling thread runs: a launch that CUDA refuses is an error that names it."""

    layer_name: str | None = None


_thread = _Thread()


def _scale(quant_config: Any, defer_input_quant: bool) -> torch.Tensor | None:
    """The global scale of a quantisation to NVFP4 with linear scales, of one element; None for any other.

    None, too, in code that is compiled.
    """
    import torch

    if torch.compiler.is_compiling() or defer_input_quant:
        return None
    if not quant_config.use_nvfp4_w4a4 or quant_config.is_scale_swizzled:
        return None
    given = quant_config.a1_gscale
    if not isinstance(given, torch.Tensor) or given.dtype != torch.float32 or not given.numel():
        return None
    known: tuple[torch.Tensor, torch.Tensor] | None = getattr(quant_config, _SCALE, None)
    if known is None or known[0] is not given or known[1].data_ptr() != given.data_ptr():
        # vLLM's kernel reads the first element of any number. A view: the scale may be changed in place.
        known = given, given.detach().as_strided((1,), (1,))
        object.__setattr__(quant_config, _SCALE, known)
    return known[1]


@functools.cache
def _runs_on(device: torch.device) -> bool:
    from vllm_hotpath.ops import is_supported

    return bool(is_supported(NAME, device))


def _takes(x: torch.Tensor) -> bool:
    import torch

    return (
        x.dim() == 2
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
        try:
            made = moe_fp4_preamble(a1, scale)
        except moe_gate.OP_ERRORS as error:
            moe_gate.raise_named(error, _thread.layer_name)
        _say.used(_thread.layer_name, "is quantised by our op")
        return made.packed, made.scales.view(torch.float8_e4m3fn)

    return _quantize_input


# ---- Level 2: the gate ----


class _Prepared(NamedTuple):
    """What a gate's call leaves with its logits: whose they are, and the codes of its input if there are."""

    gate: _Gate
    x: torch.Tensor | None = None
    quant_config: Any = None
    scale: torch.Tensor | None = None
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
        if scale is None or not self.takes(x, GATE_TOKENS):
            result = self.stock(x)
            logits = result[0] if isinstance(result, tuple) else result
            if not torch.compiler.is_compiling():
                setattr(logits, _PREPARED, _Prepared(self))
            return result
        try:
            made = self._op(
                x, scale, gate_weight=self.gate.weight, logits_dtype=self.logits_dtype(x.shape[0])
            )
        except moe_gate.OP_ERRORS as error:
            moe_gate.raise_named(error, self.layer_name)
        logits = made.router_logits
        assert logits is not None
        scales = made.scales.view(torch.float8_e4m3fn)
        setattr(logits, _PREPARED, _Prepared(self, x, config, scale, made.packed, scales))
        _say.used(self.layer_name, "has its gate and its quantisation in one launch")
        return self.result(logits)

    def learn(self, quant_config: Any, defer_input_quant: bool) -> None:
        """Remember how the layer has its input quantised; give the gate back where that is not ours to do."""
        if _scale(quant_config, defer_input_quant) is None:
            self.give_back("its input is not quantised to NVFP4 with linear scales")
        self._quant_config = quant_config

    def give_back(self, why: str) -> None:
        """Leave the gate to vLLM from now on."""
        if vars(self.gate).get("forward") is self:
            del self.gate.forward
            _say(self.layer_name, why)


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def prepare(
        self: Any,
        a1: torch.Tensor,
        router_logits: torch.Tensor,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        made: _Prepared | None = getattr(router_logits, _PREPARED, None)
        if made is not None and not torch.compiler.is_compiling():
            if (
                made.x is a1
                and made.quant_config is quant_config
                and made.scale is _scale(quant_config, defer_input_quant)
            ):
                return made.packed, made.scales, router_logits
            if made.x is not None and made.x is not a1:
                # Codes that nobody takes would be made in every call.
                made.gate.give_back("its experts do not get the input of its gate")
            else:
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
    if reason := moe_gate.weight_reason(gate, {torch.bfloat16}):
        return reason
    experts, hidden = gate.weight.shape
    if hidden % _BLOCK:
        return f"{hidden} channels are no multiple of {_BLOCK}"
    support = is_supported(NAME, gate.weight.device, experts=experts)
    return "" if support.ok else support.reason


def _runner(original: Callable[..., Any], *, gate: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def _forward_impl(self: Any, *arguments: Any, **options: Any) -> Any:
        if gate and not hasattr(self, _SEEN):
            setattr(self, _SEEN, True)
            moe_gate.hook(self, self.gate, _reason, _Gate, _say)
        outer, _thread.layer_name = _thread.layer_name, self.layer_name
        try:
            return original(self, *arguments, **options)
        finally:
            _thread.layer_name = outer

    return _forward_impl


# ---- vLLM 0.22.1: the routing bias ----


def _then_refresh(load: Callable[[], Any], bias: Any = None) -> Any:
    """Load, then renew the casts, also of what is half written. What a load raises is not hidden by that."""
    from vllm_hotpath.routing_bias import refresh_routing_bias

    try:
        result = load()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            refresh_routing_bias(bias)
        raise
    refresh_routing_bias(bias)
    return result


class _Loader:
    """The weight loader of a bias: loads as before, then renews the casts."""

    def __init__(self, original: Callable[..., Any]) -> None:
        # Its name and signature, which vLLM asks a loader for.
        functools.update_wrapper(self, original)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        original: Callable[..., Any] = vars(self)["__wrapped__"]
        bias = arguments[0] if arguments else options.get("param")
        return _then_refresh(lambda: original(*arguments, **options), bias)


def _follow(bias: torch.Tensor) -> bool:
    """Have loads of a bias renew its casts: loaders write where torch counts no versions."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader = getattr(bias, "weight_loader", default_weight_loader)
    if isinstance(loader, _Loader):
        return True
    try:
        bias.weight_loader = _Loader(loader)  # type: ignore[attr-defined]
    except AttributeError:
        return False
    return True


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    from vllm_hotpath.routing_bias import DTYPES, cast_once

    @functools.wraps(original)
    def apply(self: Any, *arguments: Any, **options: Any) -> Any:
        bias = options.get("e_score_correction_bias")
        if (
            # Loads into what a view is of cannot be followed.
            isinstance(bias, torch.nn.Parameter)
            and bias.dtype in DTYPES
            and not torch.compiler.is_compiling()
            and _follow(bias)
        ):
            options["e_score_correction_bias"] = cast_once(bias, torch.bfloat16)
        return original(self, *arguments, **options)

    return apply


def _reload(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reload(*arguments: Any, **options: Any) -> Any:
        return _then_refresh(lambda: original(*arguments, **options))

    return reload


# ---- What the flag asks for ----


def _plan(environ: Mapping[str, str]) -> Plan | None:
    level = envs.level(envs.MOE_FP4_PREAMBLE, 2, environ)
    if not level:
        return None
    patches = (
        Patch(QUANTIZE, _quantize),
        Patch(RUNNER, functools.partial(_runner, gate=level == 2)),
        Patch(BIAS, _apply, optional=True),
        *(Patch(target, _reload, optional=True) for target in RELOADS),
    )
    return Plan((*patches, Patch(PREPARE, _prepare)) if level == 2 else patches)


MOE_FP4_PREAMBLE = Feature(NAME, (envs.MOE_FP4_PREAMBLE,), _plan)
