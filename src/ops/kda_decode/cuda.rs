//! The CUDA implementation: which kernel, and its parameters. The kernels are in `kernels/kda_decode.cu` and
//! `kernels/kda_decode_spec.cu`.

use std::ptr;

use super::{DIM, Gate, Plan, row_stride};
use crate::cuda::launch::{FastDiv, Launch, Params, Stream, launch};
use crate::cuda::module::Kernel;
use crate::error::{Error, Result};
use crate::tensor::DType;

/// A kernel and its shape.
struct Variant {
    kernel: &'static Kernel,
    /// Blocks of a head's cluster.
    blocks: u32,
    threads: u32,
    /// Bytes of state that a block stages in shared memory.
    staged: u32,
}

macro_rules! variants {
    ($kernels:ident of $stem:literal: $($name:ident, $kernel:ident = $symbol:literal, $blocks:literal blocks, $threads:literal threads, $staged:literal staged;)*) => {
        $(
            static $kernel: Kernel = Kernel::new($stem, $symbol).with_shared($staged);
            static $name: Variant = Variant { kernel: &$kernel, blocks: $blocks, threads: $threads, staged: $staged };
        )*
        pub const $kernels: &[&Kernel] = &[$(&$kernel),*];
    };
}

variants! {
    KERNELS of "kda_decode":
    F32_QUARTER, K_F32_QUARTER = c"kda_decode_f32_quarter", 4 blocks, 128 threads, 0 staged;
    F32_HALF, K_F32_HALF = c"kda_decode_f32_half", 2 blocks, 128 threads, 32768 staged;
    F32_STEPPED, K_F32_STEPPED = c"kda_decode_f32_stepped", 1 blocks, 256 threads, 0 staged;
    F32_NARROW, K_F32_NARROW = c"kda_decode_f32_narrow", 1 blocks, 128 threads, 0 staged;
    BF16_HALF, K_BF16_HALF = c"kda_decode_bf16_half", 2 blocks, 128 threads, 16384 staged;
    BF16_NARROW, K_BF16_NARROW = c"kda_decode_bf16_narrow", 1 blocks, 128 threads, 32768 staged;
    FP16_HALF, K_FP16_HALF = c"kda_decode_fp16_half", 2 blocks, 128 threads, 16384 staged;
    FP16_NARROW, K_FP16_NARROW = c"kda_decode_fp16_narrow", 1 blocks, 128 threads, 32768 staged;
}

variants! {
    SPEC_KERNELS of "kda_decode_spec":
    SPEC_F32_QUARTER, K_SPEC_F32_QUARTER = c"kda_decode_spec_f32_quarter", 4 blocks, 128 threads, 0 staged;
    SPEC_F32_HALF, K_SPEC_F32_HALF = c"kda_decode_spec_f32_half", 2 blocks, 128 threads, 0 staged;
    SPEC_F32_NARROW, K_SPEC_F32_NARROW = c"kda_decode_spec_f32_narrow", 1 blocks, 128 threads, 0 staged;
    SPEC_BF16_QUARTER, K_SPEC_BF16_QUARTER = c"kda_decode_spec_bf16_quarter", 4 blocks, 128 threads, 0 staged;
    SPEC_BF16_HALF, K_SPEC_BF16_HALF = c"kda_decode_spec_bf16_half", 2 blocks, 128 threads, 0 staged;
    SPEC_BF16_NARROW, K_SPEC_BF16_NARROW = c"kda_decode_spec_bf16_narrow", 1 blocks, 128 threads, 0 staged;
    SPEC_FP16_QUARTER, K_SPEC_FP16_QUARTER = c"kda_decode_spec_fp16_quarter", 4 blocks, 128 threads, 0 staged;
    SPEC_FP16_HALF, K_SPEC_FP16_HALF = c"kda_decode_spec_fp16_half", 2 blocks, 128 threads, 0 staged;
    SPEC_FP16_NARROW, K_SPEC_FP16_NARROW = c"kda_decode_spec_fp16_narrow", 1 blocks, 128 threads, 0 staged;
}

