//! The CUDA implementation: which kernel, how many blocks, and its parameters. The kernels are in
//! `kernels/nvfp4_quant.cu`.

use std::ptr;

use super::{ADD_RMS_NORM, NormPlan, Plan, Quantized, STEM, UNIT};
use crate::cuda::launch::{FastDiv, Launch, Params, Stream, launch};
use crate::cuda::module::Kernel;
use crate::error::{Error, Result};
use crate::nvfp4::Layout;
use crate::tensor::{DType, Tensor};

/// Threads of a block of the kernels that do not reduce; `kThreads` of the kernels.
const THREADS: u32 = 128;
/// Threads of a norm with 1024 lanes, and blocks of 16 that a row may have for its registers to hold it.
const FEW_THREADS: u32 = 512;
const FEW_HELD: u32 = 512;
/// The same with 256 lanes; where registers hold the row, two threads share what would be one's.
const MANY_THREADS: u32 = 128;
const MANY_PARTS: u32 = 2;
const MANY_HELD: u32 = 512;
const WARP: u32 = 32;

macro_rules! kernels {
    ($($id:ident = $name:literal;)*) => { $(static $id: Kernel = Kernel::new(STEM, $name);)* };
}

kernels! {
    QUANTIZE_BF16 = c"nvfp4_quantize_bf16";
    QUANTIZE_BF16_UNALIGNED = c"nvfp4_quantize_bf16_unaligned";
    QUANTIZE_FP16 = c"nvfp4_quantize_fp16";
    QUANTIZE_FP16_UNALIGNED = c"nvfp4_quantize_fp16_unaligned";
    SILU_BF16 = c"silu_mul_nvfp4_bf16";
    SILU_BF16_UNALIGNED = c"silu_mul_nvfp4_bf16_unaligned";
    SILU_FP16 = c"silu_mul_nvfp4_fp16";
    SILU_FP16_UNALIGNED = c"silu_mul_nvfp4_fp16_unaligned";
    NORM_BF16_FEW = c"add_rms_norm_nvfp4_bf16_few";
    NORM_BF16_FEW_GENERIC = c"add_rms_norm_nvfp4_bf16_few_generic";
    NORM_BF16_MANY = c"add_rms_norm_nvfp4_bf16_many";
    NORM_BF16_MANY_GENERIC = c"add_rms_norm_nvfp4_bf16_many_generic";
    NORM_FP16_FEW = c"add_rms_norm_nvfp4_fp16_few";
    NORM_FP16_FEW_GENERIC = c"add_rms_norm_nvfp4_fp16_few_generic";
    NORM_FP16_MANY = c"add_rms_norm_nvfp4_fp16_many";
    NORM_FP16_MANY_GENERIC = c"add_rms_norm_nvfp4_fp16_many_generic";
}

pub const QUANTIZE_KERNELS: &[&Kernel] =
    &[&QUANTIZE_BF16, &QUANTIZE_BF16_UNALIGNED, &QUANTIZE_FP16, &QUANTIZE_FP16_UNALIGNED];
pub const SILU_MUL_KERNELS: &[&Kernel] =
    &[&SILU_BF16, &SILU_BF16_UNALIGNED, &SILU_FP16, &SILU_FP16_UNALIGNED];
pub const ADD_RMS_NORM_KERNELS: &[&Kernel] = &[
    &NORM_BF16_FEW,
    &NORM_BF16_FEW_GENERIC,
    &NORM_BF16_MANY,
    &NORM_BF16_MANY_GENERIC,
    &NORM_FP16_FEW,
    &NORM_FP16_FEW_GENERIC,
    &NORM_FP16_MANY,
    &NORM_FP16_MANY_GENERIC,
];

/// Twin of `OutputParams` in `kernels/nvfp4.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OutputParams {
    packed: *mut u8,
    scales: *mut u8,
    global_scale: *const u8,
    layout: u32,
    pub scale_cols: u32,
}

