//! The CPU implementation: one head of one row after the other, split over threads.

use std::ops::Range;

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
    if let Some(spec) = &plan.spec {
        // SAFETY: starts has one element more than there are rows, and the tokens are within the shape of out.
        unsafe {
            let first = load_index(spec.starts, 0).clamp(0, plan.tokens);
            let last = load_index(spec.starts, plan.rows).clamp(0, plan.tokens);
            for token in (0..first).chain(last..plan.tokens) {
                (0..plan.heads).for_each(|head| zero_output(plan, token, head));
            }
        }
    }
    for_ranges(plan.rows as u64 * heads, 2 * DIM as u64 * DIM as u64, |range| {
        for item in range {
            let (row, head) = ((item / heads) as i64, (item % heads) as i64);
            // SAFETY: row and head are within the checked shapes, live rows have slots of their own (the caller's duty), and
            // no other thread has this row and head.
            unsafe { decode(plan, row, head) };
        }
    });
}

/// Where the tokens of a live row are and where its states.
struct Row {
    tokens: Range<i64>,
    /// Column of the convolution state where the row's window starts.
    window: i64,
    /// Slot of the convolution state.
    slot: i64,
    /// Slot of the state before the first token.
    first_slot: i64,
}

impl Row {
    /// The row, or the tokens whose outputs are zero as it is padding.
    ///
    /// # Safety
    /// `row` is a row of the indices.
    unsafe fn of(plan: &Plan<'_>, row: i64) -> Result<Self, Range<i64>> {
        let live = |slot: i64| slot > plan.null_index;
        // SAFETY: the caller's promise; columns are within the checked shape.
        unsafe {
            let slot = load_slot(plan, row, 0);
            let Some(spec) = &plan.spec else {
                let tokens = row..row + 1;
                return if live(slot) {
                    Ok(Self { tokens, window: 0, slot, first_slot: slot })
                } else {
                    Err(tokens)
                };
            };
            let (begin, end) = (load_index(spec.starts, row), load_index(spec.starts, row + 1));
            let accepted = load_index(spec.accepted, row);
            let padding = begin.max(0)..end.min(plan.tokens);
            // Numbers that no row may have make it padding, so that nothing is touched outside the tensors.
            let countable = begin >= 0 && begin < end && end <= plan.tokens && end - begin <= spec.columns;
            if !countable || !(1..=spec.columns).contains(&accepted) {
                return Err(padding);
            }
            let first_slot = load_slot(plan, row, accepted - 1);
            if !live(slot) || !live(first_slot) {
                return Err(padding);
            }
            Ok(Self { tokens: begin..end, window: accepted - 1, slot, first_slot })
        }
    }
}

/// # Safety
/// Token and head are within the shape of out.
unsafe fn zero_output(plan: &Plan<'_>, token: i64, head: i64) {
    let at = token * row_stride(plan.out, 3) + head * DIM;
    // SAFETY: the caller's promise.
    (0..DIM).for_each(|v| unsafe { store_bits(plan.out.data, at + v, 0) });
}

/// What the state meets at a token.
struct Token {
    q: [f32; D],
    k: [f32; D],
    v: [f32; D],
    decay: [f32; D],
    beta: f32,
    /// Slot of the state behind it.
    slot: i64,
    o: [f32; D],
}

/// # Safety
/// The row's slots, if live, exist in both pools, and nobody else works on this head of them.
unsafe fn decode(plan: &Plan<'_>, row: i64, head: i64) {
    let channel = head * DIM;
    // SAFETY: as this function's.
    unsafe {
        let row_of_tokens = match Row::of(plan, row) {
            Ok(live) => live,
            Err(tokens) => return tokens.for_each(|token| zero_output(plan, token, head)),
        };
        let mut tokens: Vec<Token> = row_of_tokens
            .tokens
            .clone()
            .enumerate()
            .map(|(i, token)| prepare(plan, token, head, load_slot(plan, row, i as i64)))
            .collect();
        for d in 0..D {
            let of_head = channel + d as i64;
            convolve(plan, 0, &row_of_tokens, of_head, tokens.iter_mut().map(|token| &mut token.q[d]));
            convolve(plan, 1, &row_of_tokens, of_head, tokens.iter_mut().map(|token| &mut token.k[d]));
            convolve(plan, 2, &row_of_tokens, of_head, tokens.iter_mut().map(|token| &mut token.v[d]));
        }
        for token in &mut tokens {
            let norm_q = (dot(&token.q, &token.q) + L2_EPSILON).sqrt().recip() * plan.scale;
            let norm_k = (dot(&token.k, &token.k) + L2_EPSILON).sqrt().recip();
            for (x, y) in token.q.iter_mut().zip(&mut token.k) {
                *x *= norm_q;
                *y *= norm_k;
            }
        }

        let tile = |slot: i64| slot * plan.state.stride(0) + head * DIM * DIM;
        for v_row in 0..D {
            let row_at = v_row as i64 * DIM;
            let mut h = [0.0_f32; D];
            for (d, h) in h.iter_mut().enumerate() {
                let at = tile(row_of_tokens.first_slot) + row_at + d as i64;
                *h = load(plan.state.data, at, plan.state.dtype);
            }
            for token in &mut tokens {
                for (h, decay) in h.iter_mut().zip(&token.decay) {
                    *h *= decay;
                }
                let delta = (token.v[v_row] - dot(&h, &token.k)) * token.beta;
                for (h, k) in h.iter_mut().zip(&token.k) {
                    *h = k.mul_add(delta, *h);
                }
                token.o[v_row] = dot(&h, &token.q);
                if token.slot > plan.null_index {
                    for (d, h) in h.iter().enumerate() {
                        store(plan.state.data, tile(token.slot) + row_at + d as i64, plan.state.dtype, *h);
                    }
                }
            }
        }

        for (at, Token { o, .. }) in row_of_tokens.tokens.zip(&mut tokens) {
            if let Some(norm) = &plan.norm {
                let factor = (dot(o, o) / D_F32 + norm.eps).sqrt().recip();
                let gate_at = at * row_stride(norm.output_gate, 3) + channel;
                for (d, o) in o.iter_mut().enumerate() {
                    let gate = load(norm.output_gate.data, gate_at + d as i64, norm.output_gate.dtype);
                    *o *= factor * load(norm.weight.data, d as i64, DType::F32) * sigmoid(gate);
                }
            }
            let out_at = at * row_stride(plan.out, 3) + channel;
            for (d, o) in o.iter().enumerate() {
                store(plan.out.data, out_at + d as i64, plan.out.dtype, *o);
            }
        }
    }
}

