//! The CPU implementation: logits split over threads, then the selection, a token after the other.

use std::cmp::Reverse;
use std::slice;

use half::bf16;

use super::{Plan, Scoring, Selection};
use crate::parallel::for_ranges;
use crate::tensor::{DType, Tensor};

/// A row of a matrix as bytes: elements may lie at any address.
///
/// # Safety
/// The row exists.
unsafe fn row(tensor: &Tensor, at: i64) -> &[u8] {
    let bytes = tensor.shape()[1] as usize * tensor.dtype.size();
    // SAFETY: the caller's promise; the last stride is 1.
    unsafe { slice::from_raw_parts(tensor.data.offset((at * tensor.byte_stride(0)) as isize), bytes) }
}

fn bf16_at(bytes: [u8; 2]) -> f32 {
    bf16::from_le_bytes(bytes).to_f32()
}

const LANES: usize = 8;

/// fp32 sum of the products in `LANES` partial sums.
fn dot(x: &[[u8; 2]], weight: impl Fn(usize) -> f32) -> f32 {
    let mut sums = [0.0_f32; LANES];
    for (chunk, values) in x.as_chunks::<LANES>().0.iter().enumerate() {
        for (lane, (sum, value)) in sums.iter_mut().zip(values).enumerate() {
            *sum += bf16_at(*value) * weight(chunk * LANES + lane);
        }
    }
    sums.iter().sum()
}

fn logit(plan: &Plan<'_>, token: i64, expert: i64) -> f32 {
    // SAFETY: token and expert are within the checked shapes.
    let (x, weight) = unsafe { (row(plan.hidden, token), row(plan.weight, expert)) };
    let x = x.as_chunks::<2>().0;
    let sum = if plan.weight.dtype == DType::BF16 {
        let weight = weight.as_chunks::<2>().0;
        dot(x, |i| bf16_at(weight[i]))
    } else {
        let weight = weight.as_chunks::<4>().0;
        dot(x, |i| f32::from_le_bytes(weight[i]))
    };
    if plan.logits_dtype == DType::BF16 { round_to_bf16(sum) } else { sum }
}

fn round_to_bf16(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

pub fn run(plan: &Plan<'_>) {
    let (tokens, experts) = (plan.tokens(), plan.experts());
    let mut logits = vec![0.0_f32; (tokens * experts) as usize];
    let out = Shared(logits.as_mut_ptr());
    for_ranges(logits.len() as u64, plan.hidden_size() as u64, |range| {
        let out = &out;
        for at in range {
            let (token, expert) = (at as i64 / experts, at as i64 % experts);
            // SAFETY: each element is written by one thread, and read only after all have ended.
            unsafe { out.0.add(at as usize).write(logit(plan, token, expert)) };
        }
    });
    for (token, logits) in logits.chunks_exact(experts as usize).enumerate() {
        if let Some(out) = plan.logits {
            for (expert, logit) in logits.iter().enumerate() {
                let at = token as i64 * out.stride(0) + expert as i64;
                // SAFETY: checked shape, dtype and stride.
                unsafe { store_logit(out, at, *logit) };
            }
        }
        let selected = select(plan, logits);
        for (place, (expert, weight)) in selected.into_iter().enumerate() {
            let at = token * plan.choice.top_k as usize + place;
            // SAFETY: checked contiguous outputs of tokens * top_k elements.
            unsafe {
                plan.topk_ids.data.cast::<[u8; 4]>().add(at).write((expert as i32).to_le_bytes());
                plan.topk_weights.data.cast::<[u8; 4]>().add(at).write(weight.to_le_bytes());
            }
        }
    }
}

struct Shared(*mut f32);

// SAFETY: threads write different elements.
unsafe impl Sync for Shared {}

/// # Safety
/// Element `at` of `out` exists.
unsafe fn store_logit(out: &Tensor, at: i64, logit: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        if out.dtype == DType::BF16 {
            out.data.cast::<[u8; 2]>().offset(at as isize).write(bf16::from_f32(logit).to_le_bytes());
        } else {
            out.data.cast::<[u8; 4]>().offset(at as isize).write(logit.to_le_bytes());
        }
    }
}

