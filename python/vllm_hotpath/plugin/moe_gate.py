"""What the features that take a layer's gate over share: which gates they know, and what stands for one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_hotpath.plugin.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

# Calls the gates that runners hold.
RUNNER = Target(
    module="vllm.model_executor.layers.fused_moe.runner.moe_runner",
    names=("MoERunner._forward_impl",),
    signatures=(
        "self, hidden_states, router_logits, shared_experts_input, input_ids=None",
        "self, layer, hidden_states, router_logits, shared_experts_input, input_ids=None",
    ),
    hashes={"2d358e9a2a7a5b4c": "0.33.0", "c2861cf2768b8e2b": "0.22.1"},
)

_DSV3_GEMM_TOKENS = 16


def reason(runner: Any, gate: Any) -> str:
    """Why a layer keeps vLLM's gate, as far as gate and runner are concerned; empty if it does not."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    if gate is None:
        return "its gate is applied outside of it"
    if runner._fse_fuse_gate:
        return "its gate is fused with that of the shared experts"
    if type(gate) not in {GateLinear, ReplicatedLinear}:
        return f"its gate is a {type(gate).__name__} (LoRA, or a gate of its own)"
    if type(gate.quant_method) is not UnquantizedLinearMethod or gate.bias is not None:
        return "its gate is quantised or has a bias"
    config = runner.moe_config
    if config.is_sequence_parallel or runner.do_naive_dispatch_combine or config.pcp_size > 1:
        return "its tokens or logits are gathered from other ranks"
    if config.moe_parallel_config.use_all2all_kernels:
        return "its tokens are dispatched by all2all kernels"
    return ""


def weight_reason(gate: Any, dtypes: set[torch.dtype]) -> str:
    """Why the weight or the logits of a gate are not for our kernels; empty if they are."""
    import torch

    weight, logits_dtype = gate.weight, out_dtype(gate)
    if weight.dtype not in dtypes or weight.dim() != 2 or weight.stride(1) != 1:
        return f"its gate weight is {weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}"
    if logits_dtype not in {None, torch.bfloat16, torch.float32}:
        return f"its logits are {logits_dtype}"
    return ""


def out_dtype(gate: Any) -> torch.dtype | None:
    """The dtype that a gate's logits are asked for; None is that of its input."""
    found: torch.dtype | None = getattr(gate, "out_dtype", None)
    return found


class Gate:
    """Stands for ``forward`` of the gate of one layer."""

    def __init__(self, runner: Any, gate: Any) -> None:
        self.layer_name: str = runner.layer_name
        self.gate, self.stock = gate, gate.forward

    def takes(self, x: torch.Tensor, most: int) -> bool:
        """Whether ``x`` is one to ``most`` tokens in bf16 that our kernels read, and nothing compiles."""
        import torch

        weight = self.gate.weight
        return (
            not torch.compiler.is_compiling()
            and x.dim() == 2
            and 0 < x.shape[0] <= most
            and x.shape[1] == weight.shape[1]
            and x.dtype == torch.bfloat16
            and x.stride(1) == 1
            and x.device == weight.device
        )

    def logits_dtype(self, tokens: int) -> torch.dtype:
        """The dtype of the logits that vLLM's gate would return for that many tokens."""
        import torch

        given = out_dtype(self.gate)
        if (
            given is None
            and tokens <= _DSV3_GEMM_TOKENS
            and getattr(self.gate, "allow_dsv3_router_gemm", False)
        ):
            # 0.22.1 allocates this GEMM's logits without a dtype.
            return torch.get_default_dtype()
        return given or torch.bfloat16

    def result(self, logits: torch.Tensor) -> Any:
        """What the gate's ``forward`` returns."""
        return (logits, None) if getattr(self.gate, "return_bias", True) else logits


OP_ERRORS = (TypeError, ValueError, RuntimeError)
"""What our ops raise."""


def raise_named(error: Exception, layer_name: str | None) -> NoReturn:
    """Raise an error of our ops with the layer that it comes from; subclasses have made their own texts."""
    if layer_name is None or type(error) not in OP_ERRORS:
        raise error
    raise type(error)(f"{layer_name}: {error}") from error


def hook(
    runner: Any,
    gate: Any,
    reason: Callable[[Any, Any], str],
    make: Callable[[Any, Any], Gate],
    say: Notices,
) -> None:
    """Put ``make(runner, gate)`` in the place of the gate's ``forward``, or say why not."""
    try:
        why = reason(runner, gate)
        if not why:
            gate.forward = make(runner, gate)
            return
    except Exception as error:
        say(runner.layer_name, f"{type(error).__name__}: {error}", logging.WARNING)
    else:
        say(runner.layer_name, why)


class Notices:
    """What a feature says about layers: each text once in a process, with the first layer that it is for."""

    def __init__(self, feature: str) -> None:
        self._feature = feature
        self.said: set[str] = set()

    def __call__(self, layer_name: str, why: str, level: int = logging.INFO) -> None:
        """Log that the layer stays stock, and why."""
        self._once(level, layer_name, f"stays stock: {why}")

    def used(self, layer_name: str | None, what: str) -> None:
        """Log that the feature has done its work, for a layer or outside of one."""
        if what not in self.said:
            self._once(logging.INFO, layer_name or "an input", what)

    def _once(self, level: int, layer_name: str, text: str) -> None:
        from vllm_hotpath.plugin import report

        if text not in self.said:
            self.said.add(text)
            report.LOGGER.log(level, "%s: %s %s", self._feature, layer_name, text)
