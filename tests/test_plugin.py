"""The plugin without vLLM: how it registers, hooks imports and reports, with a stand-in package."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import vllm_hotpath
from tests import fake_vllm
from tests.fake_vllm import DRIFTS, ENVS, K3, K3_OPS, MLA, SOURCES, drift, finders, wrapped_once
from vllm_hotpath import envs, plugin
from vllm_hotpath.plugin import hooks, report, targets

if TYPE_CHECKING:
    from tests.fake_vllm import Process


# ---- Registration ----


def test_without_flags_nothing_is_patched_and_no_hook_is_installed(process: Process) -> None:
    fake_vllm.load(ENVS)
    plugin.register()
    assert not finders()
    mla, k3 = fake_vllm.load(MLA), fake_vllm.load(K3)
    for module, name in ((mla, "MLACommonBaseImpl"), (k3, "MultiHeadLatentAttention")):
        assert all(not hasattr(value, "__wrapped__") for value in vars(getattr(module, name)).values())
    assert k3.fused_mla_kv_concat is fake_vllm.load(K3_OPS).fused_mla_kv_concat
    assert process.lines == process.warnings == []


def test_without_flags_vllm_keeps_its_variables_and_so_its_compile_key(process: Process) -> None:
    variables = fake_vllm.load(ENVS).environment_variables
    before = dict(variables)
    plugin.register()
    assert variables == before


def test_flags_that_are_set_become_known_and_existing_entries_stay(process: Process) -> None:
    variables = fake_vllm.load(ENVS).environment_variables
    variables[envs.STRICT] = lambda: "theirs"
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1", VLLM_HOTPATH_STRICT="0")
    plugin.register()
    assert set(variables) == {"VLLM_PORT", envs.MLA_KV_PACK, envs.STRICT, envs.VERSION}
    assert variables[envs.STRICT]() == "theirs"
    assert variables[envs.VERSION]() == vllm_hotpath.__version__
    assert variables[envs.MLA_KV_PACK]() == "1"


def test_disabling_leaves_the_version_out_of_the_compile_key(process: Process) -> None:
    variables = fake_vllm.load(ENVS).environment_variables
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1", VLLM_HOTPATH_DISABLE="1")
    plugin.register()
    assert envs.VERSION not in variables


class _AskingFinder:
    """Another package's hook that asks every finder but itself, as ours does."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != MLA:
            return None
        others = (finder for finder in tuple(sys.meta_path) if finder is not self)
        return next((spec for other in others if (spec := other.find_spec(fullname, path, target))), None)


@pytest.mark.parametrize("place", ["before ours", "after ours"])
def test_a_second_finder_that_asks_all_others_does_not_recurse(process: Process, place: str) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    plugin.register()
    other = _AskingFinder()
    sys.meta_path.insert(0 if place == "before ours" else 1, other)  # type: ignore[arg-type]
    try:
        module = fake_vllm.load(MLA)
    finally:
        sys.meta_path.remove(other)  # type: ignore[arg-type]
    assert hasattr(module.MLACommonBaseImpl._concat_k_nope_k_pe, "__wrapped__")


def test_our_loader_can_be_copied_without_its_contents() -> None:
    loader = hooks._Loader.__new__(hooks._Loader)
    with pytest.raises(AttributeError):
        loader._loader  # noqa: B018


def test_flags_become_known_also_where_vllm_is_imported_later(process: Process) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    plugin.register()
    assert envs.MLA_KV_PACK in fake_vllm.load(ENVS).environment_variables


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_module_is_patched_whenever_it_is_imported(process: Process, imported: str) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    if imported == "before":
        fake_vllm.load(MLA), fake_vllm.load(K3)
    plugin.register()
    assert bool(process.lines) == (imported == "before")
    mla, k3 = fake_vllm.load(MLA), fake_vllm.load(K3)
    impl = mla.MLACommonBaseImpl
    for patched in (impl._concat_k_nope_k_pe, impl._context_parallel_compute_prefill_context):
        assert wrapped_once(patched)
    assert wrapped_once(k3.fused_mla_kv_concat)
    assert wrapped_once(k3.fused_mla_kv_concat_quant_fp8)
    assert not hasattr(fake_vllm.load(K3_OPS).fused_mla_kv_concat, "__wrapped__")
    assert not hasattr(k3.MultiHeadLatentAttention._fused_mla_kv_concat, "__wrapped__")
    assert len(process.lines) == 1
    assert process.lines[0].startswith("mla_kv_pack: on: MLACommonBaseImpl._concat_k_nope_k_pe, ")
    assert not process.warnings


