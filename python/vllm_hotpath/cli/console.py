"""Where the commands print, the error they stop with, and the device they run on."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_PIPE_WIDTH = 160


class CannotRunError(Exception):
    """The command cannot do what was asked on this machine; the text says why."""


def output() -> Console:
    """The console on standard output; wide where that is no terminal, so that tables keep their columns."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPE_WIDTH if wide else None, highlight=False)


def progress() -> Progress:
    """A transient progress line on standard error, shown only on a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def fail(message: str) -> int:
    """Print a message on standard error and return exit status 1."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}")
    return 1


def print_json(values: Any) -> None:
    """Print JSON on standard output as it is, without colour or wrapping."""
    sys.stdout.write(json.dumps(values, indent=2) + "\n")


def resolve_device(asked: str | None, ops: Iterable[str], *, default: str | None = None) -> torch.device:
    """The device to run ``ops`` on.

    Args:
        asked: ``cpu``, ``cuda`` or ``cuda:N``; None for ``default``.
        ops: public op names, all of which have to run there.
        default: used if nothing was asked; None for CUDA where all of ``ops`` run there, else the CPU.

    Raises:
        CannotRunError: there is no such device, or an op has no kernel for it.
    """
    import torch

    from vllm_hotpath import _core
    from vllm_hotpath.ops import is_supported

    names = list(ops)
    asked = asked or default
    if asked is None:
        usable = torch.cuda.is_available() and all(is_supported(op, "cuda") for op in names)
        asked = "cuda" if usable else "cpu"
    device = torch.device(asked)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        reason = _core.cuda_info()["error"] or f"torch {torch.__version__} sees no GPU"
        raise CannotRunError(f"it needs a CUDA GPU: {reason}")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.index >= torch.cuda.device_count():
        raise CannotRunError(f"{asked}: there are {torch.cuda.device_count()} GPUs")
    for op in names:
        support = is_supported(op, device)
        if not support:
            raise CannotRunError(f"{op} does not run on {device}: {support.reason}")
    return device