/// Integers in the order of the floats; NaN on top, whatever its sign, which the CPU's arithmetic leaves open.
fn order_key(value: f32) -> u32 {
    let bits = if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// The score of an expert, and what it is selected by.
#[derive(Clone, Copy)]
struct Scored {
    score: f32,
    sum: f32,
    /// May be selected.
    candidate: bool,
}

fn scores(plan: &Plan<'_>, logits: &[f32]) -> Vec<Scored> {
    let choice = plan.choice;
    let bias = |expert: usize| {
        // SAFETY: checked contiguous bias of one element an expert.
        plan.bias
            .map_or(0.0, |bias| unsafe { f32::from_le_bytes(bias.data.cast::<[u8; 4]>().add(expert).read()) })
    };
    if choice.scoring == Scoring::Softmax {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = logits.iter().map(|logit| (logit - top).exp()).sum::<f32>().recip();
        let scored = logits.iter().enumerate().map(|(expert, logit)| {
            let score = (logit - top).exp() * scale;
            Scored { score, sum: score + bias(expert), candidate: true }
        });
        return scored.collect();
    }
    let rounded = choice.selection == Selection::Many && plan.logits_dtype == DType::BF16;
    let round = |value: f32| if rounded { round_to_bf16(value) } else { value };
    let scored = logits.iter().enumerate().map(|(expert, logit)| {
        let mut score = round(0.5_f32.mul_add((0.5 * logit).tanh(), 0.5));
        let mut sum = round(score + round(bias(expert)));
        let mut candidate = true;
        match choice.selection {
            Selection::Single if !(logit.is_finite() && sum.is_finite()) => {
                (score, sum) = (0.0, f32::NEG_INFINITY);
            }
            Selection::Many => {
                if sum.is_nan() {
                    sum = f32::NEG_INFINITY;
                }
                candidate = logit.is_finite() && sum > f32::NEG_INFINITY;
            }
            Selection::Single | Selection::Few => {}
        }
        Scored { score, sum, candidate }
    });
    scored.collect()
}

/// The groups that are selected from, best first, and whether each of them has something to select.
fn groups(plan: &Plan<'_>, scored: &[Scored]) -> (Vec<usize>, bool) {
    let choice = plan.choice;
    let size = scored.len() / choice.groups as usize;
    let score = |group: &[Scored]| {
        let mut sums: Vec<f32> = group.iter().map(|expert| expert.sum).collect();
        sums.sort_by_key(|sum| Reverse(order_key(*sum)));
        let mut score = sums[0];
        if plan.bias.is_some() {
            score += sums.get(1).copied().unwrap_or(f32::NEG_INFINITY);
        }
        let rounded = choice.selection == Selection::Many && plan.logits_dtype == DType::BF16;
        if rounded { round_to_bf16(score) } else { score }
    };
    let keys: Vec<u32> = scored.chunks_exact(size).map(|group| order_key(score(group))).collect();
    let mut best: Vec<usize> = (0..keys.len()).collect();
    best.sort_by_key(|group| Reverse(keys[*group]));
    best.truncate(choice.top_groups as usize);
    let live = best.iter().all(|group| keys[*group] > order_key(f32::NEG_INFINITY));
    (best, live)
}

/// Experts and weights of one token, best first.
fn select(plan: &Plan<'_>, logits: &[f32]) -> Vec<(usize, f32)> {
    let choice = plan.choice;
    let k = choice.top_k as usize;
    let scored = scores(plan, logits);
    let size = scored.len() / choice.groups as usize;
    let (chosen, live) = groups(plan, &scored);
    let nothing = order_key(f32::NEG_INFINITY);
    let none = match choice.selection {
        Selection::Single => scored.iter().all(|expert| order_key(expert.sum) <= nothing),
        Selection::Few => false,
        Selection::Many => !live,
    };
    if none {
        let shared = choice.selection == Selection::Many || choice.renormalize;
        let share = if shared { 1.0 / f32::from(k as u16) } else { 0.0 };
        return (0..k).map(|expert| (expert, share)).collect();
    }
    let mut experts: Vec<usize> = chosen.iter().flat_map(|group| group * size..(group + 1) * size).collect();
    experts.retain(|expert| scored[*expert].candidate);
    experts.sort_by_key(|expert| (Reverse(order_key(scored[*expert].sum)), *expert));
    // Fewer candidates than places: expert 0 takes the rest.
    experts.resize(k, 0);

    let sum: f32 = experts.iter().map(|expert| scored[*expert].score).sum();
    let weight = |score: f32| {
        if choice.selection == Selection::Few {
            let weight = (f64::from(score) * choice.scaling) as f32;
            if choice.renormalize { (f64::from(weight) / (f64::from(sum) + 1e-20)) as f32 } else { weight }
        } else {
            let scale = choice.scaling as f32;
            score * if choice.renormalize { scale / (1e-20 + sum) } else { scale }
        }
    };
    experts.iter().map(|expert| (*expert, weight(scored[*expert].score))).collect()
}
