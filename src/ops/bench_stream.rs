//! `bench_stream`: reads one buffer and writes another and does nothing else, the floor of the device time in the benchmarks.
//! `bench_launch`: its launch alone, the floor of the host time. `bench_rmw`: reads and rewrites a state in place.
//! `bench_read`: reads one buffer and writes nothing.

use std::time::Instant;

use pyo3::prelude::*;

use super::Op;
use crate::cuda::launch::{Launch, Params, Stream, launch};
use crate::cuda::module::Kernel;
use crate::dlpack::Arguments;
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, Tensor};

static KERNEL: Kernel = Kernel::new("bench_stream", c"bench_stream");
pub const STREAM: Op = Op {
    name: "bench_stream",
    stem: "bench_stream",
    kernels: &[
        &KERNEL, &RMW[0].0, &RMW[1].0, &RMW[2].0, &RMW[3].0, &RMW[4].0, &READ[0], &READ[1], &READ[2],
        &READ[3],
    ],
};

/// `bench_read` with 1, 2, 4 and 8 loads of a thread.
static READ: [Kernel; 4] = [
    Kernel::new("bench_stream", c"bench_read_1"),
    Kernel::new("bench_stream", c"bench_read_2"),
    Kernel::new("bench_stream", c"bench_read_4"),
    Kernel::new("bench_stream", c"bench_read_8"),
];

/// `bench_rmw` for 1, 2, 4, 8 and 16 blocks of 64 KiB, with the threads of a block.
static RMW: [(Kernel, u32); 5] = [
    (Kernel::new("bench_stream", c"bench_rmw_1"), 256),
    (Kernel::new("bench_stream", c"bench_rmw_2"), 256),
    (Kernel::new("bench_stream", c"bench_rmw_4"), 256),
    (Kernel::new("bench_stream", c"bench_rmw_8"), 128),
    (Kernel::new("bench_stream", c"bench_rmw_16"), 256),
];

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
    stream: Stream,
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

/// Reads a buffer, the floor of ops that read far more than they write. `sink` is what the kernel would write to.
#[pyfunction]
#[pyo3(signature = (src, sink, loads, /))]
pub fn bench_read<'py>(
    py: Python<'py>,
    src: &Bound<'py, PyAny>,
    sink: &Bound<'py, PyAny>,
    loads: u32,
) -> Result<()> {
    if !loads.is_power_of_two() || loads > 8 {
        let (expected, got) = ("1, 2, 4 or 8".into(), loads.to_string());
        return Err(Error::Value { op: "bench_read", argument: "loads", expected, got });
    }
    let call = Call::new(py, src, sink)?;
    if call.params.write_units == 0 {
        let (expected, got) = ("at least 16 bytes".into(), "none".into());
        return Err(Error::Value { op: "bench_read", argument: "sink", expected, got });
    }
    let grid = call.params.read_units.div_ceil(u64::from(THREADS * loads)).max(1);
    let kernel = &READ[loads.trailing_zeros() as usize];
    launch("bench_read", kernel, call.device, call.stream, Launch::of(grid, THREADS), &call.params)
}

/// Twin of `RmwParams` in `kernels/bench_stream.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RmwParams {
    base: *mut u8,
    order: *const u8,
    stride: i64,
    tile_blocks: u32,
    columns: u32,
}

// SAFETY: repr(C) with the fields of the kernel's RmwParams in their order; padding at the end is not read.
unsafe impl Params for RmwParams {}

/// Reads and rewrites stretches of a pool, the floor of ops that update a state in place. What `order` holds is not checked.
#[pyfunction]
#[pyo3(signature = (pool, offset, stride, tiles, tile_bytes, split, order, /))]
pub fn bench_rmw<'py>(
    py: Python<'py>,
    pool: &Bound<'py, PyAny>,
    offset: i64,
    stride: i64,
    tiles: u32,
    tile_bytes: i64,
    split: u32,
    order: Option<&Bound<'py, PyAny>>,
) -> Result<()> {
    let refuse = |argument, expected: &str, got: i64| {
        Err(Error::Value { op: "bench_rmw", argument, expected: expected.into(), got: got.to_string() })
    };
    let mut arguments = Arguments::new(py);
    let mut memory = Tensor::unset("bench_rmw", "pool");
    arguments.read(pool, &mut memory)?;
    let bytes = check(&memory)? as i64 * ACCESS as i64;
    memory.expect_writable()?;
    let Device::Cuda(device) = memory.device else { return Err(memory.value_error("a CUDA tensor")) };
    if !split.is_power_of_two() || split > 16 {
        return refuse("split", "1, 2, 4, 8 or 16", split.into());
    }
    let block_bytes = (64 << 10) / i64::from(split);
    if tile_bytes <= 0 || tile_bytes % block_bytes != 0 {
        return refuse("tile_bytes", "a positive multiple of 64 KiB / split", tile_bytes);
    }
    if stride < tile_bytes || stride % ACCESS as i64 != 0 {
        return refuse("stride", "at least tile_bytes, a multiple of 16", stride);
    }
    let end = i64::from(tiles.max(1) - 1)
        .checked_mul(stride)
        .and_then(|last| last.checked_add(offset + tile_bytes));
    if offset < 0 || offset % ACCESS as i64 != 0 || end.is_none_or(|end| end > bytes) {
        return refuse("offset", "tiles within the pool, at a multiple of 16", offset);
    }
    let mut places = Tensor::unset("bench_rmw", "order");
    if let Some(order) = order {
        arguments.read(order, &mut places)?;
        places.expect_dtype(&[DType::I32])?;
        places.expect_rank(&["tiles", "places"])?;
        let columns = places.shape()[1].max(1);
        places.expect_shape(&[i64::from(tiles), columns], "tiles; where to read, and where to write")?;
        places.expect_contiguous()?;
        places.expect_device(memory.device, "pool")?;
    }
    if tiles == 0 {
        return Ok(());
    }
    let (kernel, threads) = &RMW[split.trailing_zeros() as usize];
    let tile_blocks = (tile_bytes / block_bytes) as u32;
    let base = memory.data.wrapping_offset(offset as isize);
    let columns = if order.is_some() { places.shape()[1] as u32 } else { 1 };
    let params = RmwParams { base, order: places.data, stride, tile_blocks, columns };
    let shape = Launch::of(u64::from(tiles) * u64::from(tile_blocks), *threads);
    launch("bench_rmw", kernel, device, arguments.current_stream(device)?, shape, &params)
}
