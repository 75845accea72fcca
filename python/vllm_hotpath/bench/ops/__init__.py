"""What ``verify`` and ``bench`` know of the ops: one module per stem of the registry. No torch here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_hotpath._registry import OPS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_hotpath.bench.spec import OpSpec


def op_names(names: Iterable[str] | None = None) -> list[str]:
    """Turn op names and stems into op names, in the order of ``OPS``; all ops for None or nothing."""
    asked = set(names or OPS)
    return [op for stem, ops in OPS.items() for op in ops if stem in asked or op in asked]


def stem_of(op: str) -> str:
    """The stem of a public op name."""
    return next(stem for stem, ops in OPS.items() if op in ops)


def load(stem: str) -> OpSpec[Any]:
    """Import what is known of a stem, and torch with it."""
    spec: OpSpec[Any] = import_module(f"{__name__}.{stem}").SPEC
    return spec