/// Decay and beta of a token; the rest is still to come.
///
/// # Safety
/// Token and head are within the checked shapes.
unsafe fn prepare(plan: &Plan<'_>, token: i64, head: i64, slot: i64) -> Token {
    // SAFETY: the caller's promise.
    unsafe {
        let mut decay = [0.0_f32; D];
        for (d, decay) in decay.iter_mut().enumerate() {
            *decay = log_decay(plan, token, head, d as i64).exp();
        }
        let mut beta = load(plan.beta.data, token * row_stride(plan.beta, 2) + head, plan.beta.dtype);
        if !plan.beta_is_sigmoid {
            beta = sigmoid(beta);
        }
        Token { q: [0.0; D], k: [0.0; D], v: [0.0; D], decay, beta, slot, o: [0.0; D] }
    }
}

/// # Safety
/// Row and token are within the shape of the indices.
unsafe fn load_slot(plan: &Plan<'_>, row: i64, token: i64) -> i64 {
    let column = if plan.spec.is_some() { token * plan.indices.byte_stride(1) } else { 0 };
    // SAFETY: the caller's promise.
    unsafe { load_index_at(plan.indices, row * plan.indices.byte_stride(0) + column) }
}

/// # Safety
/// The tensor has this element in its first dimension.
unsafe fn load_index(tensor: &Tensor, at: i64) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { load_index_at(tensor, at * tensor.byte_stride(0)) }
}

/// # Safety
/// An element of the tensor lies there.
unsafe fn load_index_at(tensor: &Tensor, bytes: i64) -> i64 {
    // SAFETY: the caller's promise.
    unsafe {
        let at = tensor.data.offset(bytes as isize);
        if tensor.dtype == DType::I64 {
            i64::from_ne_bytes(at.cast::<[u8; 8]>().read())
        } else {
            i64::from(i32::from_ne_bytes(at.cast::<[u8; 4]>().read()))
        }
    }
}

/// One channel of q, k or v of the row's tokens, behind convolution and SiLU; moves its state on: the two values before the
/// first token, then the tokens.
///
/// # Safety
/// Row, slot and channel exist.
unsafe fn convolve<'a>(
    plan: &Plan<'_>,
    which: usize,
    row: &Row,
    channel: i64,
    results: impl Iterator<Item = &'a mut f32>,
) {
    let conv = &plan.conv;
    // SAFETY: the caller's promise, on checked tensors.
    unsafe {
        let state = conv.state[which];
        let state_at = |tap: i64| {
            row.slot * conv.state_slot[which] + channel * conv.state_channel + tap * conv.state_tap
        };
        let mut bits = [0_u16; TAPS as usize];
        for (tap, bits) in bits.iter_mut().enumerate().skip(1) {
            *bits = load_bits(state, state_at(row.window + tap as i64 - 1));
        }
        for tap in 1..STATE_TAPS {
            store_bits(state, state_at(tap - 1), bits[tap as usize + 1]);
        }
        let offset = conv.bias.map_or(0.0, |bias| load(bias[which], channel, conv.weight_dtype));
        let weights: [f32; TAPS as usize] = std::array::from_fn(|tap| {
            let at = channel * conv.weight_channel + tap as i64 * conv.weight_tap;
            load(conv.weight[which], at, conv.weight_dtype)
        });
        for ((column, token), result) in (STATE_TAPS - 1..).zip(row.tokens.clone()).zip(results) {
            bits.rotate_left(1);
            bits[TAPS as usize - 1] = load_bits(conv.x[which], token * conv.x_row[which] + channel);
            store_bits(state, state_at(column), bits[TAPS as usize - 1]);
            let mut sum = offset;
            for (bits, weight) in bits.iter().zip(&weights) {
                sum = load(bits.to_ne_bytes().as_ptr(), 0, conv.x_dtype).mul_add(*weight, sum);
            }
            *result = sum * sigmoid(sum);
        }
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
