//! `bench_stream`: reads one buffer and writes another and does nothing else, the floor of the device time in the benchmarks.
//! `bench_launch`: its launch alone, the floor of the host time.

use std::ffi::c_void;
use std::time::Instant;

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

/// A checked call, ready to launch.
struct Call {
    params: StreamParams,
    device: i32,
    grid: u64,
    stream: *mut c_void,
}

impl Call {
    fn new<'py>(py: Python<'py>, src: &Bound<'py, PyAny>, dst: &Bound<'py, PyAny>) -> Result<Self> {
        let mut arguments = Arguments::new(py);
        let (mut from, mut to) = (Tensor::unset(STREAM.name, "src"), Tensor::unset(STREAM.name, "dst"));
        arguments.read(src, &mut from)?;
        arguments.read(dst, &mut to)?;
        let (read_units, write_units) = (check(&from)?, check(&to)?);
        let Device::Cuda(device) = from.device else { return Err(from.value_error("a CUDA tensor")) };
        to.expect_device(from.device, "src")?;
        to.expect_writable()?;
        to.expect_apart_from(&from)?;
        Ok(Self {
            params: StreamParams { src: from.data, dst: to.data, read_units, write_units },
            device,
            grid: read_units.max(write_units).div_ceil(u64::from(THREADS)).max(1),
            stream: arguments.current_stream(device)?,
        })
    }

    fn launch(&self) -> Result<()> {
        launch(STREAM.name, &KERNEL, self.device, self.stream, Launch::of(self.grid, THREADS), &self.params)
    }
}

#[pyfunction]
#[pyo3(signature = (src, dst, /))]
pub fn bench_stream<'py>(py: Python<'py>, src: &Bound<'py, PyAny>, dst: &Bound<'py, PyAny>) -> Result<()> {
    Call::new(py, src, dst)?.launch()
}

/// Nanoseconds that one of `launches` launches takes on the host, without Python: what no op's call can go below.
#[pyfunction]
#[pyo3(signature = (src, dst, launches, /))]
pub fn bench_launch<'py>(
    py: Python<'py>,
    src: &Bound<'py, PyAny>,
    dst: &Bound<'py, PyAny>,
    launches: u32,
) -> Result<f64> {
    let call = Call::new(py, src, dst)?;
    let start = Instant::now();
    for _ in 0..launches {
        call.launch()?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(launches.max(1)))
}
