//! `kda_decode` and `kda_decode_spec`: one or several tokens a row of Kimi Delta Attention, in place on the convolution and
//! recurrent states.
//!
//! This file checks the arguments and makes the [`Plan`] that `cpu.rs` and `cuda.rs` carry out.

mod conv;
mod cpu;
mod cuda;

use pyo3::prelude::*;

use self::conv::{Conv, Parts};
use super::{Op, carry_out, output};
use crate::dlpack::Arguments;
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, Tensor};

pub const DECODE: Op = Op { name: "kda_decode", stem: "kda_decode", kernels: cuda::KERNELS };
pub const SPEC: Op = Op { name: "kda_decode_spec", stem: "kda_decode_spec", kernels: cuda::SPEC_KERNELS };

/// Of K and of V.
const DIM: i64 = 128;
const TAPS: i64 = 4;
/// Most tokens of a row of `kda_decode_spec`.
const MAX_TOKENS: i64 = 8;
/// Columns of the convolution state that a token reads and moves.
const STATE_TAPS: i64 = TAPS - 1;
/// Alignment in bytes of caches and of the distance between their slots.
const CACHE_ALIGNMENT: i64 = 16;
const L2_EPSILON: f32 = 1e-6;
/// `DIM^-0.5`.
const DEFAULT_SCALE: f32 = 0.088_388_346;

/// How `raw_gate` becomes the log of the decay.
#[derive(Clone, Copy)]
enum Gate {
    /// It is the log decay.
    Log,
    /// `lower_bound * sigmoid(exp(a_log) * (gate + dt_bias))`.
    Bounded(f32),
    /// `-exp(a_log) * softplus(gate + dt_bias)`.
    Unbounded,
}

/// Checked arguments.
struct Plan<'a> {
    rows: i64,
    /// Rows of x, gates, beta and out.
    tokens: i64,
    heads: i64,
    /// None: every row is one token.
    spec: Option<Spec<'a>>,
    conv: Conv,
    gate: &'a Tensor,
    gate_kind: Gate,
    beta: &'a Tensor,
    beta_is_sigmoid: bool,
    a_log: Option<&'a Tensor>,
    dt_bias: Option<&'a Tensor>,
    state: &'a Tensor,
    indices: &'a Tensor,
    norm: Option<Norm<'a>>,
    scale: f32,
    null_index: i64,
    out: &'a Tensor,
}

// SAFETY: the pointers are those of tensors that the caller keeps alive for the call.
unsafe impl Sync for Plan<'_> {}

/// Rows of several tokens.
struct Spec<'a> {
    starts: &'a Tensor,
    accepted: &'a Tensor,
    /// Of the indices: most tokens of a row.
    columns: i64,
}

struct Norm<'a> {
    output_gate: &'a Tensor,
    weight: &'a Tensor,
    eps: f32,
}

/// Rows of heads `[rows, heads, dim]`, or with a leading 1: returns the stride of the rows, in elements.
fn check_rows(tensor: &Tensor, shape: &[i64], why: &str) -> Result<i64> {
    tensor.expect_aligned(tensor.dtype.size())?;
    let leading = usize::from(tensor.shape().len() == shape.len() + 1 && tensor.shape()[0] == 1);
    if &tensor.shape()[leading..] != shape {
        return Err(tensor.value_error(format!("shape {shape:?}, or the same behind a 1 ({why})")));
    }
    let mut expected = 1;
    for dim in (1..shape.len()).rev() {
        let stride = tensor.stride(leading + dim);
        if shape[dim] > 1 && stride != expected {
            return Err(tensor.value_error("contiguous rows (dimensions behind the first)"));
        }
        expected *= shape[dim];
    }
    Ok(tensor.stride(leading))
}

fn check_vector(tensor: &Tensor, elements: i64, why: &str, dtypes: &[DType]) -> Result<()> {
    tensor.expect_dtype(dtypes)?;
    if tensor.numel() != elements {
        return Err(tensor.value_error(format!("{elements} elements ({why})")));
    }
    tensor.expect_contiguous()?;
    tensor.expect_aligned(tensor.dtype.size())
}

