"""A package named ``vllm`` with the few objects that the plugin patches, for tests without vLLM."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from vllm_hotpath.plugin import targets
from vllm_hotpath.plugin.features import kda_decode, moe_fp4_preamble, moe_router
from vllm_hotpath.plugin.features import mla_kv_pack as feature

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    import pytest

ENVS = "vllm.envs"
MLA = "vllm.model_executor.layers.attention.mla_attention"
K3 = "vllm.models.kimi_k3.nvidia.mla"
K3_OPS = "vllm.models.kimi_k3.nvidia.ops.fused_mla_key_concat_kv_cache"
_MOE = "vllm.model_executor.layers.fused_moe"
RUNNER = f"{_MOE}.runner.moe_runner"
GROUPED = f"{_MOE}.router.grouped_topk_router"
TOPK = f"{_MOE}.router.fused_topk_router"
GATE = f"{_MOE}.router.gate_linear"
PREPARE = f"{_MOE}.prepare_finalize.no_dp_ep"
TRTLLM = f"{_MOE}.experts.trtllm_nvfp4_moe"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
WEIGHTS = "vllm.model_executor.model_loader.weight_utils"
WORKER = "vllm.v1.worker.gpu_worker"
LINEAR = "vllm.model_executor.layers.linear"
CONTEXT = "vllm.forward_context"
K3_MODEL = "vllm.models.kimi_k3.nvidia.model"
K3_KDA = "vllm.models.kimi_k3.nvidia.kda"
BREAKABLE = "vllm.compilation.breakable_cudagraph"
MAMBA = "vllm.model_executor.layers.mamba.mamba_utils"
KIMI_LINEAR = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
OPS = "vllm._custom_ops"

SOURCES = {
    ENVS: """\
import os
environment_variables = {"VLLM_PORT": lambda: os.environ.get("VLLM_PORT")}
VLLM_BATCH_INVARIANT = False
VLLM_USE_FUSED_MOE_GROUPED_TOPK = True
VLLM_MOE_SKIP_PADDING = True
""",
    LINEAR: """\
import torch


class UnquantizedLinearMethod:
    pass


class ReplicatedLinear(torch.nn.Module):
    def __init__(self, weight, out_dtype=None):
        super().__init__()
        self.register_parameter("bias", None)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.out_dtype = out_dtype
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x):
        logits = x.float() @ self.weight.float().T
        return logits.to(self.out_dtype or x.dtype), None
""",
    GATE: f"""\
from {LINEAR} import ReplicatedLinear


class GateLinear(ReplicatedLinear):
    pass
""",
    GROUPED: """\
class GroupedTopKRouter:
    eplb_state = None
    top_k, renormalize, scoring_func, routed_scaling_factor = 2, True, "sigmoid", 2.0
    num_expert_group = topk_group = 1
    e_score_correction_bias = None
    skip_padding = False

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        return "stock", router_logits
""",
    TOPK: """\
class FusedTopKRouter:
    eplb_state = None
    top_k, renormalize, scoring_func = 2, True, "softmax"

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        return "stock", router_logits
""",
    RUNNER: """\
class MoERunner:
    layer_name = "model.layers.3.mlp.experts"
    _fse_fuse_gate = do_naive_dispatch_combine = False

    def _forward_impl(self, hidden_states, router_logits, shared_experts_input, input_ids=None):
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        return self.router._compute_routing(hidden_states, router_logits, None)
""",
    PREPARE: """\
CALLS = []


def _quantize_input(a1, quant_config, defer_input_quant=False):
    CALLS.append(a1)
    return "stock codes", "stock scales"


class MoEPrepareAndFinalizeNoDPEPMonolithic:
    def prepare(self, a1, router_logits, quant_config, defer_input_quant=False):
        a1q, a1q_scale = _quantize_input(a1, quant_config, defer_input_quant)
        return a1q, a1q_scale, router_logits
""",
    TRTLLM: """\
class TrtLlmNvFp4ExpertsMonolithic:
    def apply(
        self, hidden_states, w1, w2, router_logits, activation, global_num_experts, expert_map, a1q_scale,
        apply_router_weight_on_input, num_expert_group=None, e_score_correction_bias=None,
        routed_scaling_factor=None, topk_group=None,
    ):
        return e_score_correction_bias
""",
    RELOAD: """\
def finalize_layerwise_processing(model, model_config):
    return model
""",
    WORKER: """\
class Worker:
    def reload_weights(self, *args, **kwargs):
        return "reloaded"

    def finish_weight_update(self):
        return "reloaded"
""",
    WEIGHTS: """\
def default_weight_loader(param, loaded_weight):
    param.data.copy_(loaded_weight)
""",
    CONTEXT: """\
CONTEXT = None


def is_forward_context_available():
    return CONTEXT is not None


def get_forward_context():
    return CONTEXT
""",
    K3_MODEL: """\
class KimiMoE:
    use_mega_moe = False

    def _maybe_overlap_router_and_down_proj(self, hidden_states):
        logits, _ = self.gate(hidden_states)
        return hidden_states[:, :8], logits, None
""",
    BREAKABLE: """\
import functools

BREAKS = []


