"""Small calls of the NVFP4 ops, for ``test_sanitizer.py`` to run under compute-sanitizer.

Every tensor comes from the host by copy, so that the initialisation checker knows all its bytes.
"""

from __future__ import annotations

import itertools

import torch

import vllm_hotpath
from tests.helpers import BF16, FP16, SEED, assert_same_bits
from tests.nvfp4_cases import LAYOUTS, Norm, placed, scale_of, values

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _check(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert_same_bits(ours, theirs)


def main() -> None:
    rng = torch.Generator().manual_seed(SEED)
    hows = itertools.cycle(("dense", "wide", "odd"))
    for (rows, width), layout, dtype in itertools.product(
        ((1, 16), (5, 80), (37, 464), (130, 64)), LAYOUTS, (BF16, FP16)
    ):
        how = next(hows)
        x, gate_up = values((rows, width), dtype, rng), values((2, rows, 2 * width), dtype, rng)
        counts = torch.tensor([rows, rows], dtype=torch.int32)
        results = []
        state = rng.get_state()
        for device in (CUDA, CPU):
            rng.set_state(state)
            scale = torch.tensor([30.0]).to(device)
            call = Norm(rows, width, dtype, device, rng, "dense")
            norm = call.x.clone()
            results.append(
                (
                    *vllm_hotpath.nvfp4_quantize(placed(x, device, how), scale, layout=layout),
                    *vllm_hotpath.silu_mul_nvfp4(
                        placed(gate_up, device, how), scale, layout=layout, mask_m=counts.to(device)
                    ),
                    *call.run(9.0, layout, out_norm=norm, second_scale=scale_of(2.0, CPU).to(device)),
                    norm,
                    call.residual,
                )
            )
        _check(*results)
    state = rng.get_state()
    for rows, width in ((300, 96), (2, 8208)):
        results = []
        for device in (CUDA, CPU):
            rng.set_state(state)
            call = Norm(rows, width, BF16, device, rng, "dense")
            results.append((*call.run(9.0, "swizzled_128x4"), call.residual))
        _check(*results)
    torch.cuda.synchronize()
    print("all calls right")


if __name__ == "__main__":
    main()