fn check_cache(tensor: &Tensor) -> Result<()> {
    tensor.expect_writable()?;
    tensor.expect_aligned(CACHE_ALIGNMENT as usize)?;
    if tensor.byte_stride(0) % CACHE_ALIGNMENT != 0 {
        return Err(tensor.value_error(format!("slots a multiple of {CACHE_ALIGNMENT} bytes apart")));
    }
    Ok(())
}

/// Everything but the tensors.
struct Options {
    lower_bound: Option<f64>,
    norm_eps: f64,
    scale: Option<f64>,
    null_index: i64,
    gate_is_log_decay: bool,
    beta_is_sigmoid: bool,
}

impl Options {
    fn gate_kind(&self) -> Gate {
        match self.lower_bound {
            _ if self.gate_is_log_decay => Gate::Log,
            Some(bound) => Gate::Bounded(bound as f32),
            None => Gate::Unbounded,
        }
    }
}

/// `kda_decode`, or with `query_start_loc` and `num_accepted_tokens` in `spec`, `kda_decode_spec`.
#[pyfunction]
#[pyo3(signature = (x, conv_weight, conv_state, raw_gate, raw_beta, a_log, dt_bias, state, state_indices, spec,
    conv_bias, lower_bound, output_gate, norm_weight, norm_eps, scale, null_index, gate_is_log_decay, beta_is_sigmoid,
    out, allocate, /))]
