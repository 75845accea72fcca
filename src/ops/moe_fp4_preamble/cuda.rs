//! The CUDA implementation: which kernel, how many blocks, and its parameters. The kernels are in
//! `kernels/moe_fp4_preamble.cu`.

use super::{PREAMBLE, Plan};
use crate::cuda::launch::{FastDiv, Launch, Params, Stream, launch};
use crate::cuda::module::Kernel;
use crate::error::Result;
use crate::gate::{BLOCK_THREADS, GateOperands};
use crate::nvfp4::BLOCK;
use crate::ops::nvfp4_quant::{OutputParams, output_params, padding_pieces};
use crate::tensor::DType;

macro_rules! kernels {
    ($($name:ident = $symbol:literal;)*) => {
        $(static $name: Kernel = Kernel::new("moe_fp4_preamble", $symbol);)*
        pub const KERNELS: &[&Kernel] = &[$(&$name),*];
    };
}

kernels! {
    UP_TO_8 = c"moe_fp4_preamble_8";
    UP_TO_16 = c"moe_fp4_preamble_16";
    UP_TO_32 = c"moe_fp4_preamble_32";
    ANY = c"moe_fp4_preamble_any";
}

/// Twin of `PreambleParams` in the kernels' file.
#[repr(C)]
#[derive(Clone, Copy)]
struct PreambleParams {
    gate: GateOperands,
    out: OutputParams,
    logits: *mut u8,
    logits_row: i64,
    scale_cols: FastDiv,
    cols: u32,
    units: u32,
    gate_blocks: u32,
    quant_blocks: u32,
    padding_blocks: u32,
    cluster_log2: u32,
    logits_bf16: u32,
}

// SAFETY: repr(C) with the fields of the kernels' PreambleParams in their order; padding is not read.
unsafe impl Params for PreambleParams {}

// Also asserted beside the twin.
const _: () = assert!(size_of::<PreambleParams>() == 136);

pub fn run(plan: &Plan<'_>, index: i32, stream: Stream) -> Result<()> {
    let (gate, logits) = (&plan.gate, plan.logits.tensor());
    let cluster = gate.cluster_blocks();
    let (tokens, cols) = (gate.tokens(), gate.hidden.shape()[1] / BLOCK as i64);
    let out = output_params(&plan.out, cols);
    // At most 32 tokens of 2^20 blocks.
    let units = tokens as u32 * out.scale_cols;
    let quant_blocks = units.div_ceil(BLOCK_THREADS);
    let padding_blocks =
        padding_pieces(plan.out.layout, tokens, cols).div_ceil(u64::from(BLOCK_THREADS)) as u32;
    let params = PreambleParams {
        gate: gate.operands(),
        out,
        logits: logits.data,
        logits_row: logits.stride(0),
        scale_cols: FastDiv::new(out.scale_cols),
        cols: cols as u32,
        units,
        gate_blocks: gate.blocks(),
        quant_blocks,
        padding_blocks,
        cluster_log2: cluster.ilog2(),
        logits_bf16: (logits.dtype == DType::BF16).into(),
    };
    let kernel = match (gate.is_aligned(), tokens) {
        (false, _) => &ANY,
        (true, ..=8) => &UP_TO_8,
        (true, ..=16) => &UP_TO_16,
        (true, _) => &UP_TO_32,
    };
    // Whole clusters.
    let grid = (params.gate_blocks + quant_blocks + padding_blocks).next_multiple_of(cluster);
    let shape = Launch { grid: u64::from(grid), block: BLOCK_THREADS, shared_bytes: 0, cluster };
    launch(PREAMBLE.name, kernel, index, stream, shape, &params)
}
