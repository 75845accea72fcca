"""The reference e4m3 cast, inputs full of awkward values, guarded outputs and the comparisons."""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3_MAX = 448.0

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Where an e4m3 cast has its edges: zero, half of and all of the smallest subnormal, the smallest normal,
# ties, the largest value, what still rounds to it, what has to saturate, the ends of fp16 and bf16.
# fmt: off
_EDGES = (
    0.0, 2**-10, 2**-9, 3 * 2**-10, 2**-6, 1.0, 1.0625, 17.0, 416.0, 432.0, 448.0, 456.0, 464.0, 466.0, 480.0,
    65504.0, 1e38, float("inf"),
)
# fmt: on
# Quiet and signalling NaN, smallest and largest subnormal.
_NAN_BITS = {
    torch.bfloat16: (0x7FC0, 0x7F81, 0x0001, 0x007F),
    torch.float16: (0x7E00, 0x7C01, 0x0001, 0x03FF),
}
_POISON = 0xA5
_GUARD = 256


@dataclass(frozen=True)
class Mismatch:
    """How an output differs from what it had to be. ``index`` is None if even shape or dtype differ.

    ``worst`` says how far the farthest element is, where a tolerance was given.
    """

    index: tuple[int, ...] | None
    got: str
    want: str
    differing: int
    total: int
    worst: str = ""

    def __str__(self) -> str:
        if self.index is None:
            return f"expected {self.want}, got {self.got}"
        place = ", ".join(map(str, self.index))
        extent = f"{self.differing} of {self.total} differ"
        return f"first at [{place}]: expected {self.want}, got {self.got}; {extent}{self.worst}"


@dataclass(frozen=True)
class Tolerance:
    """How far an element may be from its reference: as far as the larger of two distances. NaN is never near.

    Attributes:
        relative: a distance as a fraction of the reference's largest magnitude over the last ``dims``
            dimensions.
        dims: how many dimensions share that magnitude.
        ulps: a distance in spacings of the result's dtype at the reference.
    """

    relative: float
    dims: int
    ulps: float = 0.0

    def __mul__(self, factor: float) -> Tolerance:
        """A tolerance ``factor`` times as wide."""
        return Tolerance(self.relative * factor, self.dims, self.ulps * factor)

    def distances(self, want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The distance that each element of an fp64 reference allows a result of ``dtype``."""
        magnitude = want.abs()
        limits = torch.finfo(dtype)
        _, exponent = torch.frexp(magnitude.clamp_min(limits.smallest_normal))
        ulp = torch.exp2(exponent.double() - 1) * limits.eps
        largest = magnitude.amax(tuple(range(-self.dims, 0)), keepdim=True)
        allowed = torch.maximum(ulp * self.ulps, largest * self.relative)
        return torch.where(allowed.isfinite(), allowed, 0.0)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The elements of ``x`` as signed integers of the same width, in the same strides."""
    return x.view(_INTS[x.element_size()])


def compare(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance | None = None) -> Mismatch | None:
    """Compare two tensors; None if they agree.

    Without a tolerance they agree bit by bit, NaN payloads and zero signs included. With one, every element
    is near its reference, which may have a wider dtype.
    """
    if got.shape != want.shape or (tolerance is None and got.dtype != want.dtype):
        described = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (got, want)]
        return Mismatch(None, described[0], described[1], want.numel(), want.numel())
    if tolerance is not None:
        return _compare_near(got, want.double(), tolerance)
    ours, theirs = bits(got), bits(want)
    if torch.equal(ours, theirs):
        return None
    differs = ours != theirs
    where = _first(differs)
    width = got.element_size()

    def hexadecimal(x: torch.Tensor) -> str:
        return f"0x{int(x[where]) & (1 << 8 * width) - 1:0{2 * width}X}"

    return Mismatch(where, hexadecimal(ours), hexadecimal(theirs), int(differs.sum()), got.numel())


def _compare_near(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> Mismatch | None:
    value = got.double()
    allowed, error = tolerance.distances(want, got.dtype), (value - want).abs()
    differs = ~((error <= allowed) | (value == want))
    if not differs.any():
        return None
    where = _first(differs)
    worst = float((error / allowed)[differs].nan_to_num(nan=torch.inf).max())
    numbers = [f"{float(x[where]):.9g}" for x in (value, want)]
    extent = f", the farthest {worst:.3g} times as far as allowed"
    return Mismatch(where, numbers[0], numbers[1], int(differs.sum()), got.numel(), extent)


def _first(differs: torch.Tensor) -> tuple[int, ...]:
    """Coordinates of the first true element."""
    flat = int(differs.reshape(-1).to(torch.uint8).argmax())
    index = []
    for size in reversed(differs.shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def e4m3(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """``e4m3(x / scale)`` by the package's contract, whatever this torch's own cast does beyond 464.

    Fp32 division, round to nearest even, saturated to +-448 (infinities too), NaN to 0x7F with the sign of
    the quotient: the sign of ``x`` exclusive-or the sign of ``scale``.

    Args:
        x: any shape, bf16, fp16, fp32 or e4m3.
        scale: fp32 of one element on the device of ``x``, or None for a plain cast.
    """
    wide = x.float()
    negative = bits(x) < 0
    if scale is not None:
        wide = wide / scale
        negative = negative ^ (bits(scale) < 0)
    stored = wide.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    nan = negative.to(torch.uint8) * 0x80 + 0x7F
    return torch.where(torch.isnan(wide), nan, stored).view(torch.float8_e4m3fn)


def awkward(
    count: int, dtype: torch.dtype, generator: torch.Generator, scale: float | None = None
) -> torch.Tensor:
    """Make ``count`` elements on the CPU: a third any bits, most others in e4m3's range, some on its edges.

    With a finite ``scale`` the edges are those of ``x / scale`` as well.
    """
    if dtype == torch.float8_e4m3fn:
        return torch.randint(-128, 128, (count,), dtype=torch.int8, generator=generator).view(dtype)
    raw = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, generator=generator)
    if dtype == torch.bfloat16:
        for start in (0, 1):
            raw[start::3] = (raw[start::3] & -0x7801) | 0x3C00
    if count:
        finite = torch.tensor(_EDGES, dtype=torch.float64)
        if scale is not None:
            finite = torch.cat([finite, finite * scale])
        edges = torch.cat([bits(finite.to(dtype)), torch.tensor(_NAN_BITS[dtype], dtype=torch.int16)])
        edges = torch.cat([edges, edges ^ -0x8000])
        places = torch.randint(count, (max(len(edges), count // 16),), generator=generator)
        raw[places] = edges[torch.randint(len(edges), places.shape, generator=generator)]
    return raw.view(dtype)


class Guarded:
    """A poisoned contiguous output between two guard zones; ``tensor`` is what the op gets."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        count = 1
        for size in shape:
            count *= size
        size = count * dtype.itemsize
        self._bytes = torch.full((size + 2 * _GUARD,), _POISON, dtype=torch.uint8, device=device)
        self.tensor = self._bytes[_GUARD : _GUARD + size].view(dtype).view(shape)

    def guard(self) -> torch.Tensor:
        """The bytes of the two zones."""
        return torch.cat([self._bytes[:_GUARD], self._bytes[-_GUARD:]])

    def untouched(self) -> torch.Tensor:
        """What :meth:`guard` has to return."""
        return torch.full_like(self.guard(), _POISON)


def poison(outputs: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
    """Fill contiguous tensors with a byte pattern that is no result."""
    for output in outputs:
        output.view(torch.uint8).fill_(_POISON)
