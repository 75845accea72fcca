//! `moe_router`: the gate of a mixture of experts and the selection of experts, for a few tokens.
//!
//! This file checks the arguments and makes the [`Plan`] that `cpu.rs` and `cuda.rs` carry out.

mod cpu;
mod cuda;

use std::ops::RangeInclusive;

use pyo3::prelude::*;

use super::{Op, carry_out, output};
use crate::dlpack::Arguments;
use crate::error::{Error, Result};
use crate::gate::{Gate, Logits};
use crate::tensor::{DType, Device, Tensor};

pub const ROUTER: Op = Op { name: "moe_router", stem: "moe_router", kernels: cuda::KERNELS };

const EXPERTS: RangeInclusive<i64> = 8..=1024;
const MAX_TOP_K: i64 = 32;
const MAX_GROUPS: i64 = 32;
/// K is a multiple of this.
const HIDDEN_UNIT: i64 = 8;
/// Elements of the workspace, of 8 bytes. The kernels for more tokens use 8 bytes an expert and 8 a cluster of experts.
const WORKSPACE_PER_EXPERT: i64 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scoring {
    Sigmoid,
    Softmax,
}

/// How vLLM 0.33.0's `grouped_topk` computes, which depends on the sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Selection {
    /// Its kernels for one group: scores in fp32, weights by one factor; what is not finite comes last, with weight zero.
    Single,
    /// Its kernel for few experts in groups: scores in fp32, weights divided; NaN above everything.
    Few,
    /// Its kernel for any number: scores and sums rounded to the logits' dtype, what is not finite is never selected.
    Many,
}

/// The expert groups and what is taken of them.
#[derive(Clone, Copy)]
struct Choice {
    top_k: i64,
    groups: i64,
    top_groups: i64,
    scoring: Scoring,
    selection: Selection,
    renormalize: bool,
    scaling: f64,
}

/// Checked arguments.
struct Plan<'a> {
    gate: Gate<'a>,
    bias: Option<&'a Tensor>,
    /// bf16 or fp32.
    logits_dtype: DType,
    logits: Option<Logits<'a>>,
    choice: Choice,
    topk_weights: &'a Tensor,
    topk_ids: &'a Tensor,
    /// On CUDA: 16 bytes an expert for each token.
    workspace: Option<&'a Tensor>,
}

/// The kernel that vLLM takes for these sizes. With softmax it computes the scores beforehand.
fn selection(scoring: Scoring, experts: i64, top_k: i64, groups: i64, top_groups: i64) -> Selection {
    let group = experts / groups;
    let few = experts <= 256 && group <= 32 && group * top_groups <= 128 && top_k <= 8 && top_groups <= 4;
    let single = top_k <= 16 || (top_k <= 22 && experts <= 512);
    match (groups, scoring) {
        (1, Scoring::Softmax) => Selection::Single,
        (1, Scoring::Sigmoid) if single => Selection::Single,
        (2.., Scoring::Softmax) => Selection::Few,
        (2.., Scoring::Sigmoid) if few => Selection::Few,
        _ => Selection::Many,
    }
}

fn option_error(argument: &'static str, expected: impl Into<String>, got: impl std::fmt::Display) -> Error {
    Error::Value { op: ROUTER.name, argument, expected: expected.into(), got: got.to_string() }
}

struct Options<'a> {
    top_k: i64,
    n_group: i64,
    topk_group: i64,
    scoring: &'a str,
    renormalize: bool,
    routed_scaling_factor: f64,
}

impl Options<'_> {
    fn check(&self, experts: i64) -> Result<Choice> {
        let scoring = match self.scoring {
            "sigmoid" => Scoring::Sigmoid,
            "softmax" => Scoring::Softmax,
            other => return Err(option_error("scoring", "'sigmoid' or 'softmax'", format!("{other:?}"))),
        };
        if !(1..=MAX_GROUPS).contains(&self.n_group) || experts % self.n_group != 0 {
            let expected = format!("from 1 to {MAX_GROUPS} and a divisor of the {experts} experts");
            return Err(option_error("n_group", expected, self.n_group));
        }
        if !(1..=self.n_group).contains(&self.topk_group) {
            return Err(option_error(
                "topk_group",
                format!("from 1 to n_group ({})", self.n_group),
                self.topk_group,
            ));
        }
        let most = MAX_TOP_K.min(experts / self.n_group * self.topk_group);
        if !(1..=most).contains(&self.top_k) {
            let expected =
                format!("from 1 to {most} (at most {MAX_TOP_K} and the experts of topk_group groups)");
            return Err(option_error("top_k", expected, self.top_k));
        }
        if !self.routed_scaling_factor.is_finite() {
            return Err(option_error("routed_scaling_factor", "a finite number", self.routed_scaling_factor));
        }
        Ok(Choice {
            top_k: self.top_k,
            groups: self.n_group,
            top_groups: self.topk_group,
            scoring,
            selection: selection(scoring, experts, self.top_k, self.n_group, self.topk_group),
            renormalize: self.renormalize,
            scaling: self.routed_scaling_factor,
        })
    }
}

#[pyfunction]
#[pyo3(signature = (hidden_states, gate_weight, top_k, bias, n_group, topk_group, scoring, renormalize,
    routed_scaling_factor, logits_dtype, out_logits, topk_weights, topk_ids, workspace, allocate, /))]
