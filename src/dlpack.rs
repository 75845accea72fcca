//! Python tensors to [`Tensor`]s: the DLPack C exchange API, with `__dlpack__` for producers that lack it, and torch's
//! current stream. Nothing here copies, moves or synchronises.
//!
//! The exchange API (DLPack 1.3, `DLPackExchangeAPI`) is a table of C functions that a tensor type carries as the capsule
//! `__dlpack_c_exchange_api__`. It is looked up once per type.

use std::ffi::CStr;
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use dlpack_rs::ffi::{
    DLDeviceType, DLManagedTensor, DLManagedTensorVersioned, DLPACK_FLAG_BITMASK_IS_COPIED,
    DLPACK_FLAG_BITMASK_READ_ONLY, DLPackExchangeAPI, DLTensor,
};
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

use crate::cuda::launch::Stream;
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, MAX_DIMS, Tensor};

const EXCHANGE_CAPSULE: &CStr = c"dlpack_exchange_api";
const MANAGED_CAPSULE: &CStr = c"dltensor";
const MANAGED_CAPSULE_USED: &CStr = c"used_dltensor";
const VERSIONED_CAPSULE: &CStr = c"dltensor_versioned";
const VERSIONED_CAPSULE_USED: &CStr = c"used_dltensor_versioned";
const DLPACK_MAJOR: u32 = 1;

/// Tensors of a 64-bit process lie above it, but for those of a program that is not position-independent.
const LOWEST_ADDRESS: usize = 1 << 40;
/// No memory is ever mapped below it.
const LOWEST_PAGE: usize = 1 << 16;

// ---- Types seen so far --------------------------------------------------------------------------------------------

/// What is known of a Python tensor type.
#[derive(Clone, Copy)]
struct TypeInfo {
    /// Its exchange table, null without one.
    api: *const DLPackExchangeAPI,
    /// A torch.Tensor subclass that handles dispatch itself.
    dispatches: bool,
    /// torch.Tensor or a subclass.
    torch: bool,
}

struct Slot {
    ty: AtomicPtr<ffi::PyTypeObject>,
    api: AtomicPtr<DLPackExchangeAPI>,
    flags: AtomicU8,
}

const DISPATCHES: u8 = 1;
const TORCH: u8 = 2;

/// More types than a process uses with these ops: torch.Tensor, Parameter, the Parameter classes of an engine, numpy's and
/// cupy's arrays. A type beyond them works and is looked up at each call. Slots are filled with the GIL held, one by one.
static SLOTS: [Slot; 64] = [const {
    Slot {
        ty: AtomicPtr::new(ptr::null_mut()),
        api: AtomicPtr::new(ptr::null_mut()),
        flags: AtomicU8::new(0),
    }
}; 64];

#[inline]
fn type_info(object: &Bound<'_, PyAny>) -> PyResult<TypeInfo> {
    // SAFETY: the interpreter is attached and `object` is alive, so its type pointer is valid.
    let ty = unsafe { ffi::Py_TYPE(object.as_ptr()) };
    for slot in &SLOTS {
        let known = slot.ty.load(Ordering::Acquire);
        if known == ty {
            let flags = slot.flags.load(Ordering::Relaxed);
            return Ok(TypeInfo {
                api: slot.api.load(Ordering::Relaxed),
                dispatches: flags & DISPATCHES != 0,
                torch: flags & TORCH != 0,
            });
        }
        if known.is_null() {
            break;
        }
    }
    look_up_type(&object.get_type())
}

