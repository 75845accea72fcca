//! `moe_fp4_preamble`: what a mixture of experts in NVFP4 needs before its kernel, in one launch: the quantised
//! activations and, for a few tokens, the router logits.
//!
//! This file checks the arguments. Without a gate the quantisation is that of [`nvfp4_quant`]; with one, `cuda.rs`
//! has a kernel for both.

mod cuda;

use std::ops::RangeInclusive;

use pyo3::prelude::*;

use super::{Op, carry_out, nvfp4_quant, output};
use crate::dlpack::Arguments;
use crate::error::{Error, Result};
use crate::gate::{self, Gate};
use crate::nvfp4::BLOCK;
use crate::tensor::{DType, Tensor};
use nvfp4_quant::{Outputs, Quantized};

pub const PREAMBLE: Op = Op { name: "moe_fp4_preamble", stem: "moe_fp4_preamble", kernels: cuda::KERNELS };

const EXPERTS: RangeInclusive<i64> = 1..=1024;

/// Checked arguments of a call with a gate.
struct Plan<'a> {
    gate: Gate<'a>,
    logits: &'a Tensor,
    out: Quantized<'a>,
}

fn only_with_gate(argument: &'static str, got: &str) -> Error {
    let (expected, got) = ("None without gate_weight".into(), got.into());
    Error::Value { op: PREAMBLE.name, argument, expected, got }
}

type Made<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

#[pyfunction]
#[pyo3(signature = (hidden_states, global_scale, gate_weight, logits_dtype, layout, out, out_scale, out_logits,
    allocate, /))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the op")]
pub fn moe_fp4_preamble<'py>(
    py: Python<'py>,
    hidden_states: &Bound<'py, PyAny>,
    global_scale: &Bound<'py, PyAny>,
    gate_weight: Option<&Bound<'py, PyAny>>,
    logits_dtype: Option<&str>,
    layout: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    out_scale: Option<&Bound<'py, PyAny>>,
    out_logits: Option<&Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
) -> Result<Made<'py>> {
    let op = PREAMBLE.name;
    let mut arguments = Arguments::new(py);
    let (mut hidden, mut scale) = (Tensor::unset(op, "hidden_states"), Tensor::unset(op, "global_scale"));
    arguments.read(hidden_states, &mut hidden)?;
    let (rows, width) = nvfp4_quant::check_rows(&hidden, &["tokens", "hidden"], 1)?;
    nvfp4_quant::read_scale(&mut arguments, global_scale, &mut scale, 1, &hidden)?;
    let layout = nvfp4_quant::read_layout(op, "layout", layout)?;

    let (mut weight, mut logits) = (Tensor::unset(op, "gate_weight"), Tensor::unset(op, "out_logits"));
    let mut inputs = vec![&hidden, &scale];
    let mut made_logits = None;
    let gate = match gate_weight {
        Some(object) => {
            arguments.read(object, &mut weight)?;
            let gate = Gate::check(&hidden, &weight, BLOCK as i64, &[DType::BF16], &EXPERTS)?;
            weight.expect_device(hidden.device, hidden.name)?;
            let dtype = match logits_dtype {
                None | Some("bfloat16") => DType::BF16,
                Some("float32") => DType::F32,
                Some(other) => {
                    let (expected, got) = ("bfloat16 or float32".into(), other.into());
                    return Err(Error::Value { op, argument: "logits_dtype", expected, got });
                }
            };
            let object = output(out_logits, allocate, hidden.device, &[rows, gate.experts()], dtype)?;
            arguments.read(&object, &mut logits)?;
            made_logits = Some(object);
            gate::check_logits(&logits, dtype, rows, gate.experts())?;
            logits.expect_device(hidden.device, hidden.name)?;
            logits.expect_aligned(dtype.size())?;
            logits.expect_writable()?;
            inputs.push(&weight);
            for input in &inputs {
                logits.expect_apart_from(input)?;
            }
            inputs.push(&logits);
            Some(gate)
        }
        None if out_logits.is_some() => return Err(only_with_gate("out_logits", "a tensor")),
        None => match logits_dtype {
            Some(name) => return Err(only_with_gate("logits_dtype", name)),
            None => None,
        },
    };

    let (mut packed, mut scales) = (Tensor::unset(op, "out"), Tensor::unset(op, "out_scale"));
    let made = Outputs::read(
        &mut arguments,
        (out, out_scale),
        allocate,
        hidden.device,
        layout,
        &nvfp4_quant::shapes(layout, &[], rows, width),
        (&mut packed, &mut scales),
        &inputs,
    )?;
    let out = Quantized { global_scale: &scale, packed: &packed, scales: &scales, layout };
    match gate {
        None => nvfp4_quant::run(py, &arguments, &nvfp4_quant::Plan::of_rows(op, &hidden, out))?,
        Some(_) if rows == 0 => (),
        Some(gate) => {
            let plan = Plan { gate, logits: &logits, out };
            let cuda = |index, stream| cuda::run(&plan, index, stream);
            carry_out(py, &arguments, hidden.device, || run_on_cpu(&plan), cuda)?;
        }
    }
    Ok((made.packed, made.scales, made_logits))
}

fn run_on_cpu(plan: &Plan<'_>) {
    let logits = plan.gate.logits(plan.logits.dtype);
    for (token, logits) in logits.chunks_exact(plan.gate.experts() as usize).enumerate() {
        gate::store_row(plan.logits, token, logits);
    }
    nvfp4_quant::Plan::of_rows(PREAMBLE.name, plan.gate.hidden, plan.out).run_on_cpu();
}
