//! `mla_kv_concat` and `mla_kv_concat_quant_fp8`: `[k_nope | k_pe]` per head, with V in FP8.
//!
//! This file checks the arguments and makes the [`Plan`] that `cpu.rs` and `cuda.rs` carry out.

mod cpu;
mod cuda;

use pyo3::prelude::*;

use super::Op;
use crate::dlpack::Arguments;
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, Tensor};

const STEM: &str = "mla_kv_pack";
pub const CONCAT: Op = Op { name: "mla_kv_concat", stem: STEM, kernels: cuda::CONCAT_KERNELS };
pub const PACK: Op = Op { name: "mla_kv_concat_quant_fp8", stem: STEM, kernels: cuda::PACK_KERNELS };

/// Elements that every width is a multiple of, and that a kernel moves at a time.
const UNIT: i64 = 8;
const SOURCES: [DType; 3] = [DType::Bf16, DType::F16, DType::F8E4m3];

/// Checked arguments of either op. Shapes agree, widths are multiples of [`UNIT`], outputs are contiguous and apart from
/// everything else.
struct Plan {
    op: &'static str,
    tokens: i64,
    heads: i64,
    nope: i64,
    rope: i64,
    k_nope: Tensor,
    k_pe: Tensor,
    k_out: Tensor,
    /// None for the plain concat.
    fp8: Option<Fp8>,
}

/// What the FP8 op has beyond the concat.
struct Fp8 {
    v: Tensor,
    v_out: Tensor,
    value: i64,
    /// Width of a stored head of V, at least `value`.
    value_out: i64,
    k_scale: Option<Tensor>,
    v_scale: Option<Tensor>,
}

/// What k_nope and k_pe say: tokens, heads and widths.
struct Keys {
    tokens: i64,
    heads: i64,
    nope: i64,
    rope: i64,
    k_nope: Tensor,
    k_pe: Tensor,
}

impl Keys {
    fn check(op: &'static str, k_nope: Tensor, k_pe: Tensor) -> Result<Self> {
        k_nope.expect_dtype(&SOURCES)?;
        k_nope.expect_rank(&["tokens", "heads", "nope"])?;
        let &[tokens, heads, nope] = k_nope.shape() else { unreachable!("rank checked") };
        if heads < 1 {
            return Err(k_nope.value_error("at least one head (dimension 1)"));
        }
        k_nope.expect_multiple(2, UNIT, "nope width")?;
        k_nope.expect_last_stride_1()?;
        match k_nope.device {
            Device::Cpu | Device::Cuda(_) => {}
            Device::Other(_) => return Err(k_nope.value_error("a tensor on a CPU or CUDA device")),
        }

        if op == CONCAT.name && k_pe.dtype != k_nope.dtype {
            return Err(k_pe.type_error(format!("dtype {} (that of k_nope)", k_nope.dtype)));
        }
        k_pe.expect_dtype(&SOURCES)?;
        let rope = match *k_pe.shape() {
            [t, r] | [t, 1, r] if t == tokens => r,
            _ => {
                return Err(k_pe.value_error(format!(
                    "shape [{tokens}, rope] or [{tokens}, 1, rope] (tokens of k_nope)"
                )));
            }
        };
        k_pe.expect_multiple(k_pe.shape().len() - 1, UNIT, "rope width")?;
        k_pe.expect_last_stride_1()?;
        k_pe.expect_device(k_nope.device, "k_nope")?;
        Ok(Self { tokens, heads, nope, rope, k_nope, k_pe })
    }
}

/// Checks an output against the shape and dtype it has to have and against the memory it may not touch.
fn check_output(out: &Tensor, shape: &[i64], why: &str, dtype: DType, others: &[&Tensor]) -> Result<()> {
    out.expect_dtype(&[dtype])?;
    out.expect_shape(shape, why)?;
    out.expect_device(others[0].device, "k_nope")?;
    out.expect_contiguous()?;
    out.expect_aligned(UNIT as usize * dtype.size())?;
    out.expect_writable()?;
    others.iter().try_for_each(|other| out.expect_apart_from(other))
}

fn check_scale(scale: Option<&Tensor>, like: &Tensor) -> Result<()> {
    let Some(scale) = scale else { return Ok(()) };
    scale.expect_dtype(&[DType::F32])?;
    if scale.numel() != 1 {
        return Err(scale.value_error("one element"));
    }
    scale.expect_device(like.device, like.name)?;
    scale.expect_aligned(4)
}

fn run(py: Python<'_>, arguments: &Arguments<'_>, plan: &Plan) -> Result<()> {
    if plan.tokens == 0 {
        return Ok(());
    }
    match plan.k_nope.device {
        Device::Cpu => {
            py.detach(|| cpu::run(plan));
            Ok(())
        }
        Device::Cuda(index) => cuda::run(plan, index, arguments.current_stream(index)?),
        Device::Other(_) => unreachable!("Keys::check refuses it"),
    }
}

