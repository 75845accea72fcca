"""vLLM's context loop under decode context parallelism, in two processes with real collectives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_hotpath import envs
from vllm_hotpath.plugin import targets
from vllm_hotpath.plugin.features import mla_kv_pack as feature

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.gpus(2)])]
)
def test_the_pack_in_the_context_loop_of_two_ranks_gives_the_bits_of_stock(
    device: str, tmp_path: Path
) -> None:
    vllm = targets.find_vllm()
    assert vllm is not None
    if targets.probe(feature.DCP_LOOP, *vllm).nothing_to_patch:
        pytest.skip("the loop of this vLLM takes no pack")
    environ = {name: value for name, value in os.environ.items() if name not in envs.FLAGS}
    environ[envs.MLA_KV_PACK] = "1"
    port = str(free_port())
    logs = [(tmp_path / f"rank-{rank}").open("w+") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.two_ranks", str(rank), port, device],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    texts = [path.read_text() for path in sorted(tmp_path.iterdir())]
    for log in logs:
        log.close()
    assert codes == [0, 0], "\n".join(texts)
    assert all("both loops agree" in text for text in texts)
