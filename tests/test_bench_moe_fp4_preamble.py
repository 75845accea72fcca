"""The benchmark of the NVFP4 MoE preamble without a GPU: shapes, bytes, and subjects that agree."""

from __future__ import annotations

import pytest
import torch

from vllm_hotpath.bench.models import MODELS, Gate
from vllm_hotpath.bench.numerics import compare
from vllm_hotpath.bench.ops import load, moe_fp4_preamble
from vllm_hotpath.cli.bench import select

SPEC = load("moe_fp4_preamble")


def test_bytes_of_a_known_call() -> None:
    read, written = moe_fp4_preamble.bytes_moved(Gate(384, 7168, 8), 2)
    assert read == 384 * 7168 * 2 + 2 * 7168 * 2
    assert written == 2 * (3584 + 448 + 768)


def test_models_with_nvfp4_experts_have_a_shape() -> None:
    shapes = {name: SPEC.shape(model, 1) for name, model in MODELS.items()}
    assert {name for name, shape in shapes.items() if shape} == {"kimi-k2.6", "deepseek-v3"}
    assert set(SPEC.bench_shapes) == {shape for shape in shapes.values() if shape}


def test_the_table_has_every_size_once() -> None:
    table = select("moe_fp4_preamble", None, None, quick=False)
    keys = [tuple(case.params.values()) for case in table]
    assert len(set(keys)) == len(keys)
    assert {case.params["M"] for case in table} == {1, 2, 4, 8, 16, 32}


@pytest.mark.parametrize("subject", ["ours", "peer"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_subjects_agree_with_the_reference_and_a_wrong_one_does_not(layout: str, subject: str) -> None:
    case = next(
        case
        for case in SPEC.bench_cases("moe_fp4_preamble", Gate(64, 256, 8), False)
        if (case.params["layout"], case.params["M"]) == (layout, 4)
    )
    (buffers,) = case.make(torch.device("cpu"), 1)
    assert buffers.got is not None
    want = buffers.want()
    for output in buffers.outputs:
        output.view(torch.uint8).fill_(0x7F)
    buffers.subjects[subject]()
    for index, (got, right, tolerance) in enumerate(
        zip(buffers.got(), want, buffers.tolerances, strict=True)
    ):
        assert compare(got, right, tolerance) is None, index
    logits = buffers.outputs[2]
    logits[3, 60] += 0.5
    assert compare(logits, want[2], buffers.tolerances[2]) is not None