#[cold]
fn look_up_type(ty: &Bound<'_, PyType>) -> PyResult<TypeInfo> {
    let py = ty.py();
    let api = exchange_api(ty)?;
    let (mut torch, mut dispatches) = (false, false);
    // A tensor of torch exists only where torch is loaded.
    if let Some(tensor) = torch_tensor_type(py)? {
        torch = ty.is_subclass(&tensor)?;
        let name = intern!(py, "__torch_dispatch__");
        dispatches = torch && !ty.getattr(name)?.eq(tensor.getattr(name)?)?;
    }
    // Types made in functions come and go; only what outlives a call is worth a slot, and a slot keeps its type alive.
    if torch || !api.is_null() {
        for slot in &SLOTS {
            if slot.ty.load(Ordering::Acquire).is_null() {
                slot.api.store(api.cast_mut(), Ordering::Relaxed);
                slot.flags.store(
                    if dispatches { DISPATCHES } else { 0 } | if torch { TORCH } else { 0 },
                    Ordering::Relaxed,
                );
                slot.ty.store(ty.clone().into_ptr().cast(), Ordering::Release);
                break;
            }
        }
    }
    Ok(TypeInfo { api, dispatches, torch })
}

fn torch_tensor_type(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let torch = modules.call_method1(intern!(py, "get"), (intern!(py, "torch"),))?;
    // torch is in sys.modules, without its contents, while it is being imported.
    torch.getattr_opt(intern!(py, "Tensor"))
}

/// The exchange table of a type, null without one or with another major version of DLPack.
fn exchange_api(ty: &Bound<'_, PyType>) -> PyResult<*const DLPackExchangeAPI> {
    let Some(capsule) = ty.getattr_opt(intern!(ty.py(), "__dlpack_c_exchange_api__"))? else {
        return Ok(ptr::null());
    };
    // SAFETY: PyCapsule_GetPointer checks that the object is a capsule of that name.
    let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE_CAPSULE.as_ptr()) };
    if table.is_null() {
        // Not a capsule of that name: the type is read through __dlpack__.
        drop(PyErr::take(ty.py()));
        return Ok(ptr::null());
    }
    let mut table = table.cast::<DLPackExchangeAPI>().cast_const();
    // SAFETY: DLPack keeps the header at the start of every version's table, chained to older ones, for the process's life.
    unsafe {
        while !table.is_null() && (*table).header.version.major != DLPACK_MAJOR {
            table = (*table).header.prev_api.cast::<DLPackExchangeAPI>();
        }
        if table.is_null() || (*table).dltensor_from_py_object_no_sync.is_none() {
            return Ok(ptr::null());
        }
    }
    Ok(table)
}

/// DLPack version of the exchange table of a type.
pub fn exchange_api_version(ty: &Bound<'_, PyType>) -> PyResult<Option<(u32, u32)>> {
    let table = exchange_api(ty)?;
    // SAFETY: a table that `exchange_api` returns is valid for the process's life.
    Ok((!table.is_null()).then(|| unsafe { ((*table).header.version.major, (*table).header.version.minor) }))
}

/// Whether the dispatcher has to see calls with this object: it is a torch.Tensor subclass with its own
/// `__torch_dispatch__`.
pub fn needs_dispatcher(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(type_info(object)?.dispatches)
}

// ---- Reading arguments --------------------------------------------------------------------------------------------

/// The arguments of one call. Keeps what `__dlpack__` producers lent until the call is over.
pub struct Arguments<'py> {
    py: Python<'py>,
    lent: Vec<Lent>,
    /// torch's exchange table, which tells its current stream, once an argument is a torch tensor.
    streams: *const DLPackExchangeAPI,
}

/// A tensor that `__dlpack__` lent: given back when dropped.
enum Lent {
    Managed(*mut DLManagedTensor),
    Versioned(*mut DLManagedTensorVersioned),
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: the pointer came out of a capsule that was renamed to "used", so this is its only owner.
        unsafe {
            match *self {
                Self::Managed(tensor) => {
                    if let Some(deleter) = (*tensor).deleter {
                        deleter(tensor);
                    }
                }
                Self::Versioned(tensor) => {
                    if let Some(deleter) = (*tensor).deleter {
                        deleter(tensor);
                    }
                }
            }
        }
    }
}

