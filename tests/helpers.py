"""Random data, poisoned outputs and bitwise comparison, shared by the tests of every op."""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
# Fresh for every run. The environment carries it to worker processes, and sets it to repeat a run.
SEED = int(os.environ.setdefault("HOTPATH_TEST_SEED", str(secrets.randbits(31))))

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DTYPES = (BF16, FP16, E4M3)

POISON = 0x7F
GUARD = 0xAA
_GUARD_BYTES = 512
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage seen as integers, so that comparison knows no NaN and no negative zero."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _as_hex(bits: torch.Tensor) -> str:
    width = bits.element_size()
    return f"0x{int(bits) & (256**width - 1):0{2 * width}x}"


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "result") -> None:
    """Compare bit patterns; the message gives the first differing coordinate and both values."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got_bits, want_bits = as_bits(got).cpu(), as_bits(want).cpu()
    differ = got_bits != want_bits
    if not differ.any():
        return
    where = tuple(differ.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}{list(where)}: got {_as_hex(got_bits[where])}, expected {_as_hex(want_bits[where])}"
        f" ({int(differ.sum())} of {differ.numel()} elements differ; HOTPATH_TEST_SEED={SEED})"
    )


def random_patterns(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Uniformly random bit patterns on the CPU: NaNs, infinities and subnormals included."""
    width = dtype.itemsize
    raw = torch.randint(0, 256, (math.prod(shape) * width,), dtype=torch.uint8, generator=rng)
    return raw.view(dtype).view(shape)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Half values spread over the range that e4m3 resolves, half random bit patterns, on the CPU."""
    patterns = random_patterns(shape, dtype, rng)
    if dtype == E4M3:
        return patterns
    spread = torch.randn(shape, generator=rng) * torch.exp2(torch.rand(shape, generator=rng) * 20 - 11)
    mixed = torch.where(torch.rand(shape, generator=rng) < 0.5, as_bits(spread.to(dtype)), as_bits(patterns))
    return mixed.view(dtype)


def strided(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    rng: torch.Generator,
    *,
    offset: int = 0,
) -> torch.Tensor:
    """View of the given strides and offset (in elements) into random storage, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size > 1)
    length = offset + (last + 1 if math.prod(shape) else 0)
    storage = random_values((length,), dtype, rng).to(device)
    return storage.as_strided(shape, strides, offset)


def every_pattern(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Every bit pattern of a 16-bit or 8-bit dtype, in order, repeated to fill ``shape``."""
    count = 256**dtype.itemsize
    codes = torch.arange(math.prod(shape)) % count
    integer = torch.int16 if dtype.itemsize == 2 else torch.uint8
    codes = codes - count * (codes >= count // 2) if integer is torch.int16 else codes
    return codes.to(integer).view(dtype).view(shape).to(device)


class Output:
    """A poisoned output with guard bytes on both sides."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, shift: int = 0
    ) -> None:
        self._size = math.prod(shape) * dtype.itemsize
        self._start = _GUARD_BYTES + shift * dtype.itemsize
        total = self._start + self._size + _GUARD_BYTES
        self._storage = torch.full((total,), GUARD, dtype=torch.uint8, device=device)
        body = self._storage[self._start : self._start + self._size]
        body.fill_(POISON)
        self.tensor = body.view(dtype).view(shape)

    def assert_guards_intact(self, what: str = "output") -> None:
        """No byte before or after the output was written."""
        before = self._storage[: self._start]
        after = self._storage[self._start + self._size :]
        assert (before == GUARD).all(), f"{what}: bytes before it were written"
        assert (after == GUARD).all(), f"{what}: bytes after it were written"

    def assert_untouched(self, what: str = "output") -> None:
        """Not one byte of the output was written."""
        self.assert_guards_intact(what)
        body = self._storage[self._start : self._start + self._size]
        assert (body == POISON).all(), f"{what}: written although the call failed"


def run_python(code: str) -> str:
    """What the code prints in a process of its own, which imports the tests."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def far_rows(memory: torch.Tensor, like: torch.Tensor, row_bytes: int, shift: int = 0) -> torch.Tensor:
    """A copy of a matrix in ``memory``: rows more than ``row_bytes`` apart, from element ``shift`` on."""
    stride = row_bytes // like.element_size() + 8 + shift
    return memory.view(like.dtype).as_strided(like.shape, (stride, 1), shift).copy_(like)


def capture(body: Callable[[], Any], *, keep_graph: bool = False) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The CUDA graph of one call of `body`, and what that call returned."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with torch.cuda.graph(graph):
        result = body()
    return graph, result
