//! `bench_stream`: reads one buffer and writes another and does nothing else, the floor that benchmarks compare with.

use pyo3::prelude::*;

use super::Op;
use crate::cuda::launch::{Launch, Params, launch};
use crate::cuda::module::Kernel;
use crate::dlpack::Arguments;
use crate::error::Result;
use crate::tensor::{DType, Device, Tensor};

static KERNEL: Kernel = Kernel::new("bench_stream", c"bench_stream");
pub const STREAM: Op = Op { name: "bench_stream", stem: "bench_stream", kernels: &[&KERNEL] };

/// Bytes of an access, one a thread on either side.
const ACCESS: u64 = 16;
/// `kStreamThreads` of the kernel.
const THREADS: u32 = 256;

/// Twin of `StreamParams` in `kernels/bench_stream.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct StreamParams {
    src: *const u8,
    dst: *mut u8,
    read_units: u64,
    write_units: u64,
}

// SAFETY: repr(C) with the fields of the kernel's StreamParams in their order.
unsafe impl Params for StreamParams {}

fn check(tensor: &Tensor) -> Result<u64> {
    tensor.expect_dtype(&[DType::U8])?;
    tensor.expect_contiguous()?;
    tensor.expect_aligned(ACCESS as usize)?;
    let bytes = tensor.numel() as u64;
    if bytes.is_multiple_of(ACCESS) {
        Ok(bytes / ACCESS)
    } else {
        Err(tensor.value_error("a multiple of 16 bytes"))
    }
}

#[pyfunction]
#[pyo3(signature = (src, dst, /))]
pub fn bench_stream<'py>(py: Python<'py>, src: &Bound<'py, PyAny>, dst: &Bound<'py, PyAny>) -> Result<()> {
    let mut arguments = Arguments::new(py);
    let (mut from, mut to) = (Tensor::unset(STREAM.name, "src"), Tensor::unset(STREAM.name, "dst"));
    arguments.read(src, &mut from)?;
    arguments.read(dst, &mut to)?;
    let (read_units, write_units) = (check(&from)?, check(&to)?);
    let Device::Cuda(index) = from.device else { return Err(from.value_error("a CUDA tensor")) };
    to.expect_device(from.device, "src")?;
    to.expect_apart_from(&from)?;
    let params = StreamParams { src: from.data, dst: to.data, read_units, write_units };
    let grid = read_units.max(write_units).div_ceil(u64::from(THREADS)).max(1);
    launch(STREAM.name, &KERNEL, index, arguments.current_stream(index)?, Launch::of(grid, THREADS), &params)
}
