//! A tensor argument as plain values, and the one vocabulary of checks on it. No Python and no CUDA here.

use std::fmt;
use std::ptr;

use crate::error::{Error, Result};

/// Most dimensions an argument of any op has; more are refused when the tensor is read.
pub const MAX_DIMS: usize = 5;

/// An element type as DLPack spells it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

const UNKNOWN_DTYPE: &str = "unknown";

impl DType {
    pub const BF16: Self = Self::of(4, 16);
    pub const F16: Self = Self::of(2, 16);
    pub const F32: Self = Self::of(2, 32);
    pub const F8_E4M3: Self = Self::of(10, 8);
    pub const U8: Self = Self::of(1, 8);
    pub const I32: Self = Self::of(0, 32);
    pub const I64: Self = Self::of(0, 64);

    const fn of(code: u8, bits: u8) -> Self {
        Self { code, bits, lanes: 1 }
    }

    /// Bytes of an element, rounded up to whole bytes.
    pub fn size(self) -> usize {
        (usize::from(self.bits) * usize::from(self.lanes)).div_ceil(8)
    }

    /// The name of the torch dtype.
    pub fn torch_name(self) -> &'static str {
        match (self.code, self.bits, self.lanes) {
            (0, 8, 1) => "int8",
            (0, 16, 1) => "int16",
            (0, 32, 1) => "int32",
            (0, 64, 1) => "int64",
            (1, 8, 1) => "uint8",
            (1, 16, 1) => "uint16",
            (1, 32, 1) => "uint32",
            (1, 64, 1) => "uint64",
            (2, 16, 1) => "float16",
            (2, 32, 1) => "float32",
            (2, 64, 1) => "float64",
            (4, 16, 1) => "bfloat16",
            (5, 32, 1) => "complex32",
            (5, 64, 1) => "complex64",
            (5, 128, 1) => "complex128",
            (6, 8, 1) => "bool",
            (10, 8, 1) => "float8_e4m3fn",
            (11, 8, 1) => "float8_e4m3fnuz",
            (12, 8, 1) => "float8_e5m2",
            (13, 8, 1) => "float8_e5m2fnuz",
            (14, 8, 1) => "float8_e8m0fnu",
            (17, 4, 2) => "float4_e2m1fn_x2",
            _ => UNKNOWN_DTYPE,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.torch_name() {
            UNKNOWN_DTYPE => {
                write!(f, "DLPack dtype {{code {}, bits {}, lanes {}}}", self.code, self.bits, self.lanes)
            }
            name => f.write_str(name),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    Cpu,
    Cuda(i32),
    /// A DLPack device type that no op runs on.
    Other(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Other(code) => write!(f, "DLPack device type {code}"),
        }
    }
}

/// A tensor argument: where it is and how it is laid out. The memory belongs to the Python object that it was read from,
/// which the caller of the op keeps alive.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    pub op: &'static str,
    pub name: &'static str,
    pub data: *mut u8,
    pub device: Device,
    pub dtype: DType,
    pub read_only: bool,
    ndim: usize,
    shape: [i64; MAX_DIMS],
    strides: [i64; MAX_DIMS],
}

