"""Small calls of ``kda_decode`` through every kernel, for ``test_sanitizer.py`` to run under the sanitizer.

Every tensor comes from the host by copy, so that the initialisation checker knows all its bytes. The
reference is computed there.
"""

from __future__ import annotations

import dataclasses

import torch

from tests.helpers import BF16, FP16, SEED
from tests.kda_cases import Form, assert_out_close, assert_state_close, conv_windows, make_call, poisoned_out

# Rows times heads on both sides of every change of plan up to a whole H200.
SIZES = ((1, 1), (3, 3), (12, 3), (7, 8), (24, 12), (49, 12))
FORMS = (
    Form(inputs="wide", null_rows=(0,)),
    Form(layout="DS", bias=True, lower_bound=None, indices="stride 8", index_dtype=torch.int64),
    Form(norm=False, window=7, layout="DS", null_index=-1, extra_slots=0),
    Form(parts=True, log_decay=True, sigmoid_beta=True, gate_dtype=torch.float32, beta_dtype=torch.float32),
    Form(activation=FP16, inputs="wide", parts=True, bias=True, weight_dtype=FP16, paged=False),
)


def main() -> None:
    rng = torch.Generator().manual_seed(SEED)
    cpu = torch.device("cpu")
    for rows, heads in SIZES:
        for form in FORMS if rows * heads < 100 else FORMS[:1]:
            for state_dtype in (torch.float32, BF16, FP16):
                changes = {"rows": rows, "heads": heads, "state_dtype": state_dtype}
                call = make_call(cpu, rng, dataclasses.replace(form, **changes))
                call.args["out"] = poisoned_out(call)
                want, on_gpu = call.reference(), call.copy("cuda")
                on_gpu.run()
                got = on_gpu.copy("cpu")
                assert_out_close(got["out"], want.out)
                assert_state_close(got["state"][want.slots], want.state)
                for part, window in enumerate(conv_windows(got)):
                    assert torch.equal(window[want.slots], want.conv[:, part])
    torch.cuda.synchronize()
    print("all calls right")


if __name__ == "__main__":
    main()
