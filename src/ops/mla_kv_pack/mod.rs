//! `mla_kv_concat` and `mla_kv_concat_quant_fp8`: `[k_nope | k_pe]` per head, with V in FP8.
//!
//! This file checks the arguments and makes the [`Plan`] that `cpu.rs` and `cuda.rs` carry out.

mod cpu;
mod cuda;

use pyo3::prelude::*;
use pyo3::types::PyInt;

use super::{Op, carry_out, output};
use crate::dlpack::Arguments;
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, Tensor};

const STEM: &str = "mla_kv_pack";
pub const CONCAT: Op = Op { name: "mla_kv_concat", stem: STEM, kernels: cuda::CONCAT_KERNELS };
pub const PACK: Op = Op { name: "mla_kv_concat_quant_fp8", stem: STEM, kernels: cuda::PACK_KERNELS };

/// Elements that every width is a multiple of, and that a kernel moves at a time.
const UNIT: i64 = 8;
/// Far above any model's; the kernels count units of a row and heads in 32 bits.
const MAX_WIDTH: i64 = 1 << 20;
const MAX_HEADS: i64 = 1 << 30;
const SOURCES: [DType; 3] = [DType::BF16, DType::F16, DType::F8_E4M3];

/// Checked arguments of either op. Shapes agree, widths are multiples of [`UNIT`], outputs are contiguous and apart from
/// everything else.
struct Plan<'a> {
    op: &'static str,
    keys: Keys,
    k_nope: &'a Tensor,
    k_pe: &'a Tensor,
    k_out: &'a Tensor,
    /// None for the plain concat.
    fp8: Option<Fp8<'a>>,
}

/// What the FP8 op has beyond the concat.
struct Fp8<'a> {
    v: &'a Tensor,
    v_out: &'a Tensor,
    value: i64,
    /// Width of a stored head of V, at least `value`.
    value_out: i64,
    k_scale: Option<&'a Tensor>,
    v_scale: Option<&'a Tensor>,
}

/// What k_nope and k_pe say: counts and widths.
#[derive(Clone, Copy)]
struct Keys {
    tokens: i64,
    heads: i64,
    nope: i64,
    rope: i64,
}

impl Keys {
    fn check(op: &'static str, k_nope: &Tensor, k_pe: &Tensor) -> Result<Self> {
        k_nope.expect_dtype(&SOURCES)?;
        k_nope.expect_rank(&["tokens", "heads", "nope"])?;
        let &[tokens, heads, nope] = k_nope.shape() else { unreachable!("rank checked") };
        if !(1..=MAX_HEADS).contains(&heads) {
            return Err(k_nope.value_error(format!("1 to {MAX_HEADS} heads (dimension 1)")));
        }
        if nope < UNIT {
            return Err(k_nope.value_error(format!("a nope width (dimension 2) of at least {UNIT}")));
        }
        check_width(k_nope, "nope width")?;
        k_nope.expect_last_stride_1()?;
        k_nope.expect_aligned(k_nope.dtype.size())?;
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
        check_width(k_pe, "rope width")?;
        k_pe.expect_last_stride_1()?;
        k_pe.expect_aligned(k_pe.dtype.size())?;
        k_pe.expect_device(k_nope.device, "k_nope")?;
        Ok(Self { tokens, heads, nope, rope })
    }
}

/// The last dimension is a whole number of units.
fn check_width(tensor: &Tensor, what: &str) -> Result<()> {
    let last = tensor.shape().len() - 1;
    let width = tensor.shape()[last];
    if width % UNIT == 0 && width <= MAX_WIDTH {
        return Ok(());
    }
    Err(tensor.value_error(format!(
        "a {what} (dimension {last}) that is a multiple of {UNIT}, at most {MAX_WIDTH}"
    )))
}

const K_SHAPE: &str = "tokens and heads of k_nope, nope + rope";
const V_SHAPE: &str = "tokens and heads of k_nope, width of v or v_pad_to";

/// Checks an output against the shape and dtype it has to have and against the memory it may not touch.
fn check_output<'a>(
    out: &Tensor,
    shape: &[i64],
    why: &str,
    dtype: DType,
    others: impl IntoIterator<Item = &'a Tensor>,
) -> Result<()> {
    out.expect_dtype(&[dtype])?;
    out.expect_shape(shape, why)?;
    out.expect_contiguous()?;
    out.expect_aligned(UNIT as usize * dtype.size())?;
    out.expect_writable()?;
    for other in others {
        out.expect_device(other.device, other.name)?;
        out.expect_apart_from(other)?;
    }
    Ok(())
}

fn run(py: Python<'_>, arguments: &Arguments<'_>, plan: &Plan<'_>) -> Result<()> {
    if plan.keys.tokens == 0 {
        return Ok(());
    }
    let cuda = |index, stream| cuda::run(plan, index, stream);
    carry_out(py, arguments, plan.k_nope.device, || cpu::run(plan), cuda)
}

#[pyfunction]
#[pyo3(signature = (k_nope, k_pe, out, allocate, /))]
pub fn mla_kv_concat<'py>(
    py: Python<'py>,
    k_nope: &Bound<'py, PyAny>,
    k_pe: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
) -> Result<Bound<'py, PyAny>> {
    let op = CONCAT.name;
    let mut arguments = Arguments::new(py);
    let (mut nope, mut pe) = (Tensor::unset(op, "k_nope"), Tensor::unset(op, "k_pe"));
    arguments.read(k_nope, &mut nope)?;
    arguments.read(k_pe, &mut pe)?;
    let keys = Keys::check(op, &nope, &pe)?;

    let shape = [keys.tokens, keys.heads, keys.nope + keys.rope];
    let object = output(out, allocate, nope.device, &shape, nope.dtype)?;
    let mut k_out = Tensor::unset(op, "out");
    arguments.read(&object, &mut k_out)?;
    check_output(&k_out, &shape, K_SHAPE, nope.dtype, [&nope, &pe])?;

    let plan = Plan { op, keys, k_nope: &nope, k_pe: &pe, k_out: &k_out, fp8: None };
    run(py, &arguments, &plan)?;
    Ok(object)
}