impl<'py> Arguments<'py> {
    pub fn new(py: Python<'py>) -> Self {
        Self { py, lent: Vec::new(), streams: ptr::null() }
    }

    /// Reads one tensor argument into `out`, which stays valid while `object` and `self` live.
    // In place, because a struct that is moved right after its fields were written stalls the processor for longer than
    // the exchange itself takes.
    #[inline]
    pub fn read(&mut self, object: &Bound<'py, PyAny>, out: &mut Tensor) -> Result<()> {
        let info = type_info(object)?;
        out.read_only = false;
        // Such a tensor reports an address in memory that it does not have, which is not even null where it is a view.
        if info.dispatches {
            return Err(Error::Value {
                op: out.op,
                argument: out.name,
                expected: "a tensor with memory of its own".into(),
                got: format!("{} (call the op through torch.ops)", type_name(object)),
            });
        }
        if info.api.is_null() {
            self.read_from_protocol(object, out)?;
        } else {
            self.read_from_table(object, info, out)?;
        }
        if out.data.addr() < LOWEST_ADDRESS && out.numel() > 0 {
            self.refuse_missing_memory(object, info, out)?;
        }
        Ok(())
    }

    /// A tensor whose storage is gone reports null plus the offset of its view.
    #[cold]
    fn refuse_missing_memory(&self, object: &Bound<'py, PyAny>, info: TypeInfo, out: &Tensor) -> Result<()> {
        let mut missing = out.data.addr() < LOWEST_PAGE;
        if info.torch {
            // torch raises where the storage never had memory.
            let storage = object.call_method0(intern!(self.py, "untyped_storage"));
            let address = storage.and_then(|storage| storage.call_method0(intern!(self.py, "data_ptr")));
            missing |=
                address.and_then(|address| address.extract::<usize>()).map_or(true, |address| address == 0);
        }
        if missing { Err(out.value_error("a tensor with memory")) } else { Ok(()) }
    }

    #[inline]
    fn read_from_table(
        &mut self,
        object: &Bound<'py, PyAny>,
        info: TypeInfo,
        out: &mut Tensor,
    ) -> Result<()> {
        // SAFETY: DLTensor is plain data, for which all zeros is a value.
        let mut raw: DLTensor = unsafe { std::mem::zeroed() };
        // SAFETY: the table is valid for the process's life and belongs to the type of `object`; attached to Python.
        let status = unsafe {
            match (*info.api).dltensor_from_py_object_no_sync {
                Some(read) => read(object.as_ptr().cast(), &raw mut raw),
                None => unreachable!("exchange_api() refuses such a table"),
            }
        };
        if status != 0 {
            return Err(self.not_a_tensor(object, out, PyErr::fetch(self.py)));
        }
        if info.torch {
            self.streams = info.api;
        }
        set(out, &raw)?;
        // The table reports the memory of a lazily negated tensor as it is. Such tensors are imaginary parts, every other
        // element of something. The look takes 100 ns, which bf16 and FP8 activations with neighbouring elements are spared:
        // there only a private function, or as_strided of an imaginary part, makes a negated one.
        if info.torch && (matches!(out.dtype, DType::F16 | DType::F32) || out.skips_elements()) {
            let negative = object.call_method0(intern!(self.py, "is_neg"))?.is_truthy()?;
            if negative {
                return Err(out.value_error("a tensor without the negative bit (call resolve_neg() first)"));
            }
        }
        Ok(())
    }

