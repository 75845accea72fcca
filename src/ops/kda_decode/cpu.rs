//! The CPU implementation: one head of one row after the other, split over threads.

use half::{bf16, f16};

use super::{DIM, Gate, L2_EPSILON, Plan, STATE_TAPS, TAPS, row_stride};
use crate::parallel::for_ranges;
use crate::tensor::{DType, Tensor};

const D: usize = DIM as usize;
const D_F32: f32 = 128.0;

/// Element `index` of memory of a dtype, as fp32.
///
/// # Safety
/// The element exists; `dtype` is fp32, bf16 or fp16.
unsafe fn load(base: *const u8, index: i64, dtype: DType) -> f32 {
    // SAFETY: the caller's promise; elements may lie at any address.
    unsafe {
        match dtype {
            DType::F32 => base.cast::<[u8; 4]>().offset(index as isize).read_unaligned().map_f32(),
            DType::BF16 => bf16::from_bits(load_bits(base, index)).to_f32(),
            _ => f16::from_bits(load_bits(base, index)).to_f32(),
        }
    }
}

/// # Safety
/// The element exists and is 16 bits wide.
unsafe fn load_bits(base: *const u8, index: i64) -> u16 {
    // SAFETY: the caller's promise.
    u16::from_ne_bytes(unsafe { base.cast::<[u8; 2]>().offset(index as isize).read() })
}

/// # Safety
/// The element exists, is 16 bits wide and nobody else uses it.
unsafe fn store_bits(base: *mut u8, index: i64, bits: u16) {
    // SAFETY: the caller's promise.
    unsafe { base.cast::<[u8; 2]>().offset(index as isize).write(bits.to_ne_bytes()) };
}

/// Rounds to nearest even.
///
/// # Safety
/// As [`store_bits`], for any of the three dtypes.
unsafe fn store(base: *mut u8, index: i64, dtype: DType, value: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => base.cast::<[u8; 4]>().offset(index as isize).write(value.to_ne_bytes()),
            DType::BF16 => store_bits(base, index, bf16::from_f32(value).to_bits()),
            _ => store_bits(base, index, f16::from_f32(value).to_bits()),
        }
    }
}

trait AsF32 {
    fn map_f32(self) -> f32;
}