// SAFETY: the pointer is only dereferenced inside an op, on memory that the caller keeps alive for the call.
unsafe impl Send for Tensor {}
// SAFETY: as above; concurrent readers of a `Tensor` read plain values.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// An argument that is still to be read.
    #[inline]
    pub const fn unset(op: &'static str, name: &'static str) -> Self {
        Self {
            op,
            name,
            data: ptr::null_mut(),
            device: Device::Cpu,
            dtype: DType::U8,
            read_only: false,
            ndim: 0,
            shape: [1; MAX_DIMS],
            strides: [1; MAX_DIMS],
        }
    }

    /// Takes over shape and strides. `strides` in elements; `None` means contiguous. At most [`MAX_DIMS`] dimensions.
    // Loops of constant length: a memcpy of a few numbers costs more than the numbers.
    #[inline]
    pub fn set_layout(&mut self, shape: &[i64], strides: Option<&[i64]>) {
        self.ndim = shape.len();
        for dim in 0..MAX_DIMS {
            if dim < shape.len() {
                self.shape[dim] = shape[dim];
            }
        }
        if let Some(strides) = strides {
            for dim in 0..MAX_DIMS {
                if dim < strides.len() {
                    self.strides[dim] = strides[dim];
                }
            }
        } else {
            let mut stride = 1;
            for dim in (0..self.ndim).rev() {
                self.strides[dim] = stride;
                stride *= self.shape[dim];
            }
        }
    }

    pub fn shape(&self) -> &[i64] {
        &self.shape[..self.ndim]
    }

    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.ndim]
    }

    pub fn numel(&self) -> i64 {
        self.shape().iter().product()
    }

    /// Whether all strides between elements are even, so that it may be a part of complex numbers.
    #[inline]
    pub fn skips_elements(&self) -> bool {
        (0..self.ndim).all(|dim| self.stride(dim) % 2 == 0)
    }

    /// Elements between two neighbours of dimension `dim`, 0 where there are no two.
    pub fn stride(&self, dim: usize) -> i64 {
        if self.shape[dim] > 1 { self.strides[dim] } else { 0 }
    }

    /// The same in bytes.
    pub fn byte_stride(&self, dim: usize) -> i64 {
        self.stride(dim) * self.dtype.size() as i64
    }

    #[cold]
    pub fn value_error(&self, expected: impl Into<String>) -> Error {
        Error::Value { op: self.op, argument: self.name, expected: expected.into(), got: self.to_string() }
    }

    #[cold]
    pub fn type_error(&self, expected: impl Into<String>) -> Error {
        Error::Type { op: self.op, argument: self.name, expected: expected.into(), got: self.to_string() }
    }

    // ---- Checks. Each names op, argument, what was expected and what came. -----------------------------------------

    /// `layout` names the dimensions.
    pub fn expect_rank(&self, layout: &[&str]) -> Result<()> {
        if self.ndim == layout.len() {
            return Ok(());
        }
        Err(self.value_error(format!("{} dimensions [{}]", layout.len(), layout.join(", "))))
    }

    /// `why` says where the numbers come from, such as "tokens and heads of k_nope".
    pub fn expect_shape(&self, shape: &[i64], why: &str) -> Result<()> {
        if self.shape() == shape { Ok(()) } else { Err(self.value_error(format!("shape {shape:?} ({why})"))) }
    }

    pub fn expect_dtype(&self, allowed: &[DType]) -> Result<()> {
        if allowed.contains(&self.dtype) {
            return Ok(());
        }
        let names: Vec<&str> = allowed.iter().map(|d| d.torch_name()).collect();
        Err(self.type_error(format!("dtype {}", names.join(" or "))))
    }

    /// Elements of the last dimension lie side by side.
    pub fn expect_last_stride_1(&self) -> Result<()> {
        let last = self.ndim - 1;
        if self.numel() == 0 || self.shape[last] <= 1 || self.strides[last] == 1 {
            return Ok(());
        }
        Err(self.value_error("stride 1 in the last dimension"))
    }

    pub fn expect_contiguous(&self) -> Result<()> {
        if self.numel() == 0 {
            return Ok(());
        }
        let mut expected = 1;
        for dim in (0..self.ndim).rev() {
            if self.shape[dim] > 1 && self.strides[dim] != expected {
                return Err(self.value_error("a contiguous tensor"));
            }
            expected *= self.shape[dim];
        }
        Ok(())
    }

    pub fn expect_device(&self, device: Device, like: &str) -> Result<()> {
        if self.device == device {
            Ok(())
        } else {
            Err(self.value_error(format!("device {device} (that of {like})")))
        }
    }

    pub fn expect_aligned(&self, bytes: usize) -> Result<()> {
        if self.numel() == 0 || self.data.addr().is_multiple_of(bytes) {
            return Ok(());
        }
        Err(Error::Value {
            op: self.op,
            argument: self.name,
            expected: format!("a base aligned to {bytes} bytes"),
            got: format!("address {:#x} of {self}", self.data.addr()),
        })
    }

    pub fn expect_writable(&self) -> Result<()> {
        if self.read_only { Err(self.value_error("a writable tensor")) } else { Ok(()) }
    }

    /// The memory of `self`, an output, is apart from that of `other`.
    pub fn expect_apart_from(&self, other: &Self) -> Result<()> {
        let (a, b) = (self.extent(), other.extent());
        if a.is_empty() || b.is_empty() || a.end <= b.start || b.end <= a.start {
            return Ok(());
        }
        Err(Error::Value {
            op: self.op,
            argument: self.name,
            expected: format!("memory apart from {}", other.name),
            got: format!(
                "{self} at {:#x}..{:#x}, {} at {:#x}..{:#x}",
                a.start, a.end, other.name, b.start, b.end
            ),
        })
    }

    /// First byte and end of the smallest range that holds every element.
    fn extent(&self) -> std::ops::Range<usize> {
        if self.numel() == 0 {
            return 0..0;
        }
        let (mut low, mut high) = (0_i64, 0_i64);
        for dim in 0..self.ndim {
            let span = (self.shape[dim] - 1) * self.byte_stride(dim);
            low += span.min(0);
            high += span.max(0);
        }
        let base = self.data.addr();
        base.wrapping_add_signed(low as isize)..base.wrapping_add_signed(high as isize) + self.dtype.size()
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shape, strides) = (self.shape(), self.strides());
        write!(f, "shape {shape:?}, strides {strides:?}, {} on {}", self.dtype, self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[i64], strides: &[i64], at: usize) -> Tensor {
        let mut tensor = Tensor::unset("op", "x");
        tensor.data = ptr::without_provenance_mut(at);
        tensor.dtype = DType::BF16;
        tensor.set_layout(shape, Some(strides));
        tensor
    }

    #[test]
    fn missing_strides_mean_contiguous() {
        let mut t = Tensor::unset("op", "x");
        t.set_layout(&[4, 3, 8], None);
        assert_eq!(t.strides(), [24, 8, 1]);
        t.expect_contiguous().unwrap();
    }

    #[test]
    fn dimensions_of_size_one_have_no_stride() {
        let t = tensor(&[1, 3, 1], &[-7, 1, 999], 64);
        t.expect_contiguous().unwrap();
        t.expect_last_stride_1().unwrap();
        assert_eq!(t.byte_stride(0), 0);
        assert_eq!(t.extent(), 64..70);
    }

    #[test]
    fn extent_follows_negative_and_zero_strides() {
        assert_eq!(tensor(&[3, 2], &[-2, 1], 100).extent(), 92..104);
        assert_eq!(tensor(&[5, 2], &[0, 1], 100).extent(), 100..104);
        assert_eq!(tensor(&[0, 2], &[2, 1], 100).extent(), 0..0);
    }

    #[test]
    fn overlap_is_found_and_neighbours_are_not() {
        let a = tensor(&[4], &[1], 100);
        assert!(a.expect_apart_from(&tensor(&[4], &[1], 106)).is_err());
        a.expect_apart_from(&tensor(&[4], &[1], 108)).unwrap();
        a.expect_apart_from(&tensor(&[4], &[1], 92)).unwrap();
    }

    #[test]
    fn messages_name_op_argument_expected_and_got() {
        let message =
            tensor(&[2, 8], &[8, 1], 64).expect_shape(&[2, 16], "tokens of k_nope").unwrap_err().to_string();
        assert_eq!(
            message,
            "op: x: expected shape [2, 16] (tokens of k_nope), got shape [2, 8], strides [8, 1], bfloat16 on cpu"
        );
    }
}