def eager_break_during_capture(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        BREAKS.append(fn)
        return fn(*args, **kwargs)

    return wrapper
""",
    MAMBA: """\
def is_conv_state_dim_first():
    return True
""",
    KIMI_LINEAR: f"""\
from {BREAKABLE} import eager_break_during_capture


class KimiGatedDeltaNetAttention:
    @eager_break_during_capture
    def _forward(self, mixed_qkv, g1, g2, beta, core_attn_out):
        core_attn_out.fill_(7)
""",
    K3_KDA: """\
def is_fused_kda_decode_supported(
    num_heads, head_dim, conv_width, num_spec, input_dtype, conv_state_dtype, recurrent_state_dtype
):
    return num_heads == 5


class KimiK3DeltaAttention:
    def __init__(self, config, vllm_config, prefix="", aux_stream=None, run_gemm_rs_ar=False):
        self.prefix, self.decode_conv1d_weight = prefix, None
""",
    OPS: """\
def fused_kda_decode(
    x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out=None,
    lower_bound=None, output_gate=None, norm_weight=None, norm_eps=1e-5,
):
    return "stock"
""",
    MLA: """\
import torch

CALLS = []


class MLACommonBaseImpl:
    _use_flashinfer_concat_mla_k = False
    qk_nope_head_dim = 128
    v_head_dim = 128

    def _concat_k_nope_k_pe(self, k_nope, k_pe):
        CALLS.append("concat")
        k_pe = k_pe.expand(*k_nope.shape[:-1], k_pe.shape[-1]).to(k_nope.dtype)
        return torch.cat([k_nope, k_pe], dim=-1)

    def _context_parallel_compute_prefill_context(
        self, q, kv_c_and_k_pe_cache, attn_metadata, k_scale, dcp_world_size, fused_mla_kv_concat_fn=None
    ):
        CALLS.append("loop")
        return fused_mla_kv_concat_fn
""",
    K3_OPS: """\
def fused_mla_kv_concat(k_nope, k_pe):
    return "stock concat"


def fused_mla_kv_concat_quant_fp8(k_nope, k_pe, v):
    return "stock quant"
""",
    K3: f"""\
from {K3_OPS} import fused_mla_kv_concat, fused_mla_kv_concat_quant_fp8


class MultiHeadLatentAttention:
    qk_nope_head_dim = 128
    v_head_dim = 128
    layer_name = "model.layers.7.mla"

    def _fused_mla_kv_concat(self, kv_nope, k_pe, use_fp8_prefill):
        return "stock pack"
""",
}


def write(root: Path, sources: dict[str, str] = SOURCES) -> None:
    """Write the modules as files under ``root/vllm``."""
    for module, source in sources.items():
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        for parent in path.relative_to(root).parents:
            if parent.name:
                (root / parent / "__init__.py").touch()
    importlib.invalidate_caches()


def forget() -> None:
    """Remove every module of the package from this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def load(module: str) -> Any:
    """Import one of the modules."""
    found: ModuleType = importlib.import_module(module)
    return found


TARGETS = (
    feature.CONCAT, feature.DCP_LOOP, feature.K3_CONCAT, feature.K3_QUANT, feature.K3_DCP_PACK,
    moe_router.RUNNER, moe_router.GROUPED, moe_router.TOPK, moe_router.K3_GATE,
    kda_decode.LINEAR, kda_decode.K3_SUPPORTED, kda_decode.K3_INIT, kda_decode.K3_OP,
    moe_fp4_preamble.QUANTIZE, moe_fp4_preamble.PREPARE, moe_fp4_preamble.RUNNER, moe_fp4_preamble.BIAS,
    *moe_fp4_preamble.RELOADS,
)  # fmt: skip
LOGGED = ("vllm.hotpath", "INFO")


class Process:
    """This process with the stand-in on its path, as if the plugin had not been loaded yet."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.root, self._monkeypatch, self._caplog = root, monkeypatch, caplog

    def write(self, sources: dict[str, str], *, known: bool = True) -> None:
        """Write the package; its sources become known ones."""
        write(self.root, sources)
        for target in TARGETS if known else ():
            found = targets.probe(target, self.root / "vllm", "0").definition
            if found is not None:
                self._monkeypatch.setitem(target.hashes, found.hash, "stand-in")

    def edit(self, module: str, old: str, new: str, *, known: bool = False) -> None:
        assert old in SOURCES[module]
        self.write({module: SOURCES[module].replace(old, new)}, known=known)

    def set(self, **flags: str) -> None:
        for name, value in flags.items():
            self._monkeypatch.setenv(name, value)

    @property
    def lines(self) -> list[str]:
        return [r.getMessage() for r in self._caplog.records if (r.name, r.levelname) == LOGGED]

    @property
    def warnings(self) -> list[str]:
        return [r.getMessage() for r in self._caplog.records if r.levelno >= logging.WARNING]


def finders() -> list[Any]:
    return [finder for finder in sys.meta_path if getattr(finder, "is_vllm_hotpath", False)]


def wrapped_once(function: Callable[..., Any]) -> bool:
    return hasattr(function, "__wrapped__") and not hasattr(function.__wrapped__, "__wrapped__")


def drift(process: Process, kind: str) -> None:
    if kind == "source":
        process.edit(MLA, "dim=-1)", "dim=2)")
    elif kind == "signature":
        process.edit(MLA, "self, k_nope, k_pe", "self, k_nope, k_pe, out=None")
    elif kind == "object":
        process.edit(MLA, "def _concat_k_nope_k_pe", "def _concat")
    elif kind == "module":
        process.root.joinpath(*MLA.split(".")).with_suffix(".py").unlink()
    elif kind == "optional signature":
        process.edit(MLA, "dcp_world_size, fused", "dcp_world_size, pcp_world_size, fused")
    else:
        process.set(VLLM_HOTPATH_MLA_KV_PACK=kind)


DRIFTS = {
    "source": "has another source (",
    "signature": "has an unknown signature (self, k_nope, k_pe, out=None)",
    "object": f"has no {MLA}.MLACommonBaseImpl._concat_k_nope_k_pe",
    "module": f"has no {MLA}.MLACommonBaseImpl._concat_k_nope_k_pe",
    "optional signature": "has an unknown signature (self, q, ",
    "yes": "VLLM_HOTPATH_MLA_KV_PACK=yes: expected 0 or 1",
}
