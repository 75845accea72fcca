//! The gate of a mixture of experts, `logits = hidden @ weight.T` for a few tokens: the checks of its operands, the CPU
//! implementation, and how the kernels split it. The kernels' part is `kernels/gate_gemm.cuh`.

use std::ops::RangeInclusive;
use std::slice;

use half::bf16;

use crate::error::{Error, Result};
use crate::parallel::for_ranges;
use crate::tensor::{DType, Device, Tensor};

/// Tokens of a call. Above, the gate is a matrix product that cuBLAS does well.
pub const MAX_TOKENS: i64 = 32;
/// Far above any model's; the kernels count steps and bytes of a row in 32 bits.
pub const MAX_HIDDEN: i64 = 1 << 30;

/// Of the kernels: `kGateRows` and `kGateThreads`.
const CLUSTER_EXPERTS: u32 = 16;
pub const BLOCK_THREADS: u32 = 256;

/// Checked operands: bf16 activations `[tokens, hidden]` and the weight `[experts, hidden]`.
#[derive(Clone, Copy)]
pub struct Gate<'a> {
    pub hidden: &'a Tensor,
    pub weight: &'a Tensor,
}

impl<'a> Gate<'a> {
    /// Checks the operands.
    pub fn check(
        hidden: &'a Tensor,
        weight: &'a Tensor,
        hidden_multiple: i64,
        weight_dtypes: &[DType],
        experts: &RangeInclusive<i64>,
    ) -> Result<Self> {
        hidden.expect_dtype(&[DType::BF16])?;
        hidden.expect_rank(&["tokens", "hidden"])?;
        let [tokens, size] = *hidden.shape() else { unreachable!("rank 2") };
        if tokens > MAX_TOKENS {
            return Err(hidden.value_error(format!("at most {MAX_TOKENS} tokens")));
        }
        if !(hidden_multiple..=MAX_HIDDEN).contains(&size) || size % hidden_multiple != 0 {
            let expected =
                format!("a hidden size that is a multiple of {hidden_multiple}, from that to {MAX_HIDDEN}");
            return Err(hidden.value_error(expected));
        }
        hidden.expect_last_stride_1()?;
        hidden.expect_aligned(hidden.dtype.size())?;
        if matches!(hidden.device, Device::Other(_)) {
            return Err(hidden.value_error("a tensor on a CPU or CUDA device"));
        }
        weight.expect_dtype(weight_dtypes)?;
        weight.expect_rank(&["experts", "hidden"])?;
        if weight.shape()[1] != size || !experts.contains(&weight.shape()[0]) {
            let (low, high) = (experts.start(), experts.end());
            return Err(weight.value_error(format!("shape [{low} to {high} experts, {size}]")));
        }
        weight.expect_last_stride_1()?;
        weight.expect_aligned(weight.dtype.size())?;
        Ok(Self { hidden, weight })
    }

    pub fn tokens(&self) -> i64 {
        self.hidden.shape()[0]
    }

    pub fn experts(&self) -> i64 {
        self.weight.shape()[0]
    }

    fn hidden_size(&self) -> i64 {
        self.hidden.shape()[1]
    }

    // ---- On the CPU ----

    /// The logits `[tokens, experts]`, fp32 sums rounded once to `dtype` (bf16 or fp32).
    pub fn logits(&self, dtype: DType) -> Vec<f32> {
        let (tokens, experts) = (self.tokens(), self.experts());
        let mut logits = vec![0.0_f32; (tokens * experts) as usize];
        let out = Shared(logits.as_mut_ptr());
        for_ranges(logits.len() as u64, self.hidden_size() as u64, |range| {
            let out = &out;
            for at in range {
                let (token, expert) = (at as i64 / experts, at as i64 % experts);
                let logit = self.logit(token, expert);
                let logit = if dtype == DType::BF16 { round_to_bf16(logit) } else { logit };
                // SAFETY: each element is written by one thread, and read only after all have ended.
                unsafe { out.0.add(at as usize).write(logit) };
            }
        });
        logits
    }

