//! The ops, one folder per stem: checks and plan in `mod.rs`, then `cpu.rs` or `cuda.rs`.

pub mod bench_stream;
pub mod kda_decode;
pub mod mla_kv_pack;

use crate::cuda::module::Kernel;

/// An op as the rest of the crate knows it.
pub struct Op {
    pub name: &'static str,
    pub stem: &'static str,
    pub kernels: &'static [&'static Kernel],
}

/// One line per op.
pub static OPS: &[Op] = &[mla_kv_pack::CONCAT, mla_kv_pack::PACK, kda_decode::DECODE, bench_stream::STREAM];
