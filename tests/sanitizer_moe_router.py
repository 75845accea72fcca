"""Small calls of ``moe_router`` through every kernel, for ``test_sanitizer.py`` to run under the sanitizer.

Every tensor comes from the host by copy, so that the initialisation checker knows all its bytes, and lives
until the results are read: without torch's cache, memory that is let go is unknown to the sanitizer while
kernels still use it. The host selects from the logits of the call, with scores that may differ by a rounding;
the seed is fixed, so that no two experts are that near.
"""

from __future__ import annotations

import dataclasses

import torch

from tests.helpers import BF16
from tests.moe_router_cases import (
    FP32,
    INF,
    NAN,
    Call,
    Form,
    assert_logits_close,
    assert_routing,
    call_of_logits,
    make_call,
    scores_of,
    workspace_elements,
)

FORMS = (
    Form(experts=40, hidden=136, scaling=2.5),
    Form(experts=33, hidden=40, top_k=24, renormalize=False),
    Form(experts=64, hidden=72, n_group=8, topk_group=4),
    Form(experts=400, hidden=24, top_k=32, n_group=4, topk_group=2),
    Form(experts=520, hidden=8, top_k=16, bias=False),
)
LAYOUTS = (("contiguous", "contiguous"), ("odd base and stride", "odd stride"))


def _check(call: Call, *, finite: bool = True) -> None:
    tokens, experts = call.shape
    outputs = {
        "topk_weights": torch.full((tokens, call["top_k"]), -7.0),
        "topk_ids": torch.full((tokens, call["top_k"]), -7, dtype=torch.int32),
        "out_logits": torch.full((tokens, experts), -7.0, dtype=call.logits_dtype),
        "workspace": torch.full((workspace_elements(tokens, experts),), -7),
    }
    on_gpu = call.changed(**outputs).to("cuda")
    on_gpu.run()
    got = on_gpu.to("cpu")
    logits = got["out_logits"]
    if finite:
        assert_logits_close(logits, call["hidden_states"], call["gate_weight"])
    if call["scoring"] == "sigmoid":
        assert_routing(got["topk_weights"], got["topk_ids"], scores_of(logits), logits, call.options)
    else:
        weights, ids = call.run()
        assert torch.equal(got["topk_ids"], ids)
        torch.testing.assert_close(got["topk_weights"], weights, rtol=1e-5, atol=1e-7)


def main() -> None:
    rng = torch.Generator().manual_seed(1)
    for i, form in enumerate(FORMS):
        for tokens in (1, 11, 32) if i == 0 else (3,):
            for weight in (BF16, FP32):
                for hidden_layout, weight_layout in LAYOUTS:
                    changes = {"tokens": tokens, "weight": weight, "logits": FP32 if i % 2 else BF16}
                    layouts = {"hidden_layout": hidden_layout, "weight_layout": weight_layout}
                    _check(make_call("cpu", rng, dataclasses.replace(form, **changes, **layouts)))
    for logits in ([1.0] * 40, [-INF] * 40, [NAN, INF, 2.0, -INF] * 10):
        for top_k in (8, 23):
            _check(call_of_logits(logits, top_k=top_k, bias=[0.5] * 40), finite=False)
    softmax = Form(experts=72, hidden=64, scoring="softmax", n_group=8, topk_group=3)
    _check(make_call("cpu", rng, softmax))
    _check(make_call("cpu", rng, softmax, experts=512, bias=False))
    torch.cuda.synchronize()
    print("all calls right")


if __name__ == "__main__":
    main()