    fn logit(&self, token: i64, expert: i64) -> f32 {
        // SAFETY: token and expert are within the checked shapes.
        let (x, weight) = unsafe { (row(self.hidden, token), row(self.weight, expert)) };
        let x = x.as_chunks::<2>().0;
        if self.weight.dtype == DType::BF16 {
            let weight = weight.as_chunks::<2>().0;
            dot(x, |i| bf16_at(weight[i]))
        } else {
            let weight = weight.as_chunks::<4>().0;
            dot(x, |i| f32::from_le_bytes(weight[i]))
        }
    }

    // ---- On the GPU ----

    pub fn operands(&self) -> GateOperands {
        GateOperands {
            x: self.hidden.data,
            weight: self.weight.data,
            x_row: self.hidden.byte_stride(0),
            weight_row: self.weight.byte_stride(0),
            tokens: self.tokens() as u32,
            experts: self.experts() as u32,
            k: self.hidden_size() as u32,
        }
    }

    /// Whether both operands can be read 16 bytes at a time.
    pub fn is_aligned(&self) -> bool {
        let aligned = |t: &Tensor| t.data.addr().is_multiple_of(16) && t.byte_stride(0) % 16 == 0;
        aligned(self.hidden) && aligned(self.weight)
    }

    /// Blocks that share the K of a cluster's experts, a power of two: enough of them to fill the GPU about once.
    pub fn cluster_blocks(&self) -> u32 {
        match self.experts() {
            ..=512 => 8,
            _ => 4,
        }
    }

    /// Thread blocks that compute the logits.
    pub fn blocks(&self) -> u32 {
        clusters(self.experts()) as u32 * self.cluster_blocks()
    }
}

/// Clusters that the experts take.
pub fn clusters(experts: i64) -> i64 {
    experts.cast_unsigned().div_ceil(u64::from(CLUSTER_EXPERTS)).cast_signed()
}

/// Twin of `GateOperands` in `kernels/gate_gemm.cuh`. Strides in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GateOperands {
    x: *const u8,
    weight: *const u8,
    x_row: i64,
    weight_row: i64,
    tokens: u32,
    experts: u32,
    k: u32,
}

/// Checked `[tokens, experts]` logits, bf16 or fp32, to be written.
#[derive(Clone, Copy)]
pub struct Logits<'a>(&'a Tensor);

impl<'a> Logits<'a> {
    /// Checks logits that a caller gives for `gate`: rows at any distance at which they do not meet.
    pub fn check(logits: &'a Tensor, dtype: DType, gate: &Gate<'_>) -> Result<Self> {
        logits.expect_dtype(&[dtype])?;
        logits.expect_shape(&[gate.tokens(), gate.experts()], "tokens and experts")?;
        logits.expect_last_stride_1()?;
        logits.expect_writable()?;
        if gate.tokens() > 1 && logits.stride(0).abs() < gate.experts() {
            return Err(logits.value_error("rows apart from each other"));
        }
        Ok(Self(logits))
    }

    /// Their dtype by torch's name; None is `default`.
    pub fn dtype(op: &'static str, name: Option<&str>, default: DType) -> Result<DType> {
        match name {
            None => Ok(default),
            Some("bfloat16") => Ok(DType::BF16),
            Some("float32") => Ok(DType::F32),
            Some(other) => {
                let (expected, got) = ("bfloat16 or float32".into(), other.into());
                Err(Error::Value { op, argument: "logits_dtype", expected, got })
            }
        }
    }

    pub fn tensor(self) -> &'a Tensor {
        self.0
    }

    /// Writes the row of a token, on the CPU.
    pub fn store(self, token: usize, logits: &[f32]) {
        let out = self.0;
        assert!((token as i64) < out.shape()[0] && logits.len() as i64 == out.shape()[1]);
        for (expert, logit) in logits.iter().enumerate() {
            let at = (token as i64 * out.stride(0) + expert as i64) as isize;
            // SAFETY: inside the checked shape; checked dtype and stride; bytes have no alignment.
            unsafe {
                if out.dtype == DType::BF16 {
                    out.data.cast::<[u8; 2]>().offset(at).write(bf16::from_f32(*logit).to_le_bytes());
                } else {
                    out.data.cast::<[u8; 4]>().offset(at).write(logit.to_le_bytes());
                }
            }
        }
    }
}

pub fn round_to_bf16(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

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

struct Shared(*mut f32);

// SAFETY: threads write different elements.
unsafe impl Sync for Shared {}
