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
use crate::gate::{Gate, Logits, MAX_TOKENS};
use crate::nvfp4::BLOCK;
use crate::tensor::{DType, Tensor};
use nvfp4_quant::{Outputs, Quantized};

pub const PREAMBLE: Op = Op { name: "moe_fp4_preamble", stem: "moe_fp4_preamble", kernels: cuda::KERNELS };

const EXPERTS: RangeInclusive<i64> = 1..=1024;
const BIASES: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

/// Checked arguments of a call with a gate.
struct Plan<'a> {
    gate: Gate<'a>,
    logits: Logits<'a>,
    out: Quantized<'a>,
}

fn only_with_gate(argument: &'static str, got: &str) -> Error {
    let (expected, got) = ("None without gate_weight".into(), got.into());
    Error::Value { op: PREAMBLE.name, argument, expected, got }
}

type Made<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

#[pyfunction]
#[pyo3(signature = (hidden_states, global_scale, gate_weight, logits_dtype, routing_bias, layout, out, out_scale,
    out_logits, allocate, /))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the op")]
pub fn moe_fp4_preamble<'py>(
    py: Python<'py>,
    hidden_states: &Bound<'py, PyAny>,
    global_scale: &Bound<'py, PyAny>,
    gate_weight: Option<&Bound<'py, PyAny>>,
    logits_dtype: Option<&str>,
    routing_bias: Option<&Bound<'py, PyAny>>,
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
            // Without a gate these are right, so the message says what they do not go with.
            if hidden.dtype != DType::BF16 {
                return Err(hidden.type_error("dtype bfloat16 with gate_weight"));
            }
            if rows > MAX_TOKENS {
                return Err(hidden.value_error(format!("at most {MAX_TOKENS} tokens with gate_weight")));
            }
            let gate = Gate::check(&hidden, &weight, BLOCK as i64, &[DType::BF16], &EXPERTS)?;
            weight.expect_device(hidden.device, hidden.name)?;
            let dtype = Logits::dtype(op, logits_dtype, DType::BF16)?;
            let object = output(out_logits, allocate, hidden.device, &[rows, gate.experts()], dtype)?;
            arguments.read(&object, &mut logits)?;
            made_logits = Some(object);
            let logits = Logits::check(&logits, dtype, &gate)?;
            logits.tensor().expect_device(hidden.device, hidden.name)?;
            logits.tensor().expect_aligned(dtype.size())?;
            inputs.push(&weight);
            for input in &inputs {
                logits.tensor().expect_apart_from(input)?;
            }
            Some((gate, logits))
        }
        None if out_logits.is_some() => return Err(only_with_gate("out_logits", "a tensor")),
        None => match logits_dtype {
            Some(name) => return Err(only_with_gate("logits_dtype", name)),
            None => None,
        },
    };
    // What becomes of the bias is the caller's: here it is only checked, and kept from being written.
    let mut bias = Tensor::unset(op, "routing_bias");
    if let Some(object) = routing_bias {
        arguments.read(object, &mut bias)?;
        bias.expect_dtype(&BIASES)?;
        match &gate {
            Some((gate, _)) => bias.expect_shape(&[gate.experts()], "experts of gate_weight")?,
            None => bias.expect_rank(&["experts"])?,
        }
        bias.expect_device(hidden.device, hidden.name)?;
        inputs.push(&bias);
    }
    if let Some((_, logits)) = &gate {
        if routing_bias.is_some() {
            logits.tensor().expect_apart_from(&bias)?;
        }
        inputs.push(logits.tensor());
    }

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
        Some((gate, logits)) => {
            let plan = Plan { gate, logits, out };
            let cuda = |index, stream| cuda::run(&plan, index, stream);
            carry_out(py, &arguments, hidden.device, || run_on_cpu(&plan), cuda)?;
        }
    }
    Ok((made.packed, made.scales, made_logits))
}

fn run_on_cpu(plan: &Plan<'_>) {
    let logits = plan.gate.logits(plan.logits.tensor().dtype);
    for (token, logits) in logits.chunks_exact(plan.gate.experts() as usize).enumerate() {
        plan.logits.store(token, logits);
    }
    nvfp4_quant::Plan::of_rows(PREAMBLE.name, plan.gate.hidden, plan.out).run_on_cpu();
}