/// Twin of `KdaParams` in `kernels/kda.cuh`. Strides in elements.
#[repr(C)]
#[derive(Clone, Copy)]
struct KdaParams {
    x: [*const u8; 3],
    conv_weight: [*const u8; 3],
    conv_bias: [*const u8; 3],
    conv_state: [*mut u8; 3],
    gate: *const u8,
    beta: *const u8,
    a_log: *const u8,
    dt_bias: *const u8,
    output_gate: *const u8,
    norm_weight: *const u8,
    state: *mut u8,
    indices: *const u8,
    out: *mut u8,
    x_row: [i64; 3],
    conv_slot: [i64; 3],
    conv_channel: i64,
    conv_tap: i64,
    weight_channel: i64,
    weight_tap: i64,
    gate_row: i64,
    beta_row: i64,
    output_gate_row: i64,
    out_row: i64,
    state_slot: i64,
    index_stride: i64,
    null_index: i64,
    heads: FastDiv,
    lower_bound: f32,
    norm_eps: f32,
    scale: f32,
    activation: u32,
    weight_dtype: u32,
    gate_dtype: u32,
    beta_dtype: u32,
    bounded: u32,
    log_decay: u32,
    beta_is_sigmoid: u32,
    wide_indices: u32,
}

// SAFETY: repr(C) with the fields of the kernels' KdaParams in their order; padding at the end is not read.
unsafe impl Params for KdaParams {}

// Also asserted beside the twin.
const _: () = assert!(size_of::<KdaParams>() == 360);

/// Twin of `KdaSpecParams` in `kernels/kda_decode_spec.cu`. Rows of `one` are tokens.
#[repr(C)]
#[derive(Clone, Copy)]
struct SpecParams {
    one: KdaParams,
    query_start: *const u8,
    accepted: *const u8,
    query_stride: i64,
    accepted_stride: i64,
    index_column: i64,
    rows: u32,
    tokens: u32,
    columns: u32,
    wide_query: u32,
    wide_accepted: u32,
}

// SAFETY: as KdaParams, which it holds first.
unsafe impl Params for SpecParams {}

// Also asserted beside the twin.
const _: () = assert!(size_of::<SpecParams>() == 424);

fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 0,
        DType::F16 => 1,
        DType::F32 => 2,
        _ => unreachable!("checked dtypes"),
    }
}

/// The fastest variant for a number of heads over all rows. From docs/kernels/kda_decode.md.
fn variant(state: DType, heads: u64) -> &'static Variant {
    match (state, heads) {
        (DType::F32, ..=36) => &F32_QUARTER,
        (DType::F32, ..=224) => &F32_HALF,
        (DType::F32, ..=320) => &F32_STEPPED,
        (DType::F32, _) => &F32_NARROW,
        (DType::BF16, ..=224) => &BF16_HALF,
        (DType::BF16, _) => &BF16_NARROW,
        (_, ..=224) => &FP16_HALF,
        (..) => &FP16_NARROW,
    }
}

fn spec_variant(state: DType, heads: u64) -> &'static Variant {
    match (state, heads) {
        (DType::F32, ..=36) => &SPEC_F32_QUARTER,
        (DType::F32, ..=224) => &SPEC_F32_HALF,
        (DType::F32, _) => &SPEC_F32_NARROW,
        (DType::BF16, ..=36) => &SPEC_BF16_QUARTER,
        (DType::BF16, ..=224) => &SPEC_BF16_HALF,
        (DType::BF16, _) => &SPEC_BF16_NARROW,
        (_, ..=36) => &SPEC_FP16_QUARTER,
        (_, ..=224) => &SPEC_FP16_HALF,
        (..) => &SPEC_FP16_NARROW,
    }
}

