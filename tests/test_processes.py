"""What importing the package does to a process, the plugin entry point, and the op after fork and spawn."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run(*arguments: str, timeout: float = 120) -> str:
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run_code(code: str) -> str:
    return _run("-c", textwrap.dedent(code))


def test_importing_loads_neither_torch_nor_cuda() -> None:
    out = _run_code("""
        import sys
        import vllm_hotpath

        assert vllm_hotpath.__version__
        assert not {"torch", "numpy", "vllm", "rich"} & set(sys.modules), "a heavy module was imported"
        with open("/proc/self/maps") as maps:
            loaded = maps.read()
        for library in ("libcuda.so", "libcudart", "libtorch", "libnvidia"):
            assert library not in loaded, library
        print("clean")
    """)
    assert out == "clean\n"


def test_listing_the_public_names_loads_nothing() -> None:
    out = _run_code("""
        import sys
        import vllm_hotpath

        assert set(vllm_hotpath.__all__) <= set(dir(vllm_hotpath))
        assert "torch" not in sys.modules
        try:
            vllm_hotpath.no_such_op
        except AttributeError as error:
            print(error)
    """)
    assert "no_such_op" in out


def test_without_torch_the_import_works_and_an_op_says_what_is_missing() -> None:
    out = _run_code("""
        import sys

        sys.modules["torch"] = None
        import vllm_hotpath
        from vllm_hotpath import _core

        assert _core.build_info()["version"] == vllm_hotpath.__version__
        for name in ("mla_kv_concat", "is_supported"):
            try:
                getattr(vllm_hotpath, name)
            except ImportError as error:
                assert "torch" in str(error), error
            else:
                raise SystemExit(f"{name} is there without torch")
        print("clean")
    """)
    assert out == "clean\n"


def test_a_call_on_the_cpu_does_not_initialise_cuda() -> None:
    out = _run_code("""
        import torch
        import vllm_hotpath

        with open("/proc/self/maps") as maps:
            before = "libcuda.so" in maps.read()
        x = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
        vllm_hotpath.mla_kv_concat_quant_fp8(x, x[:, 0], x)
        vllm_hotpath.is_supported("mla_kv_concat", "cpu")
        assert not torch.cuda.is_initialized()
        with open("/proc/self/maps") as maps:
            assert ("libcuda.so" in maps.read()) == before
        print("clean")
    """)
    assert out == "clean\n"


def test_plugin_entry_point_is_declared_once() -> None:
    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "vllm_hotpath"]
    assert [point.value for point in found] == ["vllm_hotpath.plugin:register"]


def test_plugin_may_be_loaded_any_number_of_times_and_imports_nothing() -> None:
    out = _run_code("""
        import sys
        from importlib.metadata import entry_points

        (point,) = entry_points(group="vllm.general_plugins", name="vllm_hotpath")
        register = point.load()
        for _ in range(3):
            assert register() is None
        assert not {"torch", "vllm"} & set(sys.modules)
        with open("/proc/self/maps") as maps:
            assert "libcuda.so" not in maps.read()
        print("clean")
    """)
    assert out == "clean\n"


@pytest.mark.parametrize("how", ["fork-after-use", "fork-during-use", "spawn"])
def test_child_processes_run_the_op(how: str) -> None:
    assert _run("-m", "tests.process_driver", how, timeout=200).endswith("done\n")
