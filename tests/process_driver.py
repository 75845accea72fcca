"""Runs the op in child processes: a program for ``test_processes.py``, as a fork wants its own process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch

import vllm_hotpath
from tests.helpers import SEED, as_bits
from tests.pack_cases import make_inputs
from tests.reference import mla_kv_pack as reference

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 40.0


def _make(tokens: int) -> tuple[tuple[torch.Tensor, ...], list[bytes]]:
    rng = torch.Generator().manual_seed(SEED)
    inputs = make_inputs(tokens, 16, (128, 64, 128), torch.device("cpu"), rng)
    wants = [as_bits(want).numpy().tobytes() for want in reference.concat_quant_fp8(*inputs)]
    return inputs, wants


def _is_right(inputs: tuple[torch.Tensor, ...], wants: list[bytes]) -> bool:
    got = vllm_hotpath.mla_kv_concat_quant_fp8(*inputs)
    return [as_bits(tensor).numpy().tobytes() for tensor in got] == wants


def _wait(pid: int) -> int:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise SystemExit("the child did not finish: deadlock after fork")


def _fork(child: Callable[[], bool]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = 0 if child() else 2
        finally:
            os._exit(code)
    if (code := _wait(pid)) != 0:
        raise SystemExit(f"the child exited with {code}")


def fork_after_use() -> None:
    """The parent's worker threads do not exist in the child, nor in the child's child."""
    inputs, wants = _make(600)
    assert _is_right(inputs, wants)

    def grandchild() -> bool:
        return _is_right(inputs, wants)

    def child() -> bool:
        if not _is_right(inputs, wants):
            return False
        _fork(grandchild)
        return True

    _fork(child)
    assert _is_right(inputs, wants)


def fork_during_use() -> None:
    """A fork while other threads are inside the op, the first of them while the thread pool comes to be."""
    inputs, wants = _make(600)
    # Python cannot fork safely during an import, and the first look-up of an op is one.
    assert _is_right(*_make(1))
    stop = threading.Event()

    def work() -> None:
        k_out = torch.empty(600, 16, 192, dtype=torch.float8_e4m3fn)
        v_out = torch.empty(600, 16, 128, dtype=torch.float8_e4m3fn)
        while not stop.is_set():
            vllm_hotpath.mla_kv_concat_quant_fp8(*inputs, k_out=k_out, v_out=v_out)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            _fork(lambda: _is_right(inputs, wants))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _spawned() -> None:
    if not _is_right(*_make(64)):
        raise SystemExit(2)


def spawn() -> None:
    assert _is_right(*_make(64))
    process = multiprocessing.get_context("spawn").Process(target=_spawned)
    process.start()
    process.join(TIMEOUT)
    if process.exitcode != 0:
        process.kill()
        raise SystemExit(f"the spawned process exited with {process.exitcode}")


if __name__ == "__main__":
    {"fork-after-use": fork_after_use, "fork-during-use": fork_during_use, "spawn": spawn}[sys.argv[1]]()
    print("done")