pub fn kda_decode<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    conv_weight: &Bound<'py, PyAny>,
    conv_state: &Bound<'py, PyAny>,
    raw_gate: &Bound<'py, PyAny>,
    raw_beta: &Bound<'py, PyAny>,
    a_log: Option<&Bound<'py, PyAny>>,
    dt_bias: Option<&Bound<'py, PyAny>>,
    state: &Bound<'py, PyAny>,
    state_indices: &Bound<'py, PyAny>,
    spec: Option<[Bound<'py, PyAny>; 2]>,
    conv_bias: Option<&Bound<'py, PyAny>>,
    lower_bound: Option<f64>,
    output_gate: Option<&Bound<'py, PyAny>>,
    norm_weight: Option<&Bound<'py, PyAny>>,
    norm_eps: f64,
    scale: Option<f64>,
    null_index: i64,
    gate_is_log_decay: bool,
    beta_is_sigmoid: bool,
    out: Option<&Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
) -> Result<Bound<'py, PyAny>> {
    let op = if spec.is_some() { SPEC.name } else { DECODE.name };
    let options = Options { lower_bound, norm_eps, scale, null_index, gate_is_log_decay, beta_is_sigmoid };
    let mut arguments = Arguments::new(py);
    let mut pool = Tensor::unset(op, "state");
    arguments.read(state, &mut pool)?;
    let mut indices = Tensor::unset(op, "state_indices");
    arguments.read(state_indices, &mut indices)?;
    let heads = check_state(&pool)?;
    let (rows, columns) = check_indices(&indices, spec.is_some())?;

    let x = Parts::read(&mut arguments, op, "x", x)?;
    let weight = Parts::read(&mut arguments, op, "conv_weight", conv_weight)?;
    let conv_pool = Parts::read(&mut arguments, op, "conv_state", conv_state)?;
    let bias = conv_bias.map(|bias| Parts::read(&mut arguments, op, "conv_bias", bias)).transpose()?;

    let (mut starts, mut accepted) =
        (Tensor::unset(op, "query_start_loc"), Tensor::unset(op, "num_accepted_tokens"));
    let spec = spec.map(|counts| {
        read_counts(&mut arguments, &counts, [&mut starts, &mut accepted], rows).map(|()| Spec {
            starts: &starts,
            accepted: &accepted,
            columns,
        })
    });
    let spec = spec.transpose()?;
    let tokens = if spec.is_some() { x.first().shape().first().copied().unwrap_or(0) } else { rows };
    if rows == 0 && tokens > 0 {
        return Err(x.first().value_error("no tokens, as state_indices has no rows"));
    }
    let conv = Conv::check(&x, &weight, bias.as_ref(), &conv_pool, tokens, heads, STATE_TAPS + columns - 1)?;
    let activation = conv.x_dtype;

    let mut gate = Tensor::unset(op, "raw_gate");
    arguments.read(raw_gate, &mut gate)?;
    gate.expect_dtype(&[activation, DType::F32])?;
    check_rows(&gate, &[tokens, heads, DIM], "tokens, heads and dimension")?;
    let mut beta = Tensor::unset(op, "raw_beta");
    arguments.read(raw_beta, &mut beta)?;
    beta.expect_dtype(&[activation, DType::F32])?;
    check_rows(&beta, &[tokens, heads], "tokens and heads")?;

    let (mut rate, mut offset) = (Tensor::unset(op, "a_log"), Tensor::unset(op, "dt_bias"));
    let rate = read_gate_vector(&mut arguments, a_log, &mut rate, heads, &options)?;
    let offset = read_gate_vector(&mut arguments, dt_bias, &mut offset, heads * DIM, &options)?;

    let (mut final_gate, mut final_weight) =
        (Tensor::unset(op, "output_gate"), Tensor::unset(op, "norm_weight"));
    let norm = read_norm(
        &mut arguments,
        [output_gate, norm_weight],
        [&mut final_gate, &mut final_weight],
        &[tokens, heads, DIM],
        activation,
        &options,
    )?;

    let object = output(out, allocate, pool.device, &[tokens, heads, DIM], activation)?;
    let mut stored = Tensor::unset(op, "out");
    arguments.read(&object, &mut stored)?;
    stored.expect_dtype(&[activation])?;
    check_rows(&stored, &[tokens, heads, DIM], "tokens, heads and dimension")?;
    if tokens > 1 && row_stride(&stored, 3).abs() < heads * DIM {
        return Err(stored.value_error("rows apart from each other"));
    }
    stored.expect_writable()?;

    let inputs = [&indices, &gate, &beta].into_iter().chain(rate).chain(offset);
    let inputs = inputs.chain(norm.iter().flat_map(|norm| [norm.output_gate, norm.weight]));
    let inputs = inputs.chain(spec.iter().flat_map(|spec| [spec.starts, spec.accepted]));
    let inputs = inputs.chain(x.given()).chain(weight.given()).chain(conv_pool.given());
    for tensor in inputs.chain(bias.iter().flat_map(Parts::given)).chain([&pool]) {
        tensor.expect_device(pool.device, "state")?;
        stored.expect_apart_from(tensor)?;
    }
    stored.expect_device(pool.device, "state")?;

    if rows > 0 {
        let plan = Plan {
            rows,
            tokens,
            heads,
            spec,
            conv,
            gate: &gate,
            gate_kind: options.gate_kind(),
            beta: &beta,
            beta_is_sigmoid: options.beta_is_sigmoid,
            a_log: rate,
            dt_bias: offset,
            state: &pool,
            indices: &indices,
            norm,
            scale: options.scale.map_or(DEFAULT_SCALE, |scale| scale as f32),
            null_index: options.null_index,
            out: &stored,
        };
        let cuda = |index, stream| cuda::run(&plan, op, index, stream);
        carry_out(py, &arguments, pool.device, || cpu::run(&plan), cuda)?;
    }
    Ok(object)
}

/// Stride in elements of the rows of `[rows, ...]` or `[1, rows, ...]` with `rank` dimensions from the rows on.
fn row_stride(tensor: &Tensor, rank: usize) -> i64 {
    tensor.stride(tensor.shape().len() - rank)
}

