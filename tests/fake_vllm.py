"""A package named ``vllm`` with the few objects that the plugin patches, for tests without vLLM."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from vllm_hotpath.plugin import targets
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

SOURCES = {
    ENVS: """\
import os
environment_variables = {"VLLM_PORT": lambda: os.environ.get("VLLM_PORT")}
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


TARGETS = (feature.CONCAT, feature.DCP_LOOP, feature.K3_CONCAT, feature.K3_QUANT, feature.K3_DCP_PACK)
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
