//! `nvfp4_quantize`, `silu_mul_nvfp4` and `add_rms_norm_nvfp4`: activations in NVFP4, in one launch with what stands
//! before the quantisation.
//!
//! This file checks the arguments and makes the plans that `cpu.rs` and `cuda.rs` carry out.

mod cpu;
mod cuda;

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use super::{Op, carry_out, output};
use crate::dlpack::Arguments;
use crate::error::{Error, Result};
use crate::nvfp4::{BLOCK, Layout};
use crate::tensor::{DType, Device, Tensor};

pub(super) use cuda::{OutputParams, output_params, padding_pieces};

const STEM: &str = "nvfp4_quant";
pub const QUANTIZE: Op = Op { name: "nvfp4_quantize", stem: STEM, kernels: cuda::QUANTIZE_KERNELS };
pub const SILU_MUL: Op = Op { name: "silu_mul_nvfp4", stem: STEM, kernels: cuda::SILU_MUL_KERNELS };
pub const ADD_RMS_NORM: Op =
    Op { name: "add_rms_norm_nvfp4", stem: STEM, kernels: cuda::ADD_RMS_NORM_KERNELS };

const SOURCES: [DType; 2] = [DType::BF16, DType::F16];
/// Far above any model's; the kernels count blocks of a row in 32 bits.
const MAX_WIDTH: i64 = 1 << 24;
/// Rows of all experts together.
const MAX_ROWS: i64 = 1 << 40;
const UNIT: i64 = BLOCK as i64;

/// One quantisation: checked scale and outputs, apart from each other.
#[derive(Clone, Copy)]
pub(super) struct Quantized<'a> {
    pub global_scale: &'a Tensor,
    pub packed: &'a Tensor,
    pub scales: &'a Tensor,
    pub layout: Layout,
}

/// Checked arguments of the ops without a norm.
pub(super) struct Plan<'a> {
    op: &'static str,
    /// [rows, K], [rows, 2K] or [experts, rows, 2K].
    x: &'a Tensor,
    silu: bool,
    experts: i64,
    rows: i64,
    width: i64,
    row_counts: Option<&'a Tensor>,
    out: Quantized<'a>,
}

impl<'a> Plan<'a> {
    /// The quantisation of the rows of `x`, and nothing before it.
    pub fn of_rows(op: &'static str, x: &'a Tensor, out: Quantized<'a>) -> Self {
        let [rows, width] = *x.shape() else { unreachable!("checked: [rows, K]") };
        Self { op, x, silu: false, experts: 1, rows, width, row_counts: None, out }
    }

    pub fn run_on_cpu(&self) {
        cpu::run(self);
    }
}

/// Checked arguments of `add_rms_norm_nvfp4`.
struct NormPlan<'a> {
    x: &'a Tensor,
    residual: &'a Tensor,
    weight: &'a Tensor,
    norm: Option<&'a Tensor>,
    eps: f32,
    rows: i64,
    width: i64,
    out: Quantized<'a>,
    second: Option<Quantized<'a>>,
}

impl NormPlan<'_> {
    /// Lanes that the sum of squares is split over; the number that vLLM takes, so that the sum is the same.
    fn lanes(&self) -> usize {
        if self.rows < 256 { 1024 } else { 256 }
    }
}

pub(super) fn read_layout(
    op: &'static str,
    argument: &'static str,
    object: &Bound<'_, PyAny>,
) -> Result<Layout> {
    let names = || Layout::NAMES.map(|(name, _)| format!("{name:?}")).join(" or ");
    let Ok(text) = object.cast::<PyString>() else {
        return Err(Error::Type { op, argument, expected: names(), got: object.repr()?.to_string() });
    };
    let text = text.to_cow()?;
    match Layout::NAMES.iter().find(|(name, _)| *name == text) {
        Some((_, layout)) => Ok(*layout),
        None => Err(Error::Value { op, argument, expected: names(), got: format!("{text:?}") }),
    }
}

/// A 16-bit activation with any row stride. `factor` widths lie in its last dimension.
pub(super) fn check_rows(x: &Tensor, layout: &[&str], factor: i64) -> Result<(i64, i64)> {
    x.expect_dtype(&SOURCES)?;
    x.expect_rank(layout)?;
    let last = x.shape().len() - 1;
    let (rows, width) = (x.shape()[last - 1], x.shape()[last] / factor);
    if x.shape()[last] % (UNIT * factor) != 0 || !(UNIT..=MAX_WIDTH).contains(&width) {
        let step = UNIT * factor;
        return Err(x.value_error(format!(
            "a last dimension that is a multiple of {step}, from {step} to {}",
            MAX_WIDTH * factor
        )));
    }
    if x.shape()[..last].iter().product::<i64>() > MAX_ROWS {
        return Err(x.value_error(format!("at most {MAX_ROWS} rows")));
    }
    x.expect_last_stride_1()?;
    x.expect_aligned(2)?;
    match x.device {
        Device::Cpu | Device::Cuda(_) => Ok((rows, width)),
        Device::Other(_) => Err(x.value_error("a tensor on a CPU or CUDA device")),
    }
}