pub fn moe_router<'py>(
    py: Python<'py>,
    hidden_states: &Bound<'py, PyAny>,
    gate_weight: &Bound<'py, PyAny>,
    top_k: i64,
    bias: Option<&Bound<'py, PyAny>>,
    n_group: i64,
    topk_group: i64,
    scoring: &str,
    renormalize: bool,
    routed_scaling_factor: f64,
    logits_dtype: Option<&str>,
    out_logits: Option<&Bound<'py, PyAny>>,
    topk_weights: Option<&Bound<'py, PyAny>>,
    topk_ids: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
) -> Result<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let op = ROUTER.name;
    let mut arguments = Arguments::new(py);
    let (mut hidden, mut weight) = (Tensor::unset(op, "hidden_states"), Tensor::unset(op, "gate_weight"));
    arguments.read(hidden_states, &mut hidden)?;
    arguments.read(gate_weight, &mut weight)?;
    let gate = Gate::check(&hidden, &weight, HIDDEN_UNIT, &[DType::BF16, DType::F32], &EXPERTS)?;
    let (tokens, experts) = (gate.tokens(), gate.experts());
    let options = Options { top_k, n_group, topk_group, scoring, renormalize, routed_scaling_factor };
    let choice = options.check(experts)?;
    let logits_dtype = Logits::dtype(op, logits_dtype, weight.dtype)?;

    let mut correction = Tensor::unset(op, "bias");
    if let Some(bias) = bias {
        arguments.read(bias, &mut correction)?;
        correction.expect_dtype(&[DType::F32])?;
        correction.expect_shape(&[experts], "experts")?;
        correction.expect_contiguous()?;
        correction.expect_aligned(correction.dtype.size())?;
    }
    let mut logits = Tensor::unset(op, "out_logits");
    if let Some(out) = out_logits {
        arguments.read(out, &mut logits)?;
    }
    let logits = out_logits.map(|_| Logits::check(&logits, logits_dtype, &gate)).transpose()?;

    let weights_object = output(topk_weights, allocate, hidden.device, &[tokens, top_k], DType::F32)?;
    let ids_object = output(topk_ids, allocate, hidden.device, &[tokens, top_k], DType::I32)?;
    let (mut weights_out, mut ids_out) = (Tensor::unset(op, "topk_weights"), Tensor::unset(op, "topk_ids"));
    arguments.read(&weights_object, &mut weights_out)?;
    arguments.read(&ids_object, &mut ids_out)?;
    for (out, dtype) in [(&weights_out, DType::F32), (&ids_out, DType::I32)] {
        out.expect_dtype(&[dtype])?;
        out.expect_shape(&[tokens, top_k], "tokens and top_k")?;
        out.expect_contiguous()?;
    }
    let mut scratch = Tensor::unset(op, "workspace");
    let on_gpu = matches!(hidden.device, Device::Cuda(_));
    if workspace.is_some() || (on_gpu && tokens > 0) {
        let elements = tokens * WORKSPACE_PER_EXPERT * experts;
        let object = output(workspace, allocate, hidden.device, &[elements], DType::I64)?;
        arguments.read(&object, &mut scratch)?;
        scratch.expect_dtype(&[DType::I64])?;
        scratch.expect_contiguous()?;
        if scratch.numel() < elements {
            return Err(scratch.value_error(format!("at least {elements} elements")));
        }
    }

    let correction = bias.map(|_| &correction);
    let scratch = (workspace.is_some() || (on_gpu && tokens > 0)).then_some(&scratch);
    let outputs: Vec<&Tensor> =
        [&weights_out, &ids_out].into_iter().chain(logits.map(Logits::tensor)).chain(scratch).collect();
    let inputs: Vec<&Tensor> = [&hidden, &weight].into_iter().chain(correction).collect();
    for (i, out) in outputs.iter().enumerate() {
        out.expect_device(hidden.device, "hidden_states")?;
        out.expect_aligned(out.dtype.size())?;
        out.expect_writable()?;
        for other in inputs.iter().chain(&outputs[..i]) {
            out.expect_apart_from(other)?;
        }
    }
    for input in &inputs {
        input.expect_device(hidden.device, "hidden_states")?;
    }

    if tokens > 0 {
        let plan = Plan {
            gate,
            bias: correction,
            logits_dtype,
            logits,
            choice,
            topk_weights: &weights_out,
            topk_ids: &ids_out,
            workspace: scratch,
        };
        let cuda = |index, stream| cuda::run(&plan, index, stream);
        carry_out(py, &arguments, hidden.device, || cpu::run(&plan), cuda)?;
    }
    Ok((weights_object, ids_object))
}

#[cfg(test)]
mod tests {
    use super::{Scoring, Selection, selection};

    #[test]
    fn the_models_take_the_kernel_that_vllm_takes() {
        let of = |experts, top_k, groups, top_groups| {
            selection(Scoring::Sigmoid, experts, top_k, groups, top_groups)
        };
        assert_eq!(of(384, 8, 1, 1), Selection::Single);
        assert_eq!(of(256, 8, 8, 4), Selection::Few);
        assert_eq!(of(512, 22, 1, 1), Selection::Single);
        assert_eq!(of(896, 16, 1, 1), Selection::Single);
        assert_eq!(of(896, 22, 1, 1), Selection::Many);
        assert_eq!(of(384, 32, 1, 1), Selection::Many);
        assert_eq!(of(256, 8, 8, 5), Selection::Many);
        assert_eq!(of(256, 8, 4, 2), Selection::Many);
    }
}
