//! The CUDA implementation: which kernel, how many blocks, and its parameters. The kernels are in
//! `kernels/mla_kv_pack.cu`.

use std::ptr;

use super::{Plan, STEM, UNIT};
use crate::cuda::launch::{FastDiv, Launch, Params, Stream, launch};
use crate::cuda::module::Kernel;
use crate::error::Result;
use crate::tensor::{DType, Tensor};

/// Threads of a block; `kThreads` of the kernels.
const THREADS: u32 = 128;
/// Head sizes of the fast kernels.
const NOPE: i64 = 128;
const ROPE: i64 = 64;
const VALUE: i64 = 128;
/// Rows from which 16 threads a row are faster than 8. From docs/kernels/mla_kv_pack.md.
const SIXTEEN_LANES_FROM: u64 = 1 << 14;
/// Numbers that the kernels' 32-bit division is exact for.
const DIVIDEND_LIMIT: u64 = 1 << 31;

macro_rules! kernels {
    ($($id:ident = $name:literal;)*) => { $(static $id: Kernel = Kernel::new(STEM, $name);)* };
}

kernels! {
    CONCAT_L8 = c"mla_kv_concat_b16_l8";
    CONCAT_L16 = c"mla_kv_concat_b16_l16";
    CONCAT_B16 = c"mla_kv_concat_b16_generic";
    CONCAT_B8 = c"mla_kv_concat_b8_generic";
    PACK_GENERIC = c"mla_kv_pack_fp8_generic";
    BF16_L8 = c"mla_kv_pack_fp8_bf16_l8";
    BF16_L16 = c"mla_kv_pack_fp8_bf16_l16";
    BF16_PE8_L8 = c"mla_kv_pack_fp8_bf16_pe8_l8";
    BF16_PE8_L16 = c"mla_kv_pack_fp8_bf16_pe8_l16";
    BF16_SCALED_L8 = c"mla_kv_pack_fp8_bf16_scaled_l8";
    BF16_SCALED_L16 = c"mla_kv_pack_fp8_bf16_scaled_l16";
    BF16_PE8_SCALED_L8 = c"mla_kv_pack_fp8_bf16_pe8_scaled_l8";
    BF16_PE8_SCALED_L16 = c"mla_kv_pack_fp8_bf16_pe8_scaled_l16";
    FP16_L8 = c"mla_kv_pack_fp8_fp16_l8";
    FP16_L16 = c"mla_kv_pack_fp8_fp16_l16";
    FP16_PE8_L8 = c"mla_kv_pack_fp8_fp16_pe8_l8";
    FP16_PE8_L16 = c"mla_kv_pack_fp8_fp16_pe8_l16";
    FP16_SCALED_L8 = c"mla_kv_pack_fp8_fp16_scaled_l8";
    FP16_SCALED_L16 = c"mla_kv_pack_fp8_fp16_scaled_l16";
    FP16_PE8_SCALED_L8 = c"mla_kv_pack_fp8_fp16_pe8_scaled_l8";
    FP16_PE8_SCALED_L16 = c"mla_kv_pack_fp8_fp16_pe8_scaled_l16";
}

pub const CONCAT_KERNELS: &[&Kernel] = &[&CONCAT_L8, &CONCAT_L16, &CONCAT_B16, &CONCAT_B8];
pub const PACK_KERNELS: &[&Kernel] = &[
    &PACK_GENERIC,
    &BF16_L8,
    &BF16_L16,
    &BF16_PE8_L8,
    &BF16_PE8_L16,
    &BF16_SCALED_L8,
    &BF16_SCALED_L16,
    &BF16_PE8_SCALED_L8,
    &BF16_PE8_SCALED_L16,
    &FP16_L8,
    &FP16_L16,
    &FP16_PE8_L8,
    &FP16_PE8_L16,
    &FP16_SCALED_L8,
    &FP16_SCALED_L16,
    &FP16_PE8_SCALED_L8,
    &FP16_PE8_SCALED_L16,
];

/// Twin of `PackParams` in the kernels' file, where strides are in bytes and widths in units of 8 elements.
#[repr(C)]
#[derive(Clone, Copy)]
struct PackParams {
    k_nope: *const u8,
    k_pe: *const u8,
    v: *const u8,
    k_out: *mut u8,
    v_out: *mut u8,
    k_scale: *const u8,
    v_scale: *const u8,
    k_nope_token: i64,
    k_nope_head: i64,
    k_pe_token: i64,
    v_token: i64,
    v_head: i64,
    rows: u64,
    heads: FastDiv,
    row_units: FastDiv,
    nope_units: u32,
    rope_units: u32,
    v_units: u32,
    v_out_units: u32,
    k_nope_dtype: u32,
    k_pe_dtype: u32,
    v_dtype: u32,
    k_nope_vector: u32,
    k_pe_vector: u32,
    v_vector: u32,
}

// SAFETY: repr(C) with the fields of the kernels' PackParams in their order; the padding at the end is not read.
unsafe impl Params for PackParams {}

// Also asserted beside the twin.
const _: () = assert!(size_of::<PackParams>() == 168);

fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 0,
        DType::F16 => 1,
        DType::F8_E4M3 => 2,
        _ => unreachable!("checked: one of SOURCES"),
    }
}

/// Whether every unit of an input can be read in one access.
fn vector(tensor: &Tensor) -> bool {
    let bytes = UNIT * tensor.dtype.size() as i64;
    let rows = tensor.shape().len() - 1;
    tensor.data.addr().is_multiple_of(bytes as usize)
        && (0..rows).all(|dim| tensor.byte_stride(dim) % bytes == 0)
}

