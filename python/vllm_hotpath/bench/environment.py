"""Where a measurement was made: what stands at the head of every result."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from vllm_hotpath import __version__, _core
from vllm_hotpath.bench import peers


def commit(folder: Path) -> str:
    """The commit of this package's checkout around ``folder``, else HOTPATH_COMMIT, else ``unknown``.

    ``-dirty`` is appended if a tracked or new file outside ``benchmarks/results`` differs from the commit.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is not None and (Path(top) / "python" / "vllm_hotpath").is_dir():
        head = _git(Path(top), "rev-parse", "HEAD")
        if head is not None:
            changed = _git(Path(top), "status", "--porcelain", "--", ".", ":!benchmarks/results")
            return head + ("-dirty" if changed else "")
    return os.environ.get("HOTPATH_COMMIT") or "unknown"


def command(program: str, arguments: list[str] | None = None) -> str:
    """The command line that makes a result again."""
    return shlex.join([*program.split(), *(sys.argv[1:] if arguments is None else arguments)])


def collect(program: str, device: torch.device, folder: Path | None = None) -> dict[str, str]:
    """Describe this machine and installation, in the order in which a page shows it.

    Args:
        program: the command that makes the result again, as from :func:`command`.
        device: the device that was measured.
        folder: where to look for the checkout, the working directory by default.
    """
    return {
        "command": program,
        "commit": commit(folder or Path.cwd()),
        "device": device_name(device),
        "driver": _driver(device),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or "-"),
        "package": f"vllm-hotpath {__version__}, kernels by nvcc {_core.build_info()['nvcc']}",
        "peer": _peer(),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or what the CPU calls itself."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {_cpu_name()}"


def slug(device: torch.device) -> str:
    """The GPU's name as the first part of a file name: ``h200``, ``b200``; ``cpu`` for a CPU."""
    if device.type != "cuda":
        return "cpu"
    words = torch.cuda.get_device_name(device).lower().replace("nvidia", " ").replace("/", " ").split()
    return "-".join(words)


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return "-"
    info: dict[str, Any] = _core.cuda_info()
    version = Path("/proc/driver/nvidia/version")
    kernel = (
        next((word for word in version.read_text().split() if word[0].isdigit()), "")
        if version.is_file()
        else ""
    )
    return f"CUDA {info['driver']}" + (f", kernel module {kernel}" if kernel else "")


def _peer() -> str:
    peer = peers.load()
    return f"{peer.label}: {peer.problem}" if peer.problem else peer.label


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
