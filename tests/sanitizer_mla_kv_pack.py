"""A few hundred small calls of both ops, for ``test_sanitizer.py`` to run under compute-sanitizer.

Every tensor comes from the host by copy, so that the initialisation checker knows all its bytes.
"""

from __future__ import annotations

import itertools

import torch

import vllm_hotpath
from tests.helpers import DTYPES, SEED, as_bits
from tests.pack_cases import HEAD_LAYOUTS, make_heads, make_rows, make_scale
from tests.reference import mla_kv_pack as reference

CUDA = torch.device("cuda")


def _check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(as_bits(got).cpu(), as_bits(want))


def main() -> None:
    rng = torch.Generator().manual_seed(SEED)
    scale = make_scale(0.37, CUDA)
    rows = itertools.cycle(("contiguous", "tail of the latent row", "odd base and stride"))
    geometries = (((128, 64, 128), 1, 8), ((128, 64, 128), 37, 3), ((8, 8, 16), 5, 3), ((8, 0, 8), 1, 1))
    for (widths, tokens, heads), layout in itertools.product(geometries, HEAD_LAYOUTS):
        p, r, width = widths
        for dtypes in ((DTYPES[0],) * 3, (DTYPES[1],) * 3, (DTYPES[2],) * 3, DTYPES):
            k_nope = make_heads(layout, (tokens, heads, p), dtypes[0], CUDA, rng)
            k_pe = make_rows(next(rows), (tokens, r), dtypes[1], CUDA, rng)
            v = make_heads(layout, (tokens, heads, width), dtypes[2], CUDA, rng)
            for options in ({}, {"k_scale": scale, "v_scale": scale, "v_pad_to": width + 8}):
                got = vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v, **options)
                want = reference.concat_quant_fp8(k_nope, k_pe, v, **options)
                _check(got[0], want[0])
                _check(got[1], want[1])
            if dtypes[0] == dtypes[1]:
                _check(vllm_hotpath.mla_kv_concat(k_nope, k_pe), reference.concat(k_nope, k_pe))
    torch.cuda.synchronize()
    print("all calls right")


if __name__ == "__main__":
    main()