pub fn run(plan: &Plan<'_>, index: i32, stream: Stream) -> Result<()> {
    let rows = plan.keys.tokens as u64 * plan.keys.heads as u64;
    let fp8 = plan.fp8.as_ref();
    let (v_units, v_out_units) = fp8.map_or((0, 0), |fp8| (fp8.value / UNIT, fp8.value_out / UNIT));
    let row_units = (plan.keys.nope + plan.keys.rope) / UNIT + v_out_units;
    if row_units == 0 {
        return Ok(());
    }
    let scale = |tensor: Option<&Tensor>| tensor.map_or(ptr::null(), |t| t.data.cast_const());
    let params = PackParams {
        k_nope: plan.k_nope.data,
        k_pe: plan.k_pe.data,
        v: fp8.map_or(ptr::null(), |fp8| fp8.v.data.cast_const()),
        k_out: plan.k_out.data,
        v_out: fp8.map_or(ptr::null_mut(), |fp8| fp8.v_out.data),
        k_scale: fp8.map_or(ptr::null(), |fp8| scale(fp8.k_scale)),
        v_scale: fp8.map_or(ptr::null(), |fp8| scale(fp8.v_scale)),
        k_nope_token: plan.k_nope.byte_stride(0),
        k_nope_head: plan.k_nope.byte_stride(1),
        k_pe_token: plan.k_pe.byte_stride(0),
        v_token: fp8.map_or(0, |fp8| fp8.v.byte_stride(0)),
        v_head: fp8.map_or(0, |fp8| fp8.v.byte_stride(1)),
        rows,
        heads: FastDiv::new(plan.keys.heads as u32),
        row_units: FastDiv::new(row_units as u32),
        nope_units: (plan.keys.nope / UNIT) as u32,
        rope_units: (plan.keys.rope / UNIT) as u32,
        v_units: v_units as u32,
        v_out_units: v_out_units as u32,
        k_nope_dtype: dtype_code(plan.k_nope.dtype),
        k_pe_dtype: dtype_code(plan.k_pe.dtype),
        v_dtype: fp8.map_or(0, |fp8| dtype_code(fp8.v.dtype)),
        k_nope_vector: vector(plan.k_nope).into(),
        k_pe_vector: vector(plan.k_pe).into(),
        v_vector: fp8.is_some_and(|fp8| vector(fp8.v)).into(),
    };
    let (kernel, shape) = match fast_kernel(plan, rows) {
        Some((kernel, lanes)) => (kernel, Launch::of((rows * lanes).div_ceil(u64::from(THREADS)), THREADS)),
        None => (generic_kernel(plan), Launch::of(generic_grid(rows * row_units as u64), THREADS)),
    };
    launch(plan.op, kernel, index, stream, shape, &params)
}

/// The kernel for the common head sizes and 16-byte aligned inputs, with the threads that it gives to a row.
fn fast_kernel(plan: &Plan<'_>, rows: u64) -> Option<(&'static Kernel, u64)> {
    let aligned = vector(plan.k_nope) && vector(plan.k_pe);
    if !aligned
        || plan.keys.nope != NOPE
        || plan.keys.rope != ROPE
        || rows + u64::from(THREADS) >= DIVIDEND_LIMIT
    {
        return None;
    }
    let wide = rows >= SIXTEEN_LANES_FROM;
    let pick = |[l8, l16]: [&'static Kernel; 2]| Some(if wide { (l16, 16) } else { (l8, 8) });
    let source = plan.k_nope.dtype;
    let Some(fp8) = &plan.fp8 else {
        return if source.size() == 2 { pick([&CONCAT_L8, &CONCAT_L16]) } else { None };
    };
    if fp8.value != VALUE || fp8.value_out != VALUE || fp8.v.dtype != source || !vector(fp8.v) {
        return None;
    }
    let scaled = fp8.k_scale.is_some() || fp8.v_scale.is_some();
    let rope_is_fp8 = match plan.k_pe.dtype {
        DType::F8_E4M3 => true,
        dtype if dtype == source => false,
        _ => return None,
    };
    let [bf16, fp16] = match (rope_is_fp8, scaled) {
        (false, false) => [[&BF16_L8, &BF16_L16], [&FP16_L8, &FP16_L16]],
        (true, false) => [[&BF16_PE8_L8, &BF16_PE8_L16], [&FP16_PE8_L8, &FP16_PE8_L16]],
        (false, true) => [[&BF16_SCALED_L8, &BF16_SCALED_L16], [&FP16_SCALED_L8, &FP16_SCALED_L16]],
        (true, true) => {
            [[&BF16_PE8_SCALED_L8, &BF16_PE8_SCALED_L16], [&FP16_PE8_SCALED_L8, &FP16_PE8_SCALED_L16]]
        }
    };
    match source {
        DType::BF16 => pick(bf16),
        DType::F16 => pick(fp16),
        _ => None,
    }
}

fn generic_kernel(plan: &Plan<'_>) -> &'static Kernel {
    match (&plan.fp8, plan.k_nope.dtype.size()) {
        (Some(_), _) => &PACK_GENERIC,
        (None, 2) => &CONCAT_B16,
        (None, _) => &CONCAT_B8,
    }
}

/// One unit a thread; the kernels stride where that would be more blocks than a grid holds.
fn generic_grid(units: u64) -> u64 {
    units.div_ceil(u64::from(THREADS)).min(crate::cuda::launch::MAX_GRID)
}
