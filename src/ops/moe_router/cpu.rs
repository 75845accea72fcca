//! The CPU implementation: the logits, then the selection, a token after the other.

use std::cmp::Reverse;

use super::{Plan, Scoring, Selection};
use crate::gate::round_to_bf16;
use crate::tensor::DType;

pub fn run(plan: &Plan<'_>) {
    let logits = plan.gate.logits(plan.logits_dtype);
    for (token, logits) in logits.chunks_exact(plan.gate.experts() as usize).enumerate() {
        if let Some(out) = plan.logits {
            out.store(token, logits);
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

/// From so many experts in one group on.
const SCORE_KEPT_EXPERTS: usize = 256;

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
            // There vLLM's kernel does not keep the score but subtracts the bias from the sum again.
            Selection::Single if logits.len() < SCORE_KEPT_EXPERTS => score = sum - bias(expert),
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