/// Checks the recurrent state. Returns the heads.
fn check_state(state: &Tensor) -> Result<i64> {
    state.expect_dtype(&[DType::F32, DType::BF16, DType::F16])?;
    state.expect_rank(&["slots", "heads", "V", "K"])?;
    let heads = state.shape()[1];
    if heads < 1 || state.shape()[2..] != [DIM, DIM] {
        return Err(state.value_error(format!("shape [slots, heads, {DIM}, {DIM}] with at least one head")));
    }
    if matches!(state.device, Device::Other(_)) {
        return Err(state.value_error("a tensor on a CPU or CUDA device"));
    }
    if state.stride(3) != 1 || state.stride(2) != DIM || (heads > 1 && state.stride(1) != DIM * DIM) {
        return Err(state.value_error("contiguous slots (dimensions behind the first)"));
    }
    check_cache(state)?;
    Ok(heads)
}

/// Returns the rows and the most tokens of one.
fn check_indices(indices: &Tensor, spec: bool) -> Result<(i64, i64)> {
    indices.expect_dtype(&[DType::I32, DType::I64])?;
    indices.expect_aligned(indices.dtype.size())?;
    match *indices.shape() {
        [rows, columns @ 1..=MAX_TOKENS] if spec => Ok((rows, columns)),
        _ if spec => Err(indices.value_error(format!("shape [rows, 1 to {MAX_TOKENS} tokens]"))),
        [rows] | [rows, 1] => Ok((rows, 1)),
        _ => Err(indices.value_error("shape [rows] or [rows, 1]")),
    }
}

/// `query_start_loc` and `num_accepted_tokens`.
fn read_counts<'py>(
    arguments: &mut Arguments<'py>,
    objects: &[Bound<'py, PyAny>; 2],
    counts: [&mut Tensor; 2],
    rows: i64,
) -> Result<()> {
    for ((object, tensor), elements) in objects.iter().zip(counts).zip([rows + 1, rows]) {
        arguments.read(object, tensor)?;
        tensor.expect_dtype(&[DType::I32, DType::I64])?;
        tensor.expect_aligned(tensor.dtype.size())?;
        tensor.expect_shape(&[elements], &format!("for {rows} rows of state_indices"))?;
    }
    Ok(())
}

/// `output_gate` and `norm_weight`: both or neither.
fn read_norm<'a, 'py>(
    arguments: &mut Arguments<'py>,
    objects: [Option<&Bound<'py, PyAny>>; 2],
    [final_gate, final_weight]: [&'a mut Tensor; 2],
    shape: &[i64],
    activation: DType,
    options: &Options,
) -> Result<Option<Norm<'a>>> {
    match (objects[0], objects[1]) {
        (None, None) => Ok(None),
        (Some(gate), Some(weight)) => {
            arguments.read(gate, final_gate)?;
            final_gate.expect_dtype(&[activation])?;
            check_rows(final_gate, shape, "tokens, heads and dimension")?;
            arguments.read(weight, final_weight)?;
            check_vector(final_weight, DIM, "dimension", &[DType::F32])?;
            Ok(Some(Norm { output_gate: final_gate, weight: final_weight, eps: options.norm_eps as f32 }))
        }
        (gate, _) => {
            let (argument, other) =
                if gate.is_some() { ("norm_weight", "output_gate") } else { ("output_gate", "norm_weight") };
            Err(Error::Value {
                op: final_gate.op,
                argument,
                expected: format!("a tensor, as {other} is given"),
                got: "None".into(),
            })
        }
    }
}

/// `a_log` and `dt_bias`: there unless the gate is the log decay already.
fn read_gate_vector<'a, 'py>(
    arguments: &mut Arguments<'py>,
    object: Option<&Bound<'py, PyAny>>,
    out: &'a mut Tensor,
    elements: i64,
    options: &Options,
) -> Result<Option<&'a Tensor>> {
    let Some(object) = object else {
        if options.gate_is_log_decay {
            return Ok(None);
        }
        let expected = "a tensor, unless gate_is_log_decay is set".into();
        return Err(Error::Value { op: out.op, argument: out.name, expected, got: "None".into() });
    };
    arguments.read(object, out)?;
    check_vector(out, elements, "heads, or heads * 128", &[DType::F32])?;
    Ok(Some(out))
}