    /// `__dlpack__`, asked for no synchronisation: the caller orders a producer's stream against the current one.
    #[cold]
    fn read_from_protocol(&mut self, object: &Bound<'py, PyAny>, out: &mut Tensor) -> Result<()> {
        let py = self.py;
        let method = match object.getattr(intern!(py, "__dlpack__")) {
            Ok(method) => method,
            Err(error) => return Err(self.not_a_tensor(object, out, error)),
        };
        let keywords = PyDict::new(py);
        let device = match object.call_method0(intern!(py, "__dlpack_device__")) {
            Ok(device) => device,
            Err(error) => return Err(self.not_a_tensor(object, out, error)),
        };
        let kind = device.get_item(0).and_then(|kind| kind.extract::<u32>());
        if let Ok(DLDeviceType::kDLCUDA | DLDeviceType::kDLCUDAHost | DLDeviceType::kDLCUDAManaged) = kind {
            keywords.set_item(intern!(py, "stream"), -1)?;
        }
        keywords.set_item(intern!(py, "max_version"), (DLPACK_MAJOR, 3))?;
        let capsule = match method.call((), Some(&keywords)) {
            // A producer from before DLPack 1.0 knows no max_version: the call does not get inside, so nothing is traced.
            Err(error) if error.is_instance_of::<PyTypeError>(py) && error.traceback(py).is_none() => {
                keywords.del_item(intern!(py, "max_version"))?;
                method.call((), Some(&keywords))
            }
            other => other,
        };
        let capsule = match capsule {
            Ok(capsule) => capsule,
            Err(error) => return Err(self.not_a_tensor(object, out, error)),
        };
        // SAFETY: each pointer is taken from a capsule of the matching name, which is renamed so that this call owns it.
        unsafe {
            let at = capsule.as_ptr();
            if ffi::PyCapsule_IsValid(at, VERSIONED_CAPSULE.as_ptr()) == 1 {
                let managed = ffi::PyCapsule_GetPointer(at, VERSIONED_CAPSULE.as_ptr())
                    .cast::<DLManagedTensorVersioned>();
                ffi::PyCapsule_SetName(at, VERSIONED_CAPSULE_USED.as_ptr());
                self.lent.push(Lent::Versioned(managed));
                let version = (*managed).version;
                if version.major != DLPACK_MAJOR {
                    return Err(type_error(
                        out,
                        "DLPack version 1",
                        format!("version {}.{}", version.major, version.minor),
                    ));
                }
                // What is written to a copy is lost, so a copy is no output either.
                out.read_only =
                    (*managed).flags & (DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED) != 0;
                set(out, &(*managed).dl_tensor)
            } else if ffi::PyCapsule_IsValid(at, MANAGED_CAPSULE.as_ptr()) == 1 {
                let managed =
                    ffi::PyCapsule_GetPointer(at, MANAGED_CAPSULE.as_ptr()).cast::<DLManagedTensor>();
                ffi::PyCapsule_SetName(at, MANAGED_CAPSULE_USED.as_ptr());
                self.lent.push(Lent::Managed(managed));
                set(out, &(*managed).dl_tensor)
            } else {
                let got = capsule.repr()?.to_string();
                Err(type_error(out, "__dlpack__ to return a capsule dltensor or dltensor_versioned", got))
            }
        }
    }

    /// torch's current stream of a device, the legacy default stream where torch is not loaded.
    pub fn current_stream(&self, device: i32) -> Result<Stream> {
        let mut table = self.streams;
        if table.is_null()
            && let Some(tensor) = torch_tensor_type(self.py)?
        {
            table = exchange_api(tensor.cast::<PyType>().map_err(PyErr::from)?)?;
        }
        let mut stream = ptr::null_mut();
        // SAFETY: a table that `exchange_api` returns is valid for the process's life; attached to Python.
        let status = unsafe {
            match table.as_ref().and_then(|table| table.current_work_stream) {
                Some(current) => current(DLDeviceType::kDLCUDA, device, &raw mut stream),
                None => 0,
            }
        };
        if status == 0 { Ok(Stream(stream)) } else { Err(PyErr::fetch(self.py).into()) }
    }

