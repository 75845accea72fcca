"""The machine code inside the built extension: every kernel for every target, no spills, wide accesses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from vllm_hotpath import _core

if TYPE_CHECKING:
    from collections.abc import Iterator

INFO = _core.build_info()
STEMS = tuple(INFO["stems"])
# Kernels whose point is 16-byte accesses; the general ones take whatever alignment comes.
_WIDE = re.compile(r"mla_kv_(pack|concat)(?!.*(generic|strided))")
_RESOURCES = re.compile(r"Function (\S+):\s*\n\s*(REG:.*)")
_FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.MULTILINE)


class Kernel(NamedTuple):
    target: str
    name: str
    resources: dict[str, int]
    sass: str


def _tool(name: str) -> str | None:
    packages = Path(sys.prefix, "lib").glob(f"python3*/site-packages/nvidia/**/bin/{name}")
    return next((str(path) for path in sorted(packages)), None) or shutil.which(name)


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    missing = [name for name in ("cuobjdump", "nvdisasm") if _tool(name) is None]
    if missing and os.environ.get("HOTPATH_REQUIRE_CUOBJDUMP") == "1":
        pytest.fail(f"HOTPATH_REQUIRE_CUOBJDUMP=1, but {' and '.join(missing)} is not installed")
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed (pip install nvidia-cuda-{missing[0]})")
    return _tool("cuobjdump") or ""


def _run(tool: str, *arguments: str, cwd: Path) -> str:
    disassembler = str(Path(_tool("nvdisasm") or "").parent)
    environment = os.environ | {"PATH": f"{disassembler}:{os.environ['PATH']}"}
    done = subprocess.run(
        [tool, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _kernels(tool: str, stem: str, folder: Path) -> tuple[Kernel, ...]:
    fatbin = folder / f"{stem}.fatbin"
    fatbin.write_bytes(_core.fatbin(stem))
    _run(tool, "--extract-elf", "all", fatbin.name, cwd=folder)
    return tuple(
        kernel
        for cubin in sorted(folder.glob(f"{stem}*.cubin"))
        for kernel in _read_cubin(tool, cubin.name, folder)
    )


def _read_cubin(tool: str, cubin: str, folder: Path) -> Iterator[Kernel]:
    target = re.search(r"\.(sm_\w+)\.", cubin)
    assert target is not None, f"{cubin} does not say its target"
    pieces = _FUNCTION.split(_run(tool, "-sass", cubin, cwd=folder))
    sass = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    for name, line in _RESOURCES.findall(_run(tool, "--dump-resource-usage", cubin, cwd=folder)):
        resources = {key: int(value) for key, value in re.findall(r"(\w+(?:\[\d+\])?):(\d+)", line)}
        yield Kernel(target[1], name, resources, sass[name])


@pytest.fixture(scope="module", params=STEMS)
def kernels(
    request: pytest.FixtureRequest, cuobjdump: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Kernel, ...]:
    return _kernels(cuobjdump, request.param, tmp_path_factory.mktemp(request.param))


def test_every_kernel_is_there_for_every_target(
    request: pytest.FixtureRequest, kernels: tuple[Kernel, ...]
) -> None:
    stem = request.node.callspec.params["kernels"]
    for target in INFO["targets"]:
        base = re.sub(r"[af]$", "", target)
        found = {kernel.name for kernel in kernels if re.sub(r"[af]$", "", kernel.target) == base}
        missing = set(INFO["kernels"][stem]) - found
        assert not missing, f"{target}: {sorted(missing)} missing; there: {sorted(found)}"


def test_no_kernel_spills_or_uses_local_memory(kernels: tuple[Kernel, ...]) -> None:
    assert kernels
    for kernel in kernels:
        used = {key: kernel.resources[key] for key in ("STACK", "LOCAL")}
        assert used == {"STACK": 0, "LOCAL": 0}, f"{kernel.target} {kernel.name}: {used}"
        local = re.search(r"^.*\b(LDL|STL)\b.*$", kernel.sass, re.MULTILINE)
        assert local is None, f"{kernel.target} {kernel.name}: {local and local[0].strip()}"


@pytest.mark.parametrize("kernels", ["mla_kv_pack"], indirect=True)
def test_fast_pack_kernels_load_and_store_16_bytes_or_more(kernels: tuple[Kernel, ...]) -> None:
    wide = [kernel for kernel in kernels if _WIDE.search(kernel.name)]
    assert wide
    for kernel in wide:
        loads = re.findall(r"\b(?:LDG|LD)\.E[.\w]*", kernel.sass)
        assert any(re.search(r"\.(128|256)\b", load) for load in loads), (
            f"{kernel.target} {kernel.name}: loads are {sorted(set(loads))}"
        )
        stores = re.findall(r"\b(?:STG|ST)\.E[.\w]*", kernel.sass)
        assert any(re.search(r"\.(64|128|256)\b", store) for store in stores), (
            f"{kernel.target} {kernel.name}: stores are {sorted(set(stores))}"
        )


@pytest.mark.parametrize("kernels", ["nvfp4_quant", "moe_fp4_preamble"], indirect=True)
def test_e2m1_is_converted_by_the_instruction_where_there_is_one(kernels: tuple[Kernel, ...]) -> None:
    for kernel in kernels:
        native = re.search(r"\bF2FP\.\S*E2M1", kernel.sass)
        assert (native is None) == kernel.target.startswith("sm_90"), f"{kernel.target} {kernel.name}"


@pytest.mark.parametrize("kernels", ["moe_router", "moe_fp4_preamble"], indirect=True)
def test_gates_read_their_operands_16_bytes_at_a_time(kernels: tuple[Kernel, ...]) -> None:
    aligned = [kernel for kernel in kernels if not kernel.name.endswith("_any")]
    assert aligned
    for kernel in aligned:
        wide = re.findall(r"\bLDG\.E\.128\b", kernel.sass)
        # Weights of the first steps, those of the next ones, and the activations.
        assert len(wide) >= 12, f"{kernel.target} {kernel.name}: {len(wide)} loads of 16 bytes"
        assert "HMMA" in kernel.sass, f"{kernel.target} {kernel.name}"


def test_mla_kv_pack_is_built() -> None:
    assert "mla_kv_pack" in STEMS
    assert INFO["kernels"]["mla_kv_pack"]
    assert {re.sub(r"[af]$", "", target) for target in INFO["targets"]} >= {"sm_90", "sm_100", "sm_120"}


def test_extension_is_small_and_links_no_cuda_torch_or_python_library() -> None:
    extension = Path(_core.__file__)
    assert extension.stat().st_size < 10 * 2**20
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    dynamic = _run(readelf, "-d", str(extension), cwd=extension.parent)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert needed
    foreign = [name for name in needed if re.match(r"lib(cuda|nv|torch|c10|python|stdc\+\+)", name)]
    assert not foreign, f"linked: {foreign}"
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic), dynamic
