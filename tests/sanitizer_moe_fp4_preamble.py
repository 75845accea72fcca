"""Small calls of ``moe_fp4_preamble``, for ``test_sanitizer.py`` to run under compute-sanitizer.

Every tensor comes from the host by copy, so that the initialisation checker knows all its bytes.
"""

from __future__ import annotations

import itertools

import torch

from tests.helpers import BF16, SEED, assert_same_bits
from tests.moe_fp4_preamble_cases import make_call
from tests.moe_router_cases import FP32, assert_logits_close
from tests.nvfp4_cases import LAYOUTS


def main() -> None:
    rng = torch.Generator().manual_seed(SEED)
    hows = itertools.cycle(("contiguous", "odd base and stride", "slice of a wide projection"))
    for (tokens, experts, hidden), layout, logits in itertools.product(
        ((1, 16, 464), (5, 33, 80), (16, 520, 64), (32, 7, 48)), LAYOUTS, (BF16, FP32)
    ):
        call = make_call(
            "cpu",
            rng,
            tokens=tokens,
            experts=experts,
            hidden=hidden,
            layout=layout,
            logits=logits,
            hidden_layout=next(hows),
        )
        want, got = call.run(), call.to("cuda").run()
        assert_same_bits(got.packed, want.packed)
        assert_same_bits(got.scales, want.scales)
        assert got.router_logits is not None
        assert_logits_close(got.router_logits.cpu(), call.hidden, call.weight)
    torch.cuda.synchronize()
    print("all calls right")


if __name__ == "__main__":
    main()
