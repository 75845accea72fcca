//! `vllm_hotpath._core`: the ops and what `doctor`, the benchmarks and the tests ask about them.

mod cuda;
mod dlpack;
mod error;
mod fp8;
mod gate;
mod mufu;
mod nvfp4;
mod ops;
mod overlap;
mod parallel;
mod tensor;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};

use crate::cuda::module::{FATBINS, Fatbin, NVCC, TARGETS};
use crate::error::{Error, Result};
use crate::ops::OPS;

#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let kernels = PyDict::new(py);
    for fatbin in &FATBINS {
        let of_stem = OPS.iter().filter(|op| op.stem == fatbin.stem);
        let names: Vec<&str> =
            of_stem.flat_map(|op| op.kernels).filter_map(|kernel| kernel.name.to_str().ok()).collect();
        kernels.set_item(fatbin.stem, names)?;
    }
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("targets", TARGETS)?;
    info.set_item("nvcc", NVCC)?;
    info.set_item("stems", FATBINS.iter().map(|fatbin| fatbin.stem).collect::<Vec<_>>())?;
    info.set_item("kernels", kernels)?;
    Ok(info)
}

#[pyfunction]
fn cuda_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    let driver = cuda::initialize("cuda_info").ok();
    info.set_item("driver", driver.map(|v| format!("{}.{}", v / 1000, v % 1000 / 10)))?;
    let mut devices = Vec::new();
    match cuda::list_devices("cuda_info") {
        Ok(found) => {
            for device in found {
                let entry = PyDict::new(py);
                entry.set_item("index", device.index)?;
                entry.set_item("name", &device.name)?;
                entry.set_item("capability", [device.capability.0, device.capability.1])?;
                entry.set_item("sms", device.sms)?;
                entry.set_item("l2_bytes", device.l2_bytes)?;
                entry.set_item("memory_bytes", device.memory_bytes)?;
                entry.set_item("target", device.target())?;
                devices.push(entry);
            }
            info.set_item("error", py.None())?;
        }
        Err(Error::Unsupported { reason, .. }) => info.set_item("error", reason)?,
        Err(error) => info.set_item("error", error.to_string())?,
    }
    info.set_item("devices", devices)?;
    Ok(info)
}

#[pyfunction]
fn exchange_api_version(type_: Bound<'_, PyType>) -> PyResult<Option<(u32, u32)>> {
    dlpack::exchange_api_version(&type_)
}

#[pyfunction]
fn unsupported_reason(op: &str, device_index: i32) -> Result<Option<String>> {
    let Some(op) = OPS.iter().find(|known| known.name == op) else {
        return Err(Error::Value {
            op: "unsupported_reason",
            argument: "op",
            expected: "the name of an op".into(),
            got: op.into(),
        });
    };
    match cuda::describe_device(op.name, device_index) {
        Ok((_, device)) => Ok(cuda::module::unsupported_reason(&device)),
        Err(Error::Unsupported { reason, .. }) => Ok(Some(reason)),
        Err(error) => Ok(Some(error.to_string())),
    }
}

#[pyfunction]
#[pyo3(signature = (*objects))]
fn needs_dispatcher(objects: Bound<'_, PyTuple>) -> PyResult<bool> {
    for object in objects.iter_borrowed() {
        if dlpack::needs_dispatcher(&object)? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[pyfunction]
#[pyo3(signature = (*tensors))]
fn borrow_tensors(tensors: Bound<'_, PyTuple>) -> Result<usize> {
    let mut arguments = dlpack::Arguments::new(tensors.py());
    let mut tensor = tensor::Tensor::unset("borrow_tensors", "tensors");
    for object in tensors.iter_borrowed() {
        arguments.read(&object, &mut tensor)?;
    }
    Ok(tensors.len())
}

#[pyfunction]
fn approximate_reciprocals(py: Python<'_>) -> Bound<'_, PyBytes> {
    PyBytes::new(py, &mufu::reciprocals())
}

#[pyfunction]
fn fatbin<'py>(py: Python<'py>, stem: &str) -> Result<Bound<'py, PyBytes>> {
    match Fatbin::of(stem) {
        Some(fatbin) => Ok(PyBytes::new(py, fatbin.bytes)),
        None => Err(Error::Value {
            op: "fatbin",
            argument: "stem",
            expected: "the stem of a kernel file".into(),
            got: stem.into(),
        }),
    }
}

#[pymodule]
mod _core {
    #[pymodule_init]
    fn init(_module: &pyo3::Bound<'_, pyo3::types::PyModule>) {
        crate::parallel::forget_pool_in_children();
    }

    #[pymodule_export]
    use super::{
        approximate_reciprocals, borrow_tensors, build_info, cuda_info, exchange_api_version, fatbin,
        needs_dispatcher, unsupported_reason,
    };
    #[pymodule_export]
    use crate::ops::bench_stream::{bench_launch, bench_read, bench_rmw, bench_stream};
    #[pymodule_export]
    use crate::ops::kda_decode::kda_decode;
    #[pymodule_export]
    use crate::ops::mla_kv_pack::{mla_kv_concat, mla_kv_concat_quant_fp8};
    #[pymodule_export]
    use crate::ops::moe_fp4_preamble::moe_fp4_preamble;
    #[pymodule_export]
    use crate::ops::moe_router::moe_router;
    #[pymodule_export]
    use crate::ops::nvfp4_quant::{add_rms_norm_nvfp4, nvfp4_quantize, silu_mul_nvfp4};
    #[pymodule_export]
    use crate::overlap::SideStream;
}