/// Reads a scale: fp32, one element, or one for each of `experts`.
pub(super) fn read_scale<'py>(
    arguments: &mut Arguments<'py>,
    object: &Bound<'py, PyAny>,
    scale: &mut Tensor,
    experts: i64,
    x: &Tensor,
) -> Result<()> {
    arguments.read(object, scale)?;
    scale.expect_dtype(&[DType::F32])?;
    if scale.numel() != 1 && scale.numel() != experts {
        let each = if experts > 1 { format!(" or {experts} (one for each expert)") } else { String::new() };
        return Err(scale.value_error(format!("one element{each}")));
    }
    scale.expect_contiguous()?;
    scale.expect_device(x.device, x.name)?;
    scale.expect_aligned(4)
}

/// Shape of the codes and of the scales; `experts` is empty for ops without.
pub(super) fn shapes(layout: Layout, experts: &[i64], rows: i64, width: i64) -> (Vec<i64>, Vec<i64>) {
    let (scale_rows, scale_cols) = layout.padded(rows, width / UNIT);
    ([experts, &[rows, width / 2]].concat(), [experts, &[scale_rows, scale_cols]].concat())
}

fn check_output<'a>(
    out: &Tensor,
    shape: &[i64],
    why: &str,
    dtypes: &[DType],
    aligned: usize,
    others: impl IntoIterator<Item = &'a Tensor>,
) -> Result<()> {
    out.expect_dtype(dtypes)?;
    out.expect_shape(shape, why)?;
    out.expect_contiguous()?;
    out.expect_aligned(aligned)?;
    out.expect_writable()?;
    for other in others {
        out.expect_device(other.device, other.name)?;
        out.expect_apart_from(other)?;
    }
    Ok(())
}

/// Makes or takes the two outputs of a quantisation and reads them.
pub(super) struct Outputs<'py> {
    pub packed: Bound<'py, PyAny>,
    pub scales: Bound<'py, PyAny>,
}

impl<'py> Outputs<'py> {
    #[expect(clippy::too_many_arguments, reason = "two outputs, each given or made, with their geometry")]
    pub fn read(
        arguments: &mut Arguments<'py>,
        given: (Option<&Bound<'py, PyAny>>, Option<&Bound<'py, PyAny>>),
        allocate: &Bound<'py, PyAny>,
        device: Device,
        layout: Layout,
        (packed_shape, scales_shape): &(Vec<i64>, Vec<i64>),
        (packed, scales): (&mut Tensor, &mut Tensor),
        others: &[&Tensor],
    ) -> Result<Self> {
        let made = Self {
            packed: output(given.0, allocate, device, packed_shape, DType::U8)?,
            scales: output(given.1, allocate, device, scales_shape, DType::U8)?,
        };
        arguments.read(&made.packed, packed)?;
        arguments.read(&made.scales, scales)?;
        let why = "rows, two codes a byte";
        check_output(packed, packed_shape, why, &[DType::U8], 8, others.iter().copied())?;
        let aligned = if layout == Layout::Linear { 1 } else { 16 };
        let others = others.iter().copied().chain([&*packed]);
        let dtypes = [DType::U8, DType::F8_E4M3];
        check_output(
            scales,
            scales_shape,
            "one scale a block, padded to the layout",
            &dtypes,
            aligned,
            others,
        )?;
        Ok(made)
    }
}

pub(super) fn run(py: Python<'_>, arguments: &Arguments<'_>, plan: &Plan<'_>) -> Result<()> {
    if plan.rows == 0 || plan.experts == 0 {
        return Ok(());
    }
    let cuda = |index, stream| cuda::run(plan, index, stream);
    carry_out(py, arguments, plan.x.device, || cpu::run(plan), cuda)
}

