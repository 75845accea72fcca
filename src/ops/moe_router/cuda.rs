//! The CUDA implementation: which kernel, its parameters and its counter. The kernels are in `kernels/moe_router.cu`.

use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Plan, ROUTER, Scoring, Selection};
use crate::cuda::launch::{Launch, Params, Stream, launch};
use crate::cuda::module::Kernel;
use crate::error::Result;
use crate::gate::{BLOCK_THREADS, GateOperands, Logits};
use crate::tensor::DType;

/// Of the kernels: `kTickets`.
const TICKETS: u32 = 1 << 18;
/// Tickets of calls that are not captured. More of them than launches wait in all queues of a device.
const EAGER_TICKETS: u32 = 1 << 16;

/// What the kernels for few tokens take. Their clusters have as many blocks as they take tokens: `Gate::cluster_blocks`.
const FEW_TOKENS: i64 = 8;
const FEW_EXPERTS: i64 = 384;
const FEW_TOP_K: i64 = 16;
/// They have a warp that selects beside those of the gate.
const SELECTING_THREADS: u32 = 32;

macro_rules! kernels {
    ($($name:ident = $symbol:literal;)*) => {
        $(static $name: Kernel = Kernel::new("moe_router", $symbol);)*
        pub const KERNELS: &[&Kernel] = &[$(&$name),*];
    };
}

kernels! {
    BF16_8 = c"moe_router_bf16_8";
    BF16_16 = c"moe_router_bf16_16";
    BF16_32 = c"moe_router_bf16_32";
    BF16_ANY = c"moe_router_bf16_any";
    BF16_FEW = c"moe_router_bf16_few";
    FP32_FEW = c"moe_router_fp32_few";
    FP32_8 = c"moe_router_fp32_8";
    FP32_32 = c"moe_router_fp32_32";
    FP32_ANY = c"moe_router_fp32_any";
}

/// Twin of `RouterParams` in the kernels' file.
#[repr(C)]
#[derive(Clone, Copy)]
struct RouterParams {
    gate: GateOperands,
    bias: *const u8,
    logits: *mut u8,
    scratch: *mut u8,
    weights: *mut u8,
    ids: *mut u8,
    logits_row: i64,
    scaling: f64,
    cluster_log2: u32,
    ticket: u32,
    top_k: u32,
    groups: u32,
    group_experts: u32,
    top_groups: u32,
    scoring: u32,
    selection: u32,
    renormalize: u32,
    logits_bf16: u32,
}

// SAFETY: repr(C) with the fields of the kernels' RouterParams in their order; padding is not read.
unsafe impl Params for RouterParams {}

// Also asserted beside the twin.
const _: () = assert!(size_of::<RouterParams>() == 144);

/// The counter of a launch. One that is captured keeps its counter for the life of its graph, so captured calls have
/// their own, which come round after 196,608 of them; two launches that run at once would have to be that far apart
/// to meet.
fn ticket(captured: bool) -> u32 {
    static EAGER: AtomicU32 = AtomicU32::new(0);
    static CAPTURED: AtomicU32 = AtomicU32::new(0);
    if captured {
        EAGER_TICKETS + CAPTURED.fetch_add(1, Ordering::Relaxed) % (TICKETS - EAGER_TICKETS)
    } else {
        EAGER.fetch_add(1, Ordering::Relaxed) % EAGER_TICKETS
    }
}

/// Whether the kernels for few tokens serve a call: what the models ask for.
fn is_few(plan: &Plan<'_>) -> bool {
    let (gate, choice) = (&plan.gate, plan.choice);
    let group = gate.experts() / choice.groups;
    let selection = match choice.selection {
        Selection::Single => true,
        // A lane has eight experts of one group.
        Selection::Few => group >= 16 && group.cast_unsigned().is_power_of_two(),
        Selection::Many => false,
    };
    // Entries are stored and loaded in one piece.
    let aligned = plan.workspace.is_some_and(|workspace| workspace.data.addr().is_multiple_of(16));
    selection
        && choice.scoring == Scoring::Sigmoid
        && choice.top_k <= FEW_TOP_K
        && gate.tokens() <= FEW_TOKENS
        && gate.experts() <= FEW_EXPERTS
        && gate.is_aligned()
        && aligned
}

pub fn run(plan: &Plan<'_>, index: i32, stream: Stream) -> Result<()> {
    let gate = &plan.gate;
    let pointer = |tensor: Option<&crate::tensor::Tensor>| tensor.map_or(ptr::null_mut(), |t| t.data);
    let choice = plan.choice;
    let params = RouterParams {
        gate: gate.operands(),
        bias: pointer(plan.bias),
        logits: pointer(plan.logits.map(Logits::tensor)),
        scratch: pointer(plan.workspace),
        weights: plan.topk_weights.data,
        ids: plan.topk_ids.data,
        logits_row: plan.logits.map_or(0, |logits| logits.tensor().stride(0)),
        scaling: choice.scaling,
        cluster_log2: gate.cluster_blocks().ilog2(),
        ticket: ticket(stream.is_capturing()),
        top_k: choice.top_k as u32,
        groups: choice.groups as u32,
        group_experts: (gate.experts() / choice.groups) as u32,
        top_groups: choice.top_groups as u32,
        scoring: (choice.scoring == Scoring::Softmax).into(),
        selection: match choice.selection {
            Selection::Single => 0,
            Selection::Few => 1,
            Selection::Many => 2,
        },
        renormalize: choice.renormalize.into(),
        logits_bf16: (plan.logits_dtype == DType::BF16).into(),
    };
    let few = is_few(plan);
    let kernel = match (gate.weight.dtype == DType::BF16, gate.is_aligned(), gate.tokens()) {
        (true, ..) if few => &BF16_FEW,
        (false, ..) if few => &FP32_FEW,
        (true, false, _) => &BF16_ANY,
        (true, true, ..=8) => &BF16_8,
        (true, true, ..=16) => &BF16_16,
        (true, true, _) => &BF16_32,
        (false, false, _) => &FP32_ANY,
        (false, true, ..=8) => &FP32_8,
        (false, true, _) => &FP32_32,
    };
    let shape = Launch {
        grid: u64::from(gate.blocks()),
        block: if few { BLOCK_THREADS + SELECTING_THREADS } else { BLOCK_THREADS },
        shared_bytes: 0,
        cluster: gate.cluster_blocks(),
    };
    launch(ROUTER.name, kernel, index, stream, shape, &params)
}

#[cfg(test)]
mod tests {
    use super::{EAGER_TICKETS, TICKETS, ticket};

    #[test]
    fn captured_and_eager_calls_share_no_ticket() {
        for _ in 0..2 * TICKETS {
            assert!(ticket(false) < EAGER_TICKETS);
            assert!((EAGER_TICKETS..TICKETS).contains(&ticket(true)));
        }
    }
}
