//! The ops, one folder per stem: checks and plan in `mod.rs`, then `cpu.rs` or `cuda.rs`.

pub mod bench_stream;
pub mod kda_decode;
pub mod mla_kv_pack;
pub mod moe_router;

use pyo3::prelude::*;

use crate::cuda::module::Kernel;
use crate::error::Result;
use crate::tensor::{DType, Device};

/// An op as the rest of the crate knows it.
pub struct Op {
    pub name: &'static str,
    pub stem: &'static str,
    pub kernels: &'static [&'static Kernel],
}

/// One line per op.
pub static OPS: &[Op] =
    &[mla_kv_pack::CONCAT, mla_kv_pack::PACK, kda_decode::DECODE, moe_router::ROUTER, bench_stream::STREAM];

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
