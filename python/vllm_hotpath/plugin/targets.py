"""What the plugin may patch, and whether it is what we know: probes of vLLM's source files.

A probe reads the file and imports nothing, so that ``doctor`` and ``register`` see the same. An object is
known by its signature, and by the hash of its source in every vLLM version that its patch was checked with.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Target:
    """An object of vLLM that a feature replaces.

    Attributes:
        module: where the object is replaced.
        names: qualified names that it has in different versions; the first that exists counts.
        signatures: its known parameter lists, without annotations.
        hashes: known source hash -> the vLLM version that has it.
        settled: the same for versions in which there is nothing to patch.
        defined_in: where its source is, if ``module`` only imports it by name.
    """

    module: str
    names: tuple[str, ...]
    signatures: tuple[str, ...]
    hashes: Mapping[str, str] = field(hash=False)
    settled: Mapping[str, str] = field(hash=False, default_factory=dict)
    defined_in: str | None = None

    @property
    def source_module(self) -> str:
        """The module whose file has the source."""
        return self.defined_in or self.module


class Definition(NamedTuple):
    """One function of a source file."""

    name: str
    signature: str
    parameters: tuple[str, ...]
    hash: str
    line: int
    decorators: int


class Probe(NamedTuple):
    """What a probe found: no ``problem`` if it may be patched; it may be absent or need no patch."""

    definition: Definition | None
    problem: str
    nothing_to_patch: bool = False


def find_vllm() -> tuple[Path, str] | None:
    """Folder and version of the installed vLLM, without importing it; None where there is none."""
    try:
        spec = util.find_spec("vllm")
    except ValueError:  # a module without a spec was put into sys.modules
        return None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    try:
        return root, metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return root, "of unknown version"


def probe(target: Target, root: Path, version: str, *, force: bool = False) -> Probe:
    """Compare a target with what is known of it. ``force`` accepts another source under a known signature."""
    definitions = _definitions_of(target.source_module, root)
    definition = next((definitions[name] for name in target.names if name in definitions), None)
    if definition is None:
        return Probe(
            None, f"vLLM {version} has no {target.source_module}.{target.names[0]}", nothing_to_patch=True
        )
    where = f"{target.source_module}.{definition.name}"
    if definition.hash in target.settled:
        return Probe(definition, f"{where} of vLLM {version} needs no patch", nothing_to_patch=True)
    if definition.signature not in target.signatures:
        problem = f"{where} of vLLM {version} has an unknown signature ({definition.signature})"
        return Probe(definition, problem)
    if definition.hash not in target.hashes and not force:
        versions = ", ".join(sorted(set(target.hashes.values())))
        problem = (
            f"{where} of vLLM {version} has another source ({definition.hash}) than in {versions};"
            " VLLM_HOTPATH_FORCE=1 patches it nevertheless"
        )
        return Probe(definition, problem)
    return Probe(definition, "")


def parameters(target: Target, root: Path) -> tuple[str, ...]:
    """Parameter names of a target, whatever its source; empty where it does not exist."""
    definitions = _definitions_of(target.source_module, root)
    return next((definitions[name].parameters for name in target.names if name in definitions), ())


def _definitions_of(module: str, root: Path) -> dict[str, Definition]:
    stem = root.joinpath(*module.split(".")[1:])
    for path in (stem.with_name(stem.name + ".py"), stem / "__init__.py"):
        if path.is_file():
            stat = path.stat()
            return _definitions(path, stat.st_mtime_ns, stat.st_size)
    return {}


@lru_cache(maxsize=32)
def _definitions(path: Path, _modified: int, _size: int) -> dict[str, Definition]:
    """Every function of the file, and every method of its classes, by qualified name."""
    source = path.read_bytes()
    # Of bytes, splitlines breaks where Python's own line count does, and nowhere else.
    lines = source.splitlines(keepends=True)
    found: dict[str, Definition] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + node.name
                found[name] = _define(name, node, lines)

    visit(ast.parse(source, str(path)).body, "")
    return found


def _define(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[bytes]) -> Definition:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    text = b"".join(lines[first - 1 : node.end_lineno])
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in (*every, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    return Definition(
        name,
        ast.unparse(arguments),
        tuple(argument.arg for argument in every),
        hashlib.sha256(text).hexdigest()[:16],
        first,
        len(node.decorator_list),
    )