/// Twin of `QuantParams`. Strides in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct QuantParams {
    out: OutputParams,
    x: *const u8,
    row_counts: *const u8,
    x_row: i64,
    x_expert: i64,
    units: u64,
    rows: u64,
    expert_scales: u64,
    live_blocks: u64,
    scale_cols: FastDiv,
    expert_rows: FastDiv,
    padding_pieces: FastDiv,
    cols: u32,
    experts: u32,
    global_scale_step: u32,
}

// SAFETY: repr(C) with the fields of the kernels' QuantParams in their order and no padding.
unsafe impl Params for QuantParams {}

/// Twin of `NormParams`. Strides in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct NormParams {
    out: OutputParams,
    second: OutputParams,
    x: *const u8,
    residual: *mut u8,
    weight: *const u8,
    norm: *mut u8,
    x_row: i64,
    residual_row: i64,
    norm_row: i64,
    rows: u64,
    cols: u32,
    padding_blocks: u32,
    second_padding_blocks: u32,
    eps: f32,
}

// SAFETY: repr(C) with the fields of the kernels' NormParams in their order and no padding.
unsafe impl Params for NormParams {}

// Also asserted beside the twins.
const _: () = assert!(size_of::<QuantParams>() == 144 && size_of::<NormParams>() == 144);

pub fn output_params(to: &Quantized<'_>, cols: i64) -> OutputParams {
    OutputParams {
        packed: to.packed.data,
        scales: to.scales.data,
        global_scale: to.global_scale.data,
        layout: match to.layout {
            Layout::Linear => 0,
            Layout::Swizzled128x4 => 1,
            Layout::Swizzled8x4 => 2,
        },
        scale_cols: to.layout.padded(1, cols).1 as u32,
    }
}

/// Pieces that the padding rows of a layout are zeroed in: 16 bytes of 128x4, 4 of 8x4.
pub fn padding_pieces(layout: Layout, rows: i64, cols: i64) -> u64 {
    let (padded_rows, padded_cols) = layout.padded(rows, cols);
    match layout {
        _ if padded_rows == rows => 0,
        Layout::Swizzled128x4 => padded_cols as u64 / 4 * 32,
        _ => padded_cols as u64 / 4 * 8,
    }
}

/// Whether every block of 16 can be read in 16-byte accesses.
fn vector(tensor: &Tensor) -> bool {
    let last = tensor.shape().len() - 1;
    tensor.data.addr().is_multiple_of(16) && (0..last).all(|dim| tensor.byte_stride(dim) % 16 == 0)
}

fn too_large(op: &'static str) -> Error {
    Error::Unsupported { op, reason: "more experts and rows than a launch holds".into() }
}

pub fn run(plan: &Plan<'_>, index: i32, stream: Stream) -> Result<()> {
    let cols = plan.width / UNIT;
    let layout = plan.out.layout;
    let (scale_rows, scale_cols) = layout.padded(plan.rows, cols);
    let units = (plan.experts * plan.rows * scale_cols) as u64;
    let live_blocks = units.div_ceil(u64::from(THREADS));
    let pieces = padding_pieces(layout, plan.rows, cols);
    let row_dim = plan.x.shape().len() - 2;
    // One divisor covers the rows of an op without experts, whose number it is never divided by.
    let expert_rows =
        if row_dim == 1 { u32::try_from(plan.rows).ok().filter(|rows| *rows <= 1 << 31) } else { Some(1) };
    let params = QuantParams {
        out: output_params(&plan.out, cols),
        x: plan.x.data,
        row_counts: plan.row_counts.map_or(ptr::null(), |t| t.data.cast_const()),
        x_row: plan.x.byte_stride(row_dim),
        x_expert: if row_dim == 1 { plan.x.byte_stride(0) } else { 0 },
        units,
        rows: plan.rows as u64,
        expert_scales: (scale_rows * scale_cols) as u64,
        live_blocks,
        scale_cols: FastDiv::new(scale_cols as u32),
        expert_rows: FastDiv::new(expert_rows.ok_or_else(|| too_large(plan.op))?),
        padding_pieces: FastDiv::new(pieces.max(1) as u32),
        cols: cols as u32,
        experts: u32::try_from(plan.experts).map_err(|_| too_large(plan.op))?,
        global_scale_step: (plan.out.global_scale.numel() > 1).into(),
    };
    let padding_blocks = (plan.experts as u64 * pieces).div_ceil(u64::from(THREADS));
    let kernel = match (plan.silu, plan.x.dtype, vector(plan.x)) {
        (false, DType::BF16, true) => &QUANTIZE_BF16,
        (false, DType::BF16, false) => &QUANTIZE_BF16_UNALIGNED,
        (false, _, true) => &QUANTIZE_FP16,
        (false, _, false) => &QUANTIZE_FP16_UNALIGNED,
        (true, DType::BF16, true) => &SILU_BF16,
        (true, DType::BF16, false) => &SILU_BF16_UNALIGNED,
        (true, _, true) => &SILU_FP16,
        (true, _, false) => &SILU_FP16_UNALIGNED,
    };
    launch(plan.op, kernel, index, stream, Launch::of(live_blocks + padding_blocks, THREADS), &params)
}