/// The caller's output, or a new one that `allocate` makes.
fn output<'py>(
    given: Option<Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
    device: Device,
    shape: &[i64],
    dtype: DType,
) -> Result<Bound<'py, PyAny>> {
    match given {
        Some(out) => Ok(out),
        None => Ok(allocate.call1((device.to_string(), shape, dtype.torch_name()))?),
    }
}

#[pyfunction]
#[pyo3(signature = (k_nope, k_pe, out, allocate, /))]
pub fn mla_kv_concat<'py>(
    py: Python<'py>,
    k_nope: Bound<'py, PyAny>,
    k_pe: Bound<'py, PyAny>,
    out: Option<Bound<'py, PyAny>>,
    allocate: Bound<'py, PyAny>,
) -> Result<Bound<'py, PyAny>> {
    let op = CONCAT.name;
    let mut arguments = Arguments::new(py, op);
    let keys = Keys::check(op, arguments.tensor("k_nope", &k_nope)?, arguments.tensor("k_pe", &k_pe)?)?;
    let shape = [keys.tokens, keys.heads, keys.nope + keys.rope];

    let out = output(out, &allocate, keys.k_nope.device, &shape, keys.k_nope.dtype)?;
    let k_out = arguments.tensor("out", &out)?;
    let why = "tokens and heads of k_nope, nope + rope";
    check_output(&k_out, &shape, why, keys.k_nope.dtype, &[&keys.k_nope, &keys.k_pe])?;

    let Keys { tokens, heads, nope, rope, k_nope, k_pe } = keys;
    run(py, &arguments, &Plan { op, tokens, heads, nope, rope, k_nope, k_pe, k_out, fp8: None })?;
    Ok(out)
}

#[pyfunction]
#[pyo3(signature = (k_nope, k_pe, v, k_scale, v_scale, k_out, v_out, v_pad_to, allocate, /))]
pub fn mla_kv_concat_quant_fp8<'py>(
    py: Python<'py>,
    k_nope: Bound<'py, PyAny>,
    k_pe: Bound<'py, PyAny>,
    v: Bound<'py, PyAny>,
    k_scale: Option<Bound<'py, PyAny>>,
    v_scale: Option<Bound<'py, PyAny>>,
    k_out: Option<Bound<'py, PyAny>>,
    v_out: Option<Bound<'py, PyAny>>,
    v_pad_to: Option<i64>,
    allocate: Bound<'py, PyAny>,
) -> Result<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let op = PACK.name;
    let mut arguments = Arguments::new(py, op);
    let keys = Keys::check(op, arguments.tensor("k_nope", &k_nope)?, arguments.tensor("k_pe", &k_pe)?)?;

    let values = arguments.tensor("v", &v)?;
    values.expect_dtype(&SOURCES)?;
    values.expect_rank(&["tokens", "heads", "value"])?;
    let value = values.shape()[2];
    values.expect_shape(&[keys.tokens, keys.heads, value], "tokens and heads of k_nope")?;
    values.expect_multiple(2, UNIT, "value width")?;
    values.expect_last_stride_1()?;
    values.expect_device(keys.k_nope.device, "k_nope")?;
    let value_out = v_pad_to.unwrap_or(value);
    if value_out < value || value_out % UNIT != 0 {
        return Err(Error::Value {
            op,
            argument: "v_pad_to",
            expected: format!("a multiple of {UNIT}, at least the width {value} of v"),
            got: value_out.to_string(),
        });
    }
    let k_scale = arguments.optional("k_scale", k_scale.as_ref())?;
    let v_scale = arguments.optional("v_scale", v_scale.as_ref())?;
    check_scale(k_scale.as_ref(), &keys.k_nope)?;
    check_scale(v_scale.as_ref(), &keys.k_nope)?;

    let k_shape = [keys.tokens, keys.heads, keys.nope + keys.rope];
    let v_shape = [keys.tokens, keys.heads, value_out];
    let k_object = output(k_out, &allocate, keys.k_nope.device, &k_shape, DType::F8E4m3)?;
    let v_object = output(v_out, &allocate, keys.k_nope.device, &v_shape, DType::F8E4m3)?;
    let k_out = arguments.tensor("k_out", &k_object)?;
    let v_out = arguments.tensor("v_out", &v_object)?;
    let mut others = vec![&keys.k_nope, &keys.k_pe, &values];
    others.extend(k_scale.as_ref());
    others.extend(v_scale.as_ref());
    let why = "tokens and heads of k_nope, nope + rope";
    check_output(&k_out, &k_shape, why, DType::F8E4m3, &others)?;
    others.push(&k_out);
    let why = "tokens and heads of k_nope, width of v or v_pad_to";
    check_output(&v_out, &v_shape, why, DType::F8E4m3, &others)?;

    let fp8 = Fp8 { v: values, v_out, value, value_out, k_scale, v_scale };
    let Keys { tokens, heads, nope, rope, k_nope, k_pe } = keys;
    run(py, &arguments, &Plan { op, tokens, heads, nope, rope, k_nope, k_pe, k_out, fp8: Some(fp8) })?;
    Ok((k_object, v_object))
}
