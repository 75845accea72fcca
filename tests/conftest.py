"""Markers, devices and random generators for the tests of every op."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.helpers import SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fake_vllm import Process

GIB = 2**30


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds per test; has no effect without pytest-timeout", default="0")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): has no effect without pytest-timeout")


def pytest_report_header() -> str:
    return f"random data: HOTPATH_TEST_SEED={SEED}"


@functools.cache
def _missing_gpu(ops: tuple[str, ...]) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    from vllm_hotpath import is_supported
    from vllm_hotpath.ops import STEMS

    answers = [is_supported(op, "cuda") for op in ops or STEMS]
    return next((answer.reason for answer in answers if not answer.ok), None)


def _available_host_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _missing_memory(device_gib: float, host_gib: float) -> str | None:
    if _available_host_bytes() < host_gib * GIB:
        return f"needs {host_gib} GiB of free host memory"
    if device_gib:
        gc.collect()
        torch.cuda.empty_cache()
    if device_gib and torch.cuda.mem_get_info()[0] < device_gib * GIB:
        return f"needs {device_gib} GiB of free device memory"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (gpu := item.get_closest_marker("gpu")) is not None:
        reason = _missing_gpu(gpu.args)
        if reason and os.environ.get("HOTPATH_REQUIRE_GPU") == "1":
            pytest.fail(f"HOTPATH_REQUIRE_GPU=1, but: {reason}", pytrace=False)
        if reason:
            pytest.skip(f"gpu: {reason}")
    if (gpus := item.get_closest_marker("gpus")) is not None:
        there = torch.cuda.device_count()
        if there < gpus.args[0] and os.environ.get("HOTPATH_REQUIRE_GPUS") == "1":
            pytest.fail(f"HOTPATH_REQUIRE_GPUS=1, but there are {there} CUDA devices", pytrace=False)
        if there < gpus.args[0]:
            pytest.skip(f"gpus: needs {gpus.args[0]} CUDA devices, there are {there}")
    if (big := item.get_closest_marker("big")) is not None:
        reason = _missing_memory(big.kwargs.get("device_gib", 0), big.kwargs.get("host_gib", 0))
        if reason:
            pytest.skip(f"big: {reason}")


@pytest.fixture(
    scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """CPU generator with its own stream per test, from the run's seed."""
    return torch.Generator().manual_seed(SEED ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Process]:
    """A stand-in for vLLM that can be imported, in a process that the plugin has not been loaded in."""
    from tests import fake_vllm
    from vllm_hotpath import envs
    from vllm_hotpath.plugin import report

    for name in envs.FLAGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(report, "_reported", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    caplog.set_level(logging.INFO, logger="vllm.hotpath")
    fake_vllm.forget()
    found = fake_vllm.Process(tmp_path, monkeypatch, caplog)
    found.write(fake_vllm.SOURCES)
    yield found
    fake_vllm.forget()