#[pyfunction]
#[pyo3(signature = (k_nope, k_pe, v, k_scale, v_scale, k_out, v_out, v_pad_to, allocate, /))]
pub fn mla_kv_concat_quant_fp8<'py>(
    py: Python<'py>,
    k_nope: &Bound<'py, PyAny>,
    k_pe: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    k_scale: Option<&Bound<'py, PyAny>>,
    v_scale: Option<&Bound<'py, PyAny>>,
    k_out: Option<&Bound<'py, PyAny>>,
    v_out: Option<&Bound<'py, PyAny>>,
    v_pad_to: Option<&Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
) -> Result<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let op = PACK.name;
    let mut arguments = Arguments::new(py);
    let (mut nope, mut pe) = (Tensor::unset(op, "k_nope"), Tensor::unset(op, "k_pe"));
    arguments.read(k_nope, &mut nope)?;
    arguments.read(k_pe, &mut pe)?;
    let keys = Keys::check(op, &nope, &pe)?;
    let mut values = Tensor::unset(op, "v");
    arguments.read(v, &mut values)?;
    let (value, value_out) = check_values(&values, &keys, &nope, v_pad_to)?;
    let (mut k_dequant, mut v_dequant) = (Tensor::unset(op, "k_scale"), Tensor::unset(op, "v_scale"));
    let k_dequant = read_scale(&mut arguments, k_scale, &mut k_dequant, &nope)?;
    let v_dequant = read_scale(&mut arguments, v_scale, &mut v_dequant, &nope)?;

    let k_shape = [keys.tokens, keys.heads, keys.nope + keys.rope];
    let v_shape = [keys.tokens, keys.heads, value_out];
    let k_object = output(k_out, allocate, nope.device, &k_shape, DType::F8_E4M3)?;
    let v_object = output(v_out, allocate, nope.device, &v_shape, DType::F8_E4M3)?;
    let (mut k_stored, mut v_stored) = (Tensor::unset(op, "k_out"), Tensor::unset(op, "v_out"));
    arguments.read(&k_object, &mut k_stored)?;
    arguments.read(&v_object, &mut v_stored)?;
    let inputs = [Some(&nope), Some(&pe), Some(&values), k_dequant, v_dequant];
    check_output(&k_stored, &k_shape, K_SHAPE, DType::F8_E4M3, inputs.into_iter().flatten())?;
    let others = inputs.into_iter().chain([Some(&k_stored)]).flatten();
    check_output(&v_stored, &v_shape, V_SHAPE, DType::F8_E4M3, others)?;

    let fp8 = Fp8 { v: &values, v_out: &v_stored, value, value_out, k_scale: k_dequant, v_scale: v_dequant };
    let plan = Plan { op, keys, k_nope: &nope, k_pe: &pe, k_out: &k_stored, fp8: Some(fp8) };
    run(py, &arguments, &plan)?;
    Ok((k_object, v_object))
}

/// Checks V against the keys. Returns its width and the width of a stored head.
fn check_values(
    v: &Tensor,
    keys: &Keys,
    k_nope: &Tensor,
    pad_to: Option<&Bound<'_, PyAny>>,
) -> Result<(i64, i64)> {
    v.expect_dtype(&SOURCES)?;
    v.expect_rank(&["tokens", "heads", "value"])?;
    let value = v.shape()[2];
    v.expect_shape(&[keys.tokens, keys.heads, value], "tokens and heads of k_nope")?;
    check_width(v, "value width")?;
    v.expect_last_stride_1()?;
    v.expect_aligned(v.dtype.size())?;
    v.expect_device(k_nope.device, k_nope.name)?;
    let stored = match pad_to {
        None => value,
        // A number beyond 64 bits is out of range like any other.
        Some(number) if number.is_instance_of::<PyInt>() => number.extract().unwrap_or(-1),
        Some(other) => {
            let (expected, got) = ("an integer".into(), other.repr()?.to_string());
            return Err(Error::Type { op: v.op, argument: "v_pad_to", expected, got });
        }
    };
    if stored < value || stored % UNIT != 0 || stored > MAX_WIDTH {
        return Err(Error::Value {
            op: v.op,
            argument: "v_pad_to",
            expected: format!("a multiple of {UNIT} from the width {value} of v to {MAX_WIDTH}"),
            got: pad_to.map_or_else(String::new, ToString::to_string),
        });
    }
    Ok((value, stored))
}

fn read_scale<'a, 'py>(
    arguments: &mut Arguments<'py>,
    object: Option<&Bound<'py, PyAny>>,
    out: &'a mut Tensor,
    k_nope: &Tensor,
) -> Result<Option<&'a Tensor>> {
    let Some(object) = object else { return Ok(None) };
    arguments.read(object, out)?;
    out.expect_dtype(&[DType::F32])?;
    if out.numel() != 1 {
        return Err(out.value_error("one element"));
    }
    out.expect_device(k_nope.device, k_nope.name)?;
    out.expect_aligned(4)?;
    Ok(Some(out))
}
