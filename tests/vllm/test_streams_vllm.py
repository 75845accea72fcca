"""The features that overlap two streams inside a real vLLM, on CPU tensors with stand-ins for the streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_hotpath import envs
from vllm_hotpath.plugin import report, targets
from vllm_hotpath.plugin.features import mla_two_stream, moe_shared_experts

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

ROOT = Path(__file__).parents[2]
TWO_STREAM = (
    mla_two_stream.FORWARD,
    mla_two_stream.WRITE_OP,
    mla_two_stream.ATTENTION_OP,
    mla_two_stream.UPDATE,
    mla_two_stream.WRITE,
)
SHARED = (
    moe_shared_experts.SYNC,
    moe_shared_experts.APPLY,
    moe_shared_experts.RUN,
    moe_shared_experts.ROUTED,
)


@pytest.fixture
def vllm() -> tuple[Path, str]:
    found = targets.find_vllm()
    assert found is not None
    return found


def run(module: str, folder: Path, **flags: str) -> str:
    """Run a module's checks in a process that loads the plugin through vLLM; what it printed."""
    environ = {name: value for name, value in os.environ.items() if name not in envs.FLAGS}
    result = folder / "result"
    done = subprocess.run(
        [sys.executable, "-m", f"tests.vllm.{module}", str(result)],
        cwd=ROOT, env={**environ, **flags}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(result.read_text()) == "compared"
    return done.stdout + done.stderr


def test_the_installed_version_is_known(vllm: tuple[Path, str]) -> None:
    is_0_22 = vllm[1].startswith("0.22.")
    absent = {mla_two_stream.UPDATE, moe_shared_experts.NATIVE} if is_0_22 else set(SHARED[:2])
    for target in (*TWO_STREAM, *SHARED[:2], moe_shared_experts.NATIVE, *(SHARED[2:] if is_0_22 else ())):
        found = targets.probe(target, *vllm)
        assert found.nothing_to_patch == (target in absent), target
        if not found.nothing_to_patch:
            assert not found.problem
            assert found.definition is not None
            assert target.hashes[found.definition.hash] == vllm[1]


def test_doctors_table(vllm: tuple[Path, str]) -> None:
    flags = {envs.MLA_TWO_STREAM: "1", envs.SHARED_EXPERTS_TWO_STREAM: "1"}
    rows = {row["feature"]: row for row in report.table(flags)}
    assert rows["mla_two_stream"]["state"] == "on"
    shared = rows["moe_shared_experts"]
    if vllm[1].startswith("0.22."):
        assert (shared["state"], shared["reason"]) == ("stock", moe_shared_experts._REFUSAL)
    else:
        assert (shared["state"], shared["reason"]) == ("native upstream", "SharedExperts.maybe_forward_async")


def test_two_stream_decode_gives_the_bits_of_stock(tmp_path: Path) -> None:
    log = run("two_stream", tmp_path, **{envs.MLA_TWO_STREAM: "1"})
    assert log.count("mla_two_stream: on: ") == 1


def test_shared_experts_give_the_bits_of_stock_in_every_launch_order(
    tmp_path: Path, vllm: tuple[Path, str]
) -> None:
    if not vllm[1].startswith("0.22."):
        pytest.skip("native upstream")
    log = run("shared_experts", tmp_path, **{envs.SHARED_EXPERTS_TWO_STREAM: "1", envs.FORCE: "1"})
    assert log.count("moe_shared_experts: on: ") == 1