#[pyfunction]
#[pyo3(signature = (x, global_scale, layout, out, out_scale, allocate, /))]
pub fn nvfp4_quantize<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    global_scale: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    out_scale: Option<&Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
) -> Result<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let op = QUANTIZE.name;
    let mut arguments = Arguments::new(py);
    let (mut source, mut scale) = (Tensor::unset(op, "x"), Tensor::unset(op, "global_scale"));
    arguments.read(x, &mut source)?;
    let (rows, width) = check_rows(&source, &["rows", "K"], 1)?;
    read_scale(&mut arguments, global_scale, &mut scale, 1, &source)?;
    let layout = read_layout(op, "layout", layout)?;

    let (mut packed, mut scales) = (Tensor::unset(op, "out"), Tensor::unset(op, "out_scale"));
    let shapes = shapes(layout, &[], rows, width);
    let made = Outputs::read(
        &mut arguments,
        (out, out_scale),
        allocate,
        source.device,
        layout,
        &shapes,
        (&mut packed, &mut scales),
        &[&source, &scale],
    )?;
    let out = Quantized { global_scale: &scale, packed: &packed, scales: &scales, layout };
    run(py, &arguments, &Plan::of_rows(op, &source, out))?;
    Ok((made.packed, made.scales))
}

#[pyfunction]
#[pyo3(signature = (gate_up, global_scale, layout, mask_m, out, out_scale, allocate, /))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the op")]
pub fn silu_mul_nvfp4<'py>(
    py: Python<'py>,
    gate_up: &Bound<'py, PyAny>,
    global_scale: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyAny>,
    mask_m: Option<&Bound<'py, PyAny>>,
    out: Option<&Bound<'py, PyAny>>,
    out_scale: Option<&Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
) -> Result<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let op = SILU_MUL.name;
    let mut arguments = Arguments::new(py);
    let (mut source, mut scale) = (Tensor::unset(op, "gate_up"), Tensor::unset(op, "global_scale"));
    arguments.read(gate_up, &mut source)?;
    let grouped = mask_m.is_some() || source.shape().len() == 3;
    let dims: &[&str] = if grouped { &["experts", "rows", "2K"] } else { &["rows", "2K"] };
    let (rows, width) = check_rows(&source, dims, 2)?;
    let experts = if grouped { source.shape()[0] } else { 1 };
    read_scale(&mut arguments, global_scale, &mut scale, experts, &source)?;
    let layout = read_layout(op, "layout", layout)?;
    let mut counts = Tensor::unset(op, "mask_m");
    let counts = match mask_m {
        None => None,
        Some(object) => {
            arguments.read(object, &mut counts)?;
            counts.expect_dtype(&[DType::I32])?;
            counts.expect_shape(&[experts], "experts of gate_up")?;
            counts.expect_contiguous()?;
            counts.expect_device(source.device, source.name)?;
            counts.expect_aligned(4)?;
            Some(&counts)
        }
    };

    let (mut packed, mut scales) = (Tensor::unset(op, "out"), Tensor::unset(op, "out_scale"));
    let shapes = shapes(layout, if grouped { &source.shape()[..1] } else { &[] }, rows, width);
    let inputs: Vec<&Tensor> = [Some(&source), Some(&scale), counts].into_iter().flatten().collect();
    let made = Outputs::read(
        &mut arguments,
        (out, out_scale),
        allocate,
        source.device,
        layout,
        &shapes,
        (&mut packed, &mut scales),
        &inputs,
    )?;
    let out = Quantized { global_scale: &scale, packed: &packed, scales: &scales, layout };
    let plan = Plan { op, x: &source, silu: true, experts, rows, width, row_counts: counts, out };
    run(py, &arguments, &plan)?;
    Ok((made.packed, made.scales))
}

/// A tensor of the dtype of x, on its device.
fn check_like(tensor: &Tensor, x: &Tensor, shape: &[i64]) -> Result<()> {
    if tensor.dtype != x.dtype {
        return Err(tensor.type_error(format!("dtype {} (that of x)", x.dtype)));
    }
    tensor.expect_shape(shape, "rows and K of x")?;
    tensor.expect_last_stride_1()?;
    tensor.expect_device(x.device, x.name)?;
    tensor.expect_aligned(2)
}

/// Rows of an output in place: their elements do not overlap.
fn check_rows_apart(tensor: &Tensor, width: i64) -> Result<()> {
    tensor.expect_writable()?;
    if tensor.shape()[0] > 1 && tensor.stride(0).abs() < width {
        return Err(tensor.value_error(format!("rows at least {width} elements apart")));
    }
    Ok(())
}