impl AsF32 for [u8; 4] {
    fn map_f32(self) -> f32 {
        f32::from_ne_bytes(self)
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

fn dot(a: &[f32; D], b: &[f32; D]) -> f32 {
    // Eight partial sums, as the compiler vectorises it and as the error of a sum of 128 wants it.
    let mut sums = [0.0_f32; 8];
    for (x, y) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for (sum, (x, y)) in sums.iter_mut().zip(x.iter().zip(y)) {
            *sum = x.mul_add(*y, *sum);
        }
    }
    sums.iter().sum()
}

pub fn run(plan: &Plan<'_>) {
    let heads = plan.heads as u64;
    for_ranges(plan.rows as u64 * heads, 2 * DIM as u64 * DIM as u64, |range| {
        for item in range {
            let (row, head) = ((item / heads) as i64, (item % heads) as i64);
            // SAFETY: row and head are within the checked shapes, live rows have slots of their own (the caller's duty), and
            // no other thread has this row and head.
            unsafe { decode(plan, row, head) };
        }
    });
}

#[expect(clippy::many_single_char_names, reason = "q, k, v, h and o are the names of the maths")]
/// # Safety
/// The row's slot, if live, exists in both pools, and nobody else works on this head of it.
unsafe fn decode(plan: &Plan<'_>, row: i64, head: i64) {
    let channel = head * DIM;
    let out_at = row * row_stride(plan.out, 3) + channel;
    // SAFETY: as this function's.
    unsafe {
        let slot = load_index(plan.indices, row);
        if slot <= plan.null_index {
            for v in 0..DIM {
                store_bits(plan.out.data, out_at + v, 0);
            }
            return;
        }
        let mut parts = [[0.0_f32; D]; 3];
        for (which, part) in parts.iter_mut().enumerate() {
            for (d, value) in part.iter_mut().enumerate() {
                *value = convolve(plan, which, row, slot, channel + d as i64);
            }
        }
        let [mut q, mut k, v] = parts;
        let norm_q = (dot(&q, &q) + L2_EPSILON).sqrt().recip() * plan.scale;
        let norm_k = (dot(&k, &k) + L2_EPSILON).sqrt().recip();
        for (x, y) in q.iter_mut().zip(&mut k) {
            *x *= norm_q;
            *y *= norm_k;
        }

        let mut decay = [0.0_f32; D];
        for (d, decay) in decay.iter_mut().enumerate() {
            *decay = log_decay(plan, row, head, d as i64).exp();
        }
        let mut beta = load(plan.beta.data, row * row_stride(plan.beta, 2) + head, plan.beta.dtype);
        if !plan.beta_is_sigmoid {
            beta = sigmoid(beta);
        }

        let mut o = [0.0_f32; D];
        let tile = slot * plan.state.stride(0) + head * DIM * DIM;
        for (v_row, o) in o.iter_mut().enumerate() {
            let at = tile + v_row as i64 * DIM;
            let mut h = [0.0_f32; D];
            for (d, h) in h.iter_mut().enumerate() {
                *h = load(plan.state.data, at + d as i64, plan.state.dtype) * decay[d];
            }
            let delta = (v[v_row] - dot(&h, &k)) * beta;
            for (d, h) in h.iter_mut().enumerate() {
                *h = k[d].mul_add(delta, *h);
                store(plan.state.data, at + d as i64, plan.state.dtype, *h);
            }
            *o = dot(&h, &q);
        }
        if let Some(norm) = &plan.norm {
            let factor = (dot(&o, &o) / D_F32 + norm.eps).sqrt().recip();
            let gate_at = row * row_stride(norm.output_gate, 3) + channel;
            for (d, o) in o.iter_mut().enumerate() {
                let gate = load(norm.output_gate.data, gate_at + d as i64, norm.output_gate.dtype);
                *o *= factor * load(norm.weight.data, d as i64, DType::F32) * sigmoid(gate);
            }
        }
        for (d, o) in o.iter().enumerate() {
            store(plan.out.data, out_at + d as i64, plan.out.dtype, *o);
        }
    }
}

/// # Safety
/// `row` is a row of the indices.
unsafe fn load_index(indices: &Tensor, row: i64) -> i64 {
    // SAFETY: the caller's promise.
    unsafe {
        let at = indices.data.offset((row * indices.byte_stride(0)) as isize);
        if indices.dtype == DType::I64 {
            i64::from_ne_bytes(at.cast::<[u8; 8]>().read())
        } else {
            i64::from(i32::from_ne_bytes(at.cast::<[u8; 4]>().read()))
        }
    }
}

/// One channel of q, k or v behind convolution and SiLU; moves its state on.
///
/// # Safety
/// Row, slot and channel exist.
unsafe fn convolve(plan: &Plan<'_>, which: usize, row: i64, slot: i64, channel: i64) -> f32 {
    let conv = &plan.conv;
    // SAFETY: the caller's promise, on checked tensors.
    unsafe {
        let state = conv.state[which];
        let state_at =
            |tap: i64| slot * conv.state_slot[which] + channel * conv.state_channel + tap * conv.state_tap;
        let x = load_bits(conv.x[which], row * conv.x_row[which] + channel);
        let mut sum = conv.bias.map_or(0.0, |bias| load(bias[which], channel, conv.weight_dtype));
        for tap in 0..TAPS {
            let weight_at = channel * conv.weight_channel + tap * conv.weight_tap;
            let weight = load(conv.weight[which], weight_at, conv.weight_dtype);
            let value = if tap < STATE_TAPS {
                load(state, state_at(tap), conv.x_dtype)
            } else {
                load(x.to_ne_bytes().as_ptr(), 0, conv.x_dtype)
            };
            sum = value.mul_add(weight, sum);
        }
        for tap in 1..STATE_TAPS {
            store_bits(state, state_at(tap - 1), load_bits(state, state_at(tap)));
        }
        store_bits(state, state_at(STATE_TAPS - 1), x);
        sum * sigmoid(sum)
    }
}

/// # Safety
/// Row, head and `d` are within the checked shapes.
unsafe fn log_decay(plan: &Plan<'_>, row: i64, head: i64, d: i64) -> f32 {
    // SAFETY: the caller's promise; a_log and dt_bias are there unless the gate is the log decay (checked).
    unsafe {
        let gate = load(plan.gate.data, row * row_stride(plan.gate, 3) + head * DIM + d, plan.gate.dtype);
        let vector = |tensor: Option<&Tensor>, at: i64| tensor.map_or(0.0, |t| load(t.data, at, DType::F32));
        let rate = vector(plan.a_log, head).exp();
        let raw = gate + vector(plan.dt_bias, head * DIM + d);
        match plan.gate_kind {
            Gate::Log => gate,
            Gate::Bounded(bound) => bound * sigmoid(rate * raw),
            Gate::Unbounded => -rate * softplus(raw),
        }
    }
}