    #[cold]
    fn not_a_tensor(&self, object: &Bound<'py, PyAny>, out: &Tensor, error: PyErr) -> Error {
        // What a producer raises when it has nothing to lend. Anything else, such as an interrupt, is not about the argument.
        let py = self.py;
        if !(error.is_instance_of::<PyAttributeError>(py)
            || error.is_instance_of::<PyTypeError>(py)
            || error.is_instance_of::<PyValueError>(py)
            || error.is_instance_of::<PyBufferError>(py)
            || error.is_instance_of::<PyRuntimeError>(py))
        {
            return error.into();
        }
        let ty =
            object.get_type().fully_qualified_name().map_or_else(|_| "an object".into(), |n| n.to_string());
        // The first line of the producer's reason; torch appends its C++ stack.
        let reason = error.value(self.py).to_string();
        let reason = reason.lines().next().unwrap_or_default();
        let raised = PyErr::from(type_error(
            out,
            "a tensor (torch, or another with DLPack)",
            format!("{ty} ({reason})"),
        ));
        raised.set_cause(py, Some(error));
        raised.into()
    }
}

/// Takes over what a `DLTensor` says.
#[inline]
fn set(out: &mut Tensor, raw: &DLTensor) -> Result<()> {
    let ndim = usize::try_from(raw.ndim).unwrap_or(usize::MAX);
    let refuse =
        |expected: String, got: String| Err(Error::Value { op: out.op, argument: out.name, expected, got });
    if ndim > MAX_DIMS {
        return refuse(format!("at most {MAX_DIMS} dimensions"), format!("{} dimensions", raw.ndim));
    }
    if ndim == 0 {
        out.set_layout(&[], None);
    } else if raw.shape.is_null() {
        return refuse("a tensor with a shape".into(), format!("{ndim} dimensions without one"));
    } else {
        // SAFETY: DLPack: shape has ndim entries, and strides too unless it is null (contiguous, before DLPack 1.2).
        let (shape, strides) = unsafe {
            let strides = (!raw.strides.is_null()).then(|| slice::from_raw_parts(raw.strides, ndim));
            (slice::from_raw_parts(raw.shape, ndim), strides)
        };
        if !addressable(shape, strides) {
            return refuse(
                "sizes and strides that fit an address space".into(),
                format!("{shape:?}, {strides:?}"),
            );
        }
        out.set_layout(shape, strides);
    }
    out.dtype = DType { code: raw.dtype.code, bits: raw.dtype.bits, lanes: raw.dtype.lanes };
    out.device = match raw.device.device_type {
        DLDeviceType::kDLCPU | DLDeviceType::kDLCUDAHost => Device::Cpu,
        DLDeviceType::kDLCUDA | DLDeviceType::kDLCUDAManaged => Device::Cuda(raw.device.device_id),
        other => Device::Other(other),
    };
    // DLPack counts the offset in bytes from `data`, which is null for a tensor without elements.
    out.data = if raw.data.is_null() {
        ptr::null_mut()
    } else {
        raw.data.cast::<u8>().wrapping_add(raw.byte_offset as usize)
    };
    Ok(())
}

/// Whether no size is negative and neither the elements nor the distance between any two of them, in elements, exceed 2^58.
#[inline]
fn addressable(shape: &[i64], strides: Option<&[i64]>) -> bool {
    const LIMIT: i64 = 1 << 58;
    let (mut elements, mut distance) = (1_i64, 0_i64);
    for (dim, &size) in shape.iter().enumerate() {
        if size < 0 {
            return false;
        }
        elements = elements.saturating_mul(size);
        if let Some(strides) = strides
            && size > 1
        {
            distance = distance.saturating_add((size - 1).saturating_mul(strides[dim].saturating_abs()));
        }
    }
    elements == 0 || (elements <= LIMIT && distance <= LIMIT)
}

fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().fully_qualified_name().map_or_else(|_| "an object".into(), |name| name.to_string())
}

fn type_error(argument: &Tensor, expected: &str, got: String) -> Error {
    Error::Type { op: argument.op, argument: argument.name, expected: expected.into(), got }
}
