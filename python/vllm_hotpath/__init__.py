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
    from vllm_hotpath.ops.kda_decode import kda_decode
    from vllm_hotpath.ops.mla_kv_pack import mla_kv_concat, mla_kv_concat_quant_fp8
    from vllm_hotpath.ops.moe_router import moe_router

__version__: str = _build_info()["version"]

# Public name -> the module where it lives.
_EXPORTS = {
    "Support": "vllm_hotpath.ops",
    "is_supported": "vllm_hotpath.ops",
    **{op: f"vllm_hotpath.ops.{stem}" for stem, ops in _OPS.items() for op in ops},
}

__all__ = [
    "Support",
    "__version__",
    "is_supported",
    "kda_decode",
    "mla_kv_concat",
    "mla_kv_concat_quant_fp8",
    "moe_router",
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