pub fn run_norm(plan: &NormPlan<'_>, index: i32, stream: Stream) -> Result<()> {
    let cols = plan.width / UNIT;
    let few = plan.lanes() == 2 * FEW_THREADS as usize;
    let aligned = [Some(plan.x), Some(plan.residual), Some(plan.weight), plan.norm];
    let held = aligned.into_iter().flatten().all(vector)
        && cols <= i64::from(if few { FEW_HELD } else { MANY_HELD });
    let kernel = match (plan.x.dtype, few, held) {
        (DType::BF16, true, true) => &NORM_BF16_FEW,
        (DType::BF16, true, false) => &NORM_BF16_FEW_GENERIC,
        (DType::BF16, false, true) => &NORM_BF16_MANY,
        (DType::BF16, false, false) => &NORM_BF16_MANY_GENERIC,
        (_, true, true) => &NORM_FP16_FEW,
        (_, true, false) => &NORM_FP16_FEW_GENERIC,
        (_, false, true) => &NORM_FP16_MANY,
        (_, false, false) => &NORM_FP16_MANY_GENERIC,
    };
    // Threads without an element only add zeros to the sum.
    let needed = (cols as u32).next_multiple_of(WARP);
    let threads = match (few, held) {
        (true, _) => FEW_THREADS.min(needed),
        (false, true) => MANY_THREADS * MANY_PARTS,
        (false, false) => MANY_THREADS.min(needed),
    };
    let padding =
        |to: &Quantized<'_>| padding_pieces(to.layout, plan.rows, cols).div_ceil(u64::from(threads)) as u32;
    let nothing = OutputParams {
        packed: ptr::null_mut(),
        scales: ptr::null_mut(),
        global_scale: ptr::null(),
        layout: 0,
        scale_cols: 0,
    };
    let params = NormParams {
        out: output_params(&plan.out, cols),
        second: plan.second.as_ref().map_or(nothing, |second| output_params(second, cols)),
        x: plan.x.data,
        residual: plan.residual.data,
        weight: plan.weight.data,
        norm: plan.norm.map_or(ptr::null_mut(), |norm| norm.data),
        x_row: plan.x.byte_stride(0),
        residual_row: plan.residual.byte_stride(0),
        norm_row: plan.norm.map_or(0, |norm| norm.byte_stride(0)),
        rows: plan.rows as u64,
        cols: cols as u32,
        padding_blocks: padding(&plan.out),
        second_padding_blocks: plan.second.as_ref().map_or(0, padding),
        eps: plan.eps,
    };
    let grid = params.rows + u64::from(params.padding_blocks) + u64::from(params.second_padding_blocks);
    launch(ADD_RMS_NORM.name, kernel, index, stream, Launch::of(grid, threads), &params)
}
