"""Drop-in GPU ops for the hot paths of Kimi and DeepSeek models, and the vLLM plugin that uses them.

Importing the package loads neither torch nor CUDA. An op is loaded, with torch, when it is first looked up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_hotpath._core import build_info as _build_info
from vllm_hotpath._registry import OPS as _OPS

if TYPE_CHECKING:
    from vllm_hotpath.ops import Support, is_supported
    from vllm_hotpath.ops.kda_decode import kda_decode, kda_decode_spec
    from vllm_hotpath.ops.mla_kv_pack import mla_kv_concat, mla_kv_concat_quant_fp8
    from vllm_hotpath.ops.moe_fp4_preamble import MoePreamble, moe_fp4_preamble
    from vllm_hotpath.ops.moe_router import moe_router
    from vllm_hotpath.ops.nvfp4_quant import add_rms_norm_nvfp4, nvfp4_quantize, silu_mul_nvfp4
    from vllm_hotpath.overlap import ForkJoin, run_overlapped
    from vllm_hotpath.routing_bias import refresh_routing_bias

__version__: str = _build_info()["version"]

# Public name -> the module where it lives.
_EXPORTS = {
    "ForkJoin": "vllm_hotpath.overlap",
    "MoePreamble": "vllm_hotpath.ops.moe_fp4_preamble",
    "Support": "vllm_hotpath.ops",
    "is_supported": "vllm_hotpath.ops",
    "refresh_routing_bias": "vllm_hotpath.routing_bias",
    "run_overlapped": "vllm_hotpath.overlap",
    **{op: f"vllm_hotpath.ops.{stem}" for stem, ops in _OPS.items() for op in ops},
}

__all__ = [
    "ForkJoin",
    "MoePreamble",
    "Support",
    "__version__",
    "add_rms_norm_nvfp4",
    "is_supported",
    "kda_decode",
    "kda_decode_spec",
    "mla_kv_concat",
    "mla_kv_concat_quant_fp8",
    "moe_fp4_preamble",
    "moe_router",
    "nvfp4_quantize",
    "refresh_routing_bias",
    "run_overlapped",
    "silu_mul_nvfp4",
]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"vllm_hotpath.{name} needs torch 2.10 or newer, which is not installed") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
