"""The environment flags of the plugin: their names, and how a value is read. Needs no vLLM.

A flag is listed here if and only if this version has its feature.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_hotpath import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MLA_KV_PACK = "VLLM_HOTPATH_MLA_KV_PACK"
K3_DCP_KV_PACK = "VLLM_K3_DCP_FUSED_KV_PACK"
K3_DCP_KV_PACK_DISABLE = "VLLM_K3_DCP_FUSED_KV_PACK_DISABLE"
MLA_TWO_STREAM = "VLLM_MLA_TWO_STREAM_DECODE"
SHARED_EXPERTS_TWO_STREAM = "VLLM_MOE_SHARED_EXPERTS_TWO_STREAM"
KDA_DECODE = "VLLM_HOTPATH_KDA_DECODE"
MOE_ROUTER = "VLLM_HOTPATH_MOE_ROUTER"
MOE_FP4_PREAMBLE = "VLLM_MOE_FP4_PREAMBLE_FUSION"
DISABLE = "VLLM_HOTPATH_DISABLE"
FORCE = "VLLM_HOTPATH_FORCE"
STRICT = "VLLM_HOTPATH_STRICT"

FEATURE_FLAGS = (
    MLA_KV_PACK,
    K3_DCP_KV_PACK,
    K3_DCP_KV_PACK_DISABLE,
    MLA_TWO_STREAM,
    SHARED_EXPERTS_TWO_STREAM,
    KDA_DECODE,
    MOE_ROUTER,
    MOE_FP4_PREAMBLE,
)
FLAGS = (*FEATURE_FLAGS, DISABLE, FORCE, STRICT)
# Not a flag: what vLLM's compile cache keys on, so that another version of this package compiles anew.
VERSION = "VLLM_HOTPATH_VERSION"

_MEANINGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False, "": None}


def read(name: str, environ: Mapping[str, str] | None = None) -> bool | None:
    """Read a flag; None where it is unset or empty.

    Raises:
        ValueError: its value is not one of 0, 1, false, true, off, on.
    """
    value = (os.environ if environ is None else environ).get(name, "")
    try:
        return _MEANINGS[value.strip().lower()]
    except KeyError:
        raise ValueError(f"{name}={value}: expected 0 or 1") from None


def level(name: str, highest: int, environ: Mapping[str, str] | None = None) -> int:
    """Read a flag that has levels: 0 where it is unset or off, 1 for on, a number up to ``highest``.

    Raises:
        ValueError: its value is none of these.
    """
    value = (os.environ if environ is None else environ).get(name, "").strip().lower()
    if value in map(str, range(highest + 1)):
        return int(value)
    try:
        return int(bool(_MEANINGS[value]))
    except KeyError:
        raise ValueError(f"{name}={value}: expected 0 to {highest}") from None


def is_disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether nothing may be patched. A value that cannot be read disables too."""
    try:
        return read(DISABLE, environ) is True
    except ValueError:
        return True


def is_on(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether FORCE or STRICT is set. A value that cannot be read counts as 0."""
    try:
        return read(name, environ) is True
    except ValueError:
        return False


def add_to(variables: dict[str, Callable[[], Any]]) -> None:
    """Make the flags that are set known to vLLM, in its ``vllm.envs.environment_variables``.

    vLLM warns of ``VLLM_*`` variables that it does not know, or refuses them; and its compile cache keys on
    those that it knows, so a flag that is not set stays out of it, and this package's version comes in with
    the first flag only. Entries that are there already stay.
    """
    given = [name for name in FLAGS if name in os.environ]
    for name in given:
        variables.setdefault(name, partial(os.environ.get, name))
    if any(name in FEATURE_FLAGS for name in given) and not is_disabled():
        variables.setdefault(VERSION, lambda: __version__)