pub fn run(plan: &Plan<'_>, op: &'static str, index: i32, stream: Stream) -> Result<()> {
    let heads = plan.rows as u64 * plan.heads as u64;
    if heads >= 1 << 31 || plan.tokens >= 1 << 31 {
        let reason = format!(
            "{} rows of {} heads with {} tokens are more than a launch holds",
            plan.rows, plan.heads, plan.tokens
        );
        return Err(Error::Unsupported { op, reason });
    }
    let conv = &plan.conv;
    let pointer =
        |tensor: Option<&crate::tensor::Tensor>| tensor.map_or(ptr::null(), |t| t.data.cast_const());
    let norm = plan.norm.as_ref();
    let params = KdaParams {
        x: conv.x.map(<*mut u8>::cast_const),
        conv_weight: conv.weight.map(<*mut u8>::cast_const),
        conv_bias: conv.bias.map_or([ptr::null(); 3], |bias| bias.map(<*mut u8>::cast_const)),
        conv_state: conv.state,
        gate: plan.gate.data,
        beta: plan.beta.data,
        a_log: pointer(plan.a_log),
        dt_bias: pointer(plan.dt_bias),
        output_gate: pointer(norm.map(|norm| norm.output_gate)),
        norm_weight: pointer(norm.map(|norm| norm.weight)),
        state: plan.state.data,
        indices: plan.indices.data,
        out: plan.out.data,
        x_row: conv.x_row,
        conv_slot: conv.state_slot,
        conv_channel: conv.state_channel,
        conv_tap: conv.state_tap,
        weight_channel: conv.weight_channel,
        weight_tap: conv.weight_tap,
        gate_row: row_stride(plan.gate, 3),
        beta_row: row_stride(plan.beta, 2),
        output_gate_row: norm.map_or(0, |norm| row_stride(norm.output_gate, 3)),
        out_row: row_stride(plan.out, 3),
        state_slot: plan.state.stride(0),
        index_stride: plan.indices.stride(0),
        null_index: plan.null_index,
        heads: FastDiv::new(plan.heads as u32),
        lower_bound: if let Gate::Bounded(bound) = plan.gate_kind { bound } else { 0.0 },
        norm_eps: norm.map_or(0.0, |norm| norm.eps),
        scale: plan.scale,
        activation: dtype_code(conv.x_dtype),
        weight_dtype: dtype_code(conv.weight_dtype),
        gate_dtype: dtype_code(plan.gate.dtype),
        beta_dtype: dtype_code(plan.beta.dtype),
        bounded: matches!(plan.gate_kind, Gate::Bounded(_)).into(),
        log_decay: matches!(plan.gate_kind, Gate::Log).into(),
        beta_is_sigmoid: plan.beta_is_sigmoid.into(),
        wide_indices: (plan.indices.dtype == DType::I64).into(),
    };
    let choose = if plan.spec.is_some() { spec_variant } else { variant };
    let variant = choose(plan.state.dtype, heads);
    let shape = Launch {
        grid: heads * u64::from(variant.blocks),
        block: variant.threads,
        shared_bytes: variant.staged,
        cluster: variant.blocks,
    };
    debug_assert_eq!(DIM % i64::from(variant.blocks), 0);
    let Some(spec) = &plan.spec else {
        return launch(op, variant.kernel, index, stream, shape, &params);
    };
    let params = SpecParams {
        one: params,
        query_start: spec.starts.data,
        accepted: spec.accepted.data,
        query_stride: spec.starts.stride(0),
        accepted_stride: spec.accepted.stride(0),
        index_column: plan.indices.stride(1),
        rows: plan.rows as u32,
        tokens: plan.tokens as u32,
        columns: spec.columns as u32,
        wide_query: (spec.starts.dtype == DType::I64).into(),
        wide_accepted: (spec.accepted.dtype == DType::I64).into(),
    };
    launch(op, variant.kernel, index, stream, shape, &params)
}