def test_registering_again_changes_nothing(process: Process) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1", VLLM_K3_DCP_FUSED_KV_PACK="1")
    plugin.register()
    mla, k3 = fake_vllm.load(MLA), fake_vllm.load(K3)
    first = (dict(vars(mla.MLACommonBaseImpl)), dict(vars(k3)), dict(vars(k3.MultiHeadLatentAttention)))
    plugin.register()
    importlib.reload(plugin).register()
    assert (
        dict(vars(mla.MLACommonBaseImpl)),
        dict(vars(k3)),
        dict(vars(k3.MultiHeadLatentAttention)),
    ) == first
    assert len(finders()) == 1
    assert len(process.lines) == 2


def test_a_reloaded_module_is_patched_again_once(process: Process) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    plugin.register()
    mla = fake_vllm.load(MLA)
    before = mla.MLACommonBaseImpl
    mla = importlib.reload(mla)
    assert mla.MLACommonBaseImpl is not before
    assert wrapped_once(mla.MLACommonBaseImpl._concat_k_nope_k_pe)


def test_a_hooked_module_keeps_its_loader_source_and_signatures(process: Process) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    plugin.register()
    mla = fake_vllm.load(MLA)
    assert type(mla.__loader__) is type(mla.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert inspect.getsource(mla) == SOURCES[MLA]
    loop = mla.MLACommonBaseImpl._context_parallel_compute_prefill_context
    assert list(inspect.signature(loop).parameters)[-1] == "fused_mla_kv_concat_fn"


def test_a_module_that_is_being_imported_stays_stock(process: Process) -> None:
    process.edit(
        MLA, "CALLS = []", "CALLS = []\nfrom vllm_hotpath import plugin\nplugin.register()", known=True
    )
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    mla = fake_vllm.load(MLA)
    assert not hasattr(mla.MLACommonBaseImpl._concat_k_nope_k_pe, "__wrapped__")
    assert process.lines == [f"mla_kv_pack: stock: {MLA} is being imported while plugins are loaded"]


def test_forked_and_spawned_processes_are_patched_once(process: Process) -> None:
    code = f"""
        import logging, multiprocessing, os, sys
        sys.path[:0] = [{str(process.root)!r}, {str(Path(__file__).parents[1])!r}]
        logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
        os.environ["VLLM_HOTPATH_MLA_KV_PACK"] = os.environ["VLLM_HOTPATH_FORCE"] = "1"
        from vllm_hotpath.plugin import register
        register()
        assert not {{"torch", "vllm"}} & set(sys.modules)

        def check():
            from vllm.model_executor.layers.attention import mla_attention
            for _ in range(2):
                register()
                function = mla_attention.MLACommonBaseImpl._concat_k_nope_k_pe
                assert not hasattr(function.__wrapped__, "__wrapped__")
            import torch
            assert not torch.cuda.is_initialized()

        def child(how):
            started = multiprocessing.get_context(how).Process(target=check)
            started.start()
            started.join(100)
            assert started.exitcode == 0, started.exitcode

        if __name__ == "__main__":
            child("fork")
            check()
            child("fork")
            child("spawn")
            sys.stdout.flush()
    """
    path = process.root / "program.py"
    path.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # The parent and its three children.
    assert done.stdout.count("mla_kv_pack: on: ") == 4, done.stdout


def test_a_line_is_seen_also_where_logging_is_not_set_up_yet(tmp_path: Path) -> None:
    code = "from vllm_hotpath.plugin import register\nregister()\nregister()"
    flags = {"VLLM_HOTPATH_MLA_KV_PACK": "1", "VLLM_HOTPATH_DISABLE": "1"}

    def run(**more: str) -> str:
        environ = {**os.environ, **flags, **more}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    assert run() == "INFO [vllm.hotpath] mla_kv_pack: stock: VLLM_HOTPATH_DISABLE=1\n"
    assert run(VLLM_LOGGING_LEVEL="WARNING") == ""
    assert run(VLLM_CONFIGURE_LOGGING="0") == ""


# ---- The table of doctor ----


def test_table_says_what_the_log_says_and_imports_nothing(process: Process) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    mla_row, k3_row, *_ = report.table()
    assert (mla_row["state"], mla_row["available"]) == ("on", True)
    assert f"{MLA}.MLACommonBaseImpl._concat_k_nope_k_pe" in mla_row["patches"]
    assert (k3_row["state"], k3_row["reason"], k3_row["available"]) == ("off", "", True)

    process.set(VLLM_HOTPATH_DISABLE="1")
    assert report.table()[0]["reason"] == "VLLM_HOTPATH_DISABLE=1"
    drift(process, "source")
    process.set(VLLM_HOTPATH_DISABLE="0")
    row = report.table()[0]
    assert (row["state"], row["available"]) == ("stock", False)
    assert row["reason"] == row["unavailable_reason"]
    assert DRIFTS["source"] in row["reason"]
    assert not {name for name in sys.modules if name.startswith("vllm.")}
    assert hooks.PATCHED_BY not in vars(fake_vllm.load(MLA))


def test_without_vllm_the_features_cannot_be_turned_on(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "find_vllm", lambda: None)
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    plugin.register()
    assert process.lines == ["mla_kv_pack: stock: vLLM is not installed"]
