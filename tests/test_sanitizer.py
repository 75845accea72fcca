"""The kernels under compute-sanitizer: no access out of bounds, no race, no read of unwritten memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]
_CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "initcheck": "ERROR SUMMARY: 0 errors",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", list(_CLEAN))
@pytest.mark.parametrize(
    "stem",
    ["mla_kv_pack", "kda_decode", "kda_decode_spec", "nvfp4_quant", "moe_router", "moe_fp4_preamble"],
)
def test_kernels_are_clean(stem: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    command = [sanitizer, "--tool", tool, sys.executable, "-m", f"tests.sanitizer_{stem}"]
    # Every tensor in its own allocation: an access past its end is then an error, not a neighbour's byte.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850, check=False
    )
    output = done.stdout + done.stderr
    assert "all calls right" in output, output[-8000:]
    assert _CLEAN[tool] in output, output[-8000:]
    assert done.returncode == 0, output[-8000:]
