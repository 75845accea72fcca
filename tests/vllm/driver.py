"""What runs in processes of its own for ``test_plugin_vllm.py``: vLLM loads the plugin, as it does anywhere.

Nothing of ``vllm_hotpath`` is imported until vLLM does it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

MLA = "vllm.model_executor.layers.attention.mla_attention"
K3 = "vllm.models.kimi_k3.nvidia.mla"
K3_OPS = "vllm.models.kimi_k3.nvidia.ops.fused_mla_key_concat_kv_cache"
K3_MODEL = "vllm.models.kimi_k3.nvidia.model"
K3_KDA = "vllm.models.kimi_k3.nvidia.kda"
KIMI_LINEAR = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
OPS = "vllm._custom_ops"
MOE_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
GROUPED_ROUTER = "vllm.model_executor.layers.fused_moe.router.grouped_topk_router"
TOPK_ROUTER = "vllm.model_executor.layers.fused_moe.router.fused_topk_router"
SHARED_EXPERTS = "vllm.model_executor.layers.fused_moe.runner.shared_experts"
BACKEND = "vllm.v1.attention.backend"
PREPARE = "vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep"
TRTLLM = "vllm.model_executor.layers.fused_moe.experts.trtllm_nvfp4_moe"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
GATE = "vllm.model_executor.layers.fused_moe.router.gate_linear"
PATCHED = (
    MLA, K3, K3_OPS, K3_MODEL, K3_KDA, KIMI_LINEAR, OPS, MOE_RUNNER, GROUPED_ROUTER, TOPK_ROUTER, GATE,
    SHARED_EXPERTS, BACKEND, PREPARE, TRTLLM, RELOAD,
)  # fmt: skip
FLAG = "VLLM_HOTPATH_MLA_KV_PACK"


def modules() -> list[str]:
    """The modules that this vLLM has of those that the plugin patches."""
    import vllm

    root = Path(vllm.__file__).parent.parent
    return [name for name in PATCHED if root.joinpath(*name.split(".")).with_suffix(".py").is_file()]


def snapshot() -> dict[str, Any]:
    """Every object of those modules and of the classes that they define, by name."""
    found: dict[str, Any] = {}
    for name in modules():
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            if key.startswith("__"):
                continue
            found[f"{name}:{key}"] = value
            if inspect.isclass(value) and value.__module__ == name:
                found.update({f"{name}:{key}.{attribute}": item for attribute, item in vars(value).items()})
    return found


def fingerprint(value: Any) -> str:
    """The same text for the same function of the same file, in any process."""
    if not inspect.isfunction(value):
        return type(value).__qualname__
    code = value.__code__
    digest = hashlib.sha256(code.co_code).hexdigest()[:16]
    return f"{value.__module__}.{value.__qualname__} {code.co_filename}:{code.co_firstlineno} {digest}"


def fingerprints() -> dict[str, str]:
    return {name: fingerprint(value) for name, value in snapshot().items()}


def load_plugins() -> None:
    from vllm import plugins

    plugins.plugins_loaded = False
    plugins.load_general_plugins()


def our_finders() -> list[Any]:
    return [finder for finder in sys.meta_path if getattr(finder, "is_vllm_hotpath", False)]


# ---- Flags unset ----


def with_plugin() -> dict[str, str]:
    """The plugin comes first, and vLLM's modules after it."""
    load_plugins()
    assert "vllm_hotpath.plugin" in sys.modules
    assert not our_finders()
    return fingerprints()


def without_plugin() -> dict[str, str]:
    """vLLM's modules without the plugin; then the plugin, without flags and with them."""
    load_plugins()
    assert "vllm_hotpath" not in sys.modules
    found = fingerprints()

    before, finders = snapshot(), list(sys.meta_path)
    del os.environ["VLLM_PLUGINS"]
    load_plugins()
    assert "vllm_hotpath.plugin" in sys.modules
    after = snapshot()
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert sys.meta_path == finders

    from tests.vllm import compare, compare_kda_decode, compare_moe_fp4_preamble, compare_moe_router

    compare.run()
    compare_kda_decode.run()
    compare_moe_router.run()
    compare_moe_fp4_preamble.run()
    return found


