//! The ops, one folder per stem: checks and plan in `mod.rs`, then `cpu.rs` or `cuda.rs`.

pub mod bench_stream;
pub mod kda_decode;
pub mod mla_kv_pack;
pub mod moe_fp4_preamble;
pub mod moe_router;
pub mod nvfp4_quant;

use pyo3::prelude::*;

use crate::cuda::launch::Stream;
use crate::cuda::module::Kernel;
use crate::dlpack::Arguments;
use crate::error::Result;
use crate::tensor::{DType, Device};

/// An op as the rest of the crate knows it.
pub struct Op {
    pub name: &'static str,
    /// Of the file in `kernels/`.
    pub stem: &'static str,
    pub kernels: &'static [&'static Kernel],
}

/// One line per op.
pub static OPS: &[Op] = &[
    mla_kv_pack::CONCAT,
    mla_kv_pack::PACK,
    kda_decode::DECODE,
    kda_decode::SPEC,
    moe_fp4_preamble::PREAMBLE,
    moe_router::ROUTER,
    nvfp4_quant::QUANTIZE,
    nvfp4_quant::SILU_MUL,
    nvfp4_quant::ADD_RMS_NORM,
    bench_stream::STREAM,
];

/// The caller's output, or a new one that `allocate` makes.
fn output<'py>(
    given: Option<&Bound<'py, PyAny>>,
    allocate: &Bound<'py, PyAny>,
    device: Device,
    shape: &[i64],
    dtype: DType,
) -> Result<Bound<'py, PyAny>> {
    match given {
        Some(out) => Ok(out.clone()),
        None => Ok(allocate.call1((device.to_string(), shape, dtype.torch_name()))?),
    }
}

/// Carries out a checked call where its tensors are: on the CPU, or on a CUDA device by its index and stream.
fn carry_out(
    py: Python<'_>,
    arguments: &Arguments<'_>,
    device: Device,
    cpu: impl FnOnce() + Send,
    cuda: impl FnOnce(i32, Stream) -> Result<()> + Send,
) -> Result<()> {
    match device {
        Device::Cpu => {
            py.detach(cpu);
            Ok(())
        }
        Device::Cuda(index) => {
            // Without the GIL: a launch waits for room in a full queue, which a callback into Python may be holding up.
            let stream = arguments.current_stream(index)?;
            py.detach(|| cuda(index, stream))
        }
        Device::Other(_) => unreachable!("the checks of every op refuse it"),
    }
}
