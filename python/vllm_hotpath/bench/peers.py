"""The ops of an installed vLLM, called for comparison. Its libraries are loaded, vLLM is not imported."""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_PATTERNS = ("_C*.so", "_moe_C*.so")


class Peer(NamedTuple):
    """Where the peer ops come from; ``problem`` says why there are none."""

    label: str
    problem: str


@cache
def load() -> Peer:
    """Load the libraries named in HOTPATH_PEER_LIB (separated as in PATH), else those of an installed vLLM.

    HOTPATH_PEER_VERSION names the version of libraries that are loaded by path.
    """
    named = os.environ.get("HOTPATH_PEER_LIB", "")
    paths = [Path(entry).resolve() for entry in named.split(os.pathsep) if entry]
    if paths:
        names = ", ".join(path.name for path in paths)
        label = " ".join(filter(None, [os.environ.get("HOTPATH_PEER_VERSION", ""), f"({names})"]))
    else:
        found = util.find_spec("vllm")
        if found is None or not found.submodule_search_locations:
            return Peer("absent", "vLLM is not installed and HOTPATH_PEER_LIB is not set")
        label = f"vLLM {_vllm_version()}"
        folder = Path(next(iter(found.submodule_search_locations)))
        paths = sorted(path for pattern in _PATTERNS for path in folder.glob(pattern))
    problems = list(filter(None, map(_load_library, paths)))
    if len(problems) == len(paths):
        return Peer("absent", f"{label}: {'; '.join(problems) or 'no library'}")
    return Peer(label, "; ".join(problems))


def op(namespace: str, name: str) -> Callable[..., Any] | None:
    """The torch op ``namespace::name``, or None where no loaded library has it."""
    load()
    return getattr(getattr(torch.ops, namespace), name, None)


def _load_library(path: Path) -> str:
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0].replace(f"{path.parent}/", "")
        return reason if reason.startswith(path.name) else f"{path.name}: {reason}"
    return ""


def _vllm_version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "of unknown version"