# ---- Flags set, in the process that vLLM inspects model classes in ----


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def validate(hard_fail: bool) -> None:
    from vllm import envs

    if hasattr(envs, "validate_environ"):
        envs.validate_environ(hard_fail)
    else:
        from vllm.platforms import current_platform

        current_platform.validate_environ(hard_fail)


def check_environment() -> None:
    """Our flags are known variables, and parts of the compile cache's key."""
    from vllm import envs

    import vllm_hotpath

    handler = _Warnings()
    loggers = [logging.getLogger(name) for name in ("vllm.envs", "vllm.platforms.interface")]
    for logger in loggers:
        logger.addHandler(handler)
    validate(True)
    validate(False)
    assert not handler.messages, handler.messages
    os.environ["VLLM_HOTPATH_NO_SUCH_FLAG"] = "1"
    validate(False)
    assert len(handler.messages) == 1, "the check of the check"
    del os.environ["VLLM_HOTPATH_NO_SUCH_FLAG"]
    for logger in loggers:
        logger.removeHandler(handler)

    factors = envs.compile_factors()
    assert factors["VLLM_HOTPATH_VERSION"] == vllm_hotpath.__version__
    os.environ[FLAG] = "0"
    assert envs.compile_factors() != factors
    os.environ[FLAG] = "1"
    assert envs.compile_factors() == factors
    version, vllm_hotpath.envs.__version__ = vllm_hotpath.envs.__version__, "another"
    assert envs.compile_factors() != factors
    vllm_hotpath.envs.__version__ = version
    assert getattr(envs, FLAG) == "1"


def base(mla: Any) -> Any:
    """The class that has the concat."""
    return mla.MLACommonBaseImpl if hasattr(mla, "MLACommonBaseImpl") else mla.MLACommonImpl


def check_patched(mla: Any) -> None:
    function = base(mla)._concat_k_nope_k_pe
    assert function.__module__ == MLA
    assert function.__code__.co_filename != mla.__file__
    assert function.__wrapped__.__code__.co_filename == mla.__file__


def loaded() -> str:
    """Runs in ``vllm.model_executor.models.registry``, which has loaded the plugin."""
    import torch

    from vllm_hotpath.plugin import register

    assert len(our_finders()) == 1
    assert not torch.cuda.is_initialized()
    check_environment()
    mla = importlib.import_module(MLA)
    check_patched(mla)
    assert type(mla.__loader__).__name__ == "SourceFileLoader"
    function = base(mla)._concat_k_nope_k_pe
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            load_plugins()
            register()
            check_patched(mla)
            assert base(mla)._concat_k_nope_k_pe is function
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert not torch.cuda.is_initialized()
    return "loaded"


# ---- A spawned process ----


def _spawned() -> None:
    from vllm import envs, plugins

    plugins.load_general_plugins()
    assert len(our_finders()) == 1
    assert envs.VLLM_HOTPATH_MLA_KV_PACK == "1"
    assert MLA not in sys.modules

    os.environ["VLLM_HOTPATH_STRICT"] = "1"
    os.environ["VLLM_K3_DCP_FUSED_KV_PACK"] = "1"
    problem = ""
    try:
        load_plugins()
    except RuntimeError as error:
        problem = str(error)
    if K3 in modules():
        assert not problem, problem
    else:
        assert "k3_dcp_kv_pack cannot be turned on: vLLM 0.22.1 has no " in problem, problem


def spawn() -> str:
    child = multiprocessing.get_context("spawn").Process(target=_spawned)
    child.start()
    child.join(150)
    assert child.exitcode == 0, child.exitcode
    return "spawned"


if __name__ == "__main__":
    result = {"with": with_plugin, "without": without_plugin, "spawn": spawn}[sys.argv[1]]()
    Path(sys.argv[2]).write_text(json.dumps(result))
