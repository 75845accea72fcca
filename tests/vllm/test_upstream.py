"""vLLM's own published tests of what the plugin touches: what passes without it passes with every feature on.

They come from vLLM's source distribution, which ``make test-vllm`` unpacks into vLLM's environment. Many need
a GPU or a model, and fail or skip in both runs here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_hotpath import envs

UPSTREAM = Path(sys.prefix, "upstream")
pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not UPSTREAM.is_dir(), reason="vLLM's tests are not there (make test-vllm)"),
]

# Under vLLM's tests folder; those that this version has.
FILES = (
    "test_envs.py",
    "kernels/moe/test_moe_kernel_oracle.py",
    "kernels/moe/test_moe_weight_loading_padded.py",
    "kernels/moe/test_naive_dp_ep_dbo.py",
    "kernels/moe/test_routing_simulator.py",
    "model_executor/model_loader/test_reload.py",
    "v1/attention/test_mla_noncausal.py",
)
# Everything that has a flag; the second level of the preamble includes the first.
FLAGS = dict.fromkeys((flag for flag in envs.FEATURE_FLAGS if not flag.endswith("_DISABLE")), "1")
FLAGS[envs.MOE_FP4_PREAMBLE] = "2"


class Run:
    """One run of vLLM's tests in a process of its own."""

    def __init__(self, folder: Path, flags: dict[str, str]) -> None:
        self._junit, self._lines = folder / "junit.xml", folder / "lines.json"
        self._log = (folder / "log").open("w+b")
        environ = {name: value for name, value in os.environ.items() if name not in envs.FLAGS}
        environ |= {"HF_HUB_OFFLINE": "1", "HOTPATH_TEST_LINES": str(self._lines), **flags}
        environ["PYTHONPATH"] = str(Path(__file__).parent / "upstream")
        there = [f"tests/{name}" for name in FILES if (UPSTREAM / "tests" / name).is_file()]
        options = ["-q", "-p", "hotpath_loaded", "-p", "no:cacheprovider", "--timeout=120"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, f"--junitxml={self._junit}", *there],
            cwd=UPSTREAM,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def finish(self) -> tuple[dict[str, str], list[str]]:
        """The outcome of every test, and what our plugin logged."""
        self._process.wait(580)
        self._log.seek(0)
        assert self._junit.is_file(), self._log.read().decode()
        return dict(self._outcomes()), json.loads(self._lines.read_text())

    def _outcomes(self) -> list[tuple[str, str]]:
        found = []
        for case in ET.parse(self._junit).getroot().iter("testcase"):
            marks = {child.tag for child in case}
            outcome = next((tag for tag in ("failure", "error", "skipped") if tag in marks), "passed")
            found.append((f"{case.get('classname')}::{case.get('name')}", outcome))
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.mark.timeout(600)
def test_vllms_own_tests_pass_with_every_feature_as_they_do_without(tmp_path: Path) -> None:
    runs = []
    for name, flags in (("stock", {"VLLM_PLUGINS": "none"}), ("ours", FLAGS)):
        (tmp_path / name).mkdir()
        runs.append(Run(tmp_path / name, flags))
    try:
        (stock, silence), (ours, lines) = (run.finish() for run in runs)
    finally:
        for run in runs:
            run.stop()
    assert silence == []
    for feature in ("mla_kv_pack", "moe_router", "moe_fp4_preamble"):
        assert any(line.startswith(f"{feature}: on: ") for line in lines), lines
    passed = [test for test, outcome in stock.items() if outcome == "passed"]
    assert len(passed) > 60, stock
    worse = {test: ours.get(test) for test in passed if ours.get(test) != "passed"}
    assert not worse, worse