#[pyfunction]
#[pyo3(signature = (x, residual, weight, eps, global_scale, layout, out, out_scale, out_norm, second_scale, second_layout, second_out, second_out_scale, allocate, /))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the op")]
pub fn add_rms_norm_nvfp4<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    residual: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    eps: f64,
    global_scale: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    out_scale: Option<&Bound<'py, PyAny>>,
    out_norm: Option<&Bound<'py, PyAny>>,
    second_scale: Option<&Bound<'py, PyAny>>,
    second_layout: &Bound<'py, PyAny>,
    second_out: Option<&Bound<'py, PyAny>>,
    second_out_scale: Option<&Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
) -> Result<Bound<'py, PyTuple>> {
    let op = ADD_RMS_NORM.name;
    let mut arguments = Arguments::new(py);
    let (mut source, mut sums, mut gain) =
        (Tensor::unset(op, "x"), Tensor::unset(op, "residual"), Tensor::unset(op, "weight"));
    arguments.read(x, &mut source)?;
    let (rows, width) = check_rows(&source, &["rows", "K"], 1)?;
    let shape = [rows, width];
    arguments.read(residual, &mut sums)?;
    arguments.read(weight, &mut gain)?;
    check_like(&sums, &source, &shape)?;
    check_like(&gain, &source, &shape[1..])?;
    check_rows_apart(&sums, width)?;
    sums.expect_apart_from(&source)?;
    sums.expect_apart_from(&gain)?;
    let mut scale = Tensor::unset(op, "global_scale");
    read_scale(&mut arguments, global_scale, &mut scale, 1, &source)?;
    sums.expect_apart_from(&scale)?;
    let layout = read_layout(op, "layout", layout)?;
    let second_layout = read_layout(op, "second_layout", second_layout)?;

    let mut inputs = vec![&source, &sums, &gain, &scale];
    let mut norm = Tensor::unset(op, "out_norm");
    if let Some(object) = out_norm {
        arguments.read(object, &mut norm)?;
        check_like(&norm, &source, &shape)?;
        check_rows_apart(&norm, width)?;
        // A row of x is read in full before its norm is written, so the norm may replace x.
        let replaces_x = norm.data == source.data && norm.stride(0) == source.stride(0);
        for other in inputs.iter().skip(usize::from(replaces_x)) {
            norm.expect_apart_from(other)?;
        }
        inputs.push(&norm);
    }
    let mut other_scale = Tensor::unset(op, "second_scale");
    if let Some(object) = second_scale {
        read_scale(&mut arguments, object, &mut other_scale, 1, &source)?;
        sums.expect_apart_from(&other_scale)?;
        if out_norm.is_some() {
            norm.expect_apart_from(&other_scale)?;
        }
        inputs.push(&other_scale);
    } else if second_out.is_some() || second_out_scale.is_some() {
        let argument = if second_out.is_some() { "second_out" } else { "second_out_scale" };
        let (expected, got) = ("None without second_scale".into(), "a tensor".into());
        return Err(Error::Value { op, argument, expected, got });
    }

    let (mut packed, mut scales) = (Tensor::unset(op, "out"), Tensor::unset(op, "out_scale"));
    let made = Outputs::read(
        &mut arguments,
        (out, out_scale),
        allocate,
        source.device,
        layout,
        &shapes(layout, &[], rows, width),
        (&mut packed, &mut scales),
        &inputs,
    )?;
    inputs.extend([&packed, &scales]);
    let (mut second_packed, mut second_scales) =
        (Tensor::unset(op, "second_out"), Tensor::unset(op, "second_out_scale"));
    let second_made = match second_scale {
        None => None,
        Some(_) => Some(Outputs::read(
            &mut arguments,
            (second_out, second_out_scale),
            allocate,
            source.device,
            second_layout,
            &shapes(second_layout, &[], rows, width),
            (&mut second_packed, &mut second_scales),
            &inputs,
        )?),
    };

    let plan = NormPlan {
        x: &source,
        residual: &sums,
        weight: &gain,
        norm: out_norm.map(|_| &norm),
        eps: eps as f32,
        rows,
        width,
        out: Quantized { global_scale: &scale, packed: &packed, scales: &scales, layout },
        second: second_made.as_ref().map(|_| Quantized {
            global_scale: &other_scale,
            packed: &second_packed,
            scales: &second_scales,
            layout: second_layout,
        }),
    };
    if rows > 0 {
        let cuda = |index, stream| cuda::run_norm(&plan, index, stream);
        carry_out(py, &arguments, source.device, || cpu::run_norm(&plan), cuda)?;
    }
    let results = [Some(made), second_made].into_iter().flatten();
    Ok(PyTuple::new(py, results.flat_map(|made| [made.packed, made.scales]).collect::<Vec<_>>())?)
}
