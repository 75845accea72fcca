"""Small calls of ``kda_decode_spec`` through every kernel, for ``test_sanitizer.py``.

Every tensor comes from the host by copy, so that the initialisation checker knows all its bytes.
"""

from __future__ import annotations

import torch

from tests.helpers import BF16, SEED, as_bits
from tests.kda_cases import Form, assert_out_close, assert_state_close
from tests.kda_spec_cases import SpecForm, make_spec_call, spec_out, windows

SIZES = ((1, 1), (3, 12), (4, 12), (20, 12))


def main() -> None:
    rng = torch.Generator().manual_seed(SEED)
    cpu = torch.device("cpu")
    for rows, heads in SIZES:
        some = SpecForm(
            lengths=(5, 0, 8, 1, 3, *(2,) * rows)[:rows],
            accepted=(8, 1, 2, 1, 0, *(1,) * rows)[:rows],
            columns=8,
            tail=2,
            null=((0, 1),),
            form=Form(inputs="wide", bias=True),
        )
        for state_dtype in (torch.float32, BF16, torch.float16):
            for layout in ("SD", "DS"):
                call = make_spec_call(cpu, rng, some, heads=heads, state_dtype=state_dtype, layout=layout)
                call.args["out"] = spec_out(call)
                want, on_gpu = call.spec_reference(), call.copy("cuda")
                on_gpu.run()
                got = on_gpu.copy("cpu")
                assert_out_close(got["out"][want.live], want.out[want.live])
                assert not as_bits(got["out"])[~want.live].any()
                for slot, state in want.state.items():
                    assert_state_close(got["state"][slot : slot + 1], state.unsqueeze(0))
                for slot, columns in want.conv.items():
                    for part, pool in enumerate(windows(got)):
                        assert torch.equal(pool[slot, :, : columns.shape[-1]], columns[part])
    torch.cuda.synchronize()
    print("all calls right")


if __name__ == "__main__":
    main()
