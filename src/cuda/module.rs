//! The fatbins embedded by `build.rs`, loaded when first needed, and their kernels per device.

use std::ffi::CStr;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use cudarc::driver::sys::{self, CUfunc_st, CUfunction, CUfunction_attribute, CUlib_st, CUlibrary};

use super::{DeviceInfo, DeviceState, MAX_DEVICES, RelaxedCapture, check};
use crate::error::{Error, Result};

include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Bytes aligned as the driver's loader wants them.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

/// The machine code of one `kernels/<stem>.cu` for every target.
pub struct Fatbin {
    pub stem: &'static str,
    pub bytes: &'static [u8],
    library: AtomicPtr<CUlib_st>,
}

impl Fatbin {
    const fn new(stem: &'static str, bytes: &'static [u8]) -> Self {
        Self { stem, bytes, library: AtomicPtr::new(ptr::null_mut()) }
    }

    pub fn of(stem: &str) -> Option<&'static Self> {
        FATBINS.iter().find(|fatbin| fatbin.stem == stem)
    }

    /// Call with [`LOAD_LOCK`] held and capture relaxed.
    fn library(&self, op: &'static str) -> Result<CUlibrary> {
        let mut library = self.library.load(Ordering::Acquire);
        if library.is_null() {
            // SAFETY: the bytes are a whole fatbin and live for the process; no options are passed.
            let status = unsafe {
                sys::cuLibraryLoadData(
                    &raw mut library,
                    self.bytes.as_ptr().cast(),
                    ptr::null_mut(),
                    ptr::null_mut(),
                    0,
                    ptr::null_mut(),
                    ptr::null_mut(),
                    0,
                )
            };
            check(op, "cuLibraryLoadData", status)?;
            self.library.store(library, Ordering::Release);
        }
        Ok(library)
    }
}

static LOAD_LOCK: Mutex<()> = Mutex::new(());

/// One kernel: its file, its name, and its handle on each device that has used it.
pub struct Kernel {
    pub stem: &'static str,
    pub name: &'static CStr,
    /// Dynamic shared memory of a launch; more than 48 KiB has to be asked for when the kernel is loaded.
    shared_bytes: u32,
    functions: [AtomicPtr<CUfunc_st>; MAX_DEVICES],
}

impl Kernel {
    pub const fn new(stem: &'static str, name: &'static CStr) -> Self {
        Self {
            stem,
            name,
            shared_bytes: 0,
            functions: [const { AtomicPtr::new(ptr::null_mut()) }; MAX_DEVICES],
        }
    }

    /// The same with that much dynamic shared memory.
    pub const fn with_shared(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// The kernel on a device whose context is current. Loads it at the first use, also while a stream captures.
    pub fn function(&self, op: &'static str, device: &DeviceState) -> Result<CUfunction> {
        let slot = &self.functions[device.info.index as usize];
        let function = slot.load(Ordering::Acquire);
        if function.is_null() { self.load(op, device, slot) } else { Ok(function) }
    }

    #[cold]
    fn load(
        &self,
        op: &'static str,
        device: &DeviceState,
        slot: &AtomicPtr<CUfunc_st>,
    ) -> Result<CUfunction> {
        if let Some(reason) = unsupported_reason(&device.info) {
            return Err(Error::Unsupported { op, reason });
        }
        let fatbin = Fatbin::of(self.stem).ok_or_else(|| Error::Unsupported {
            op,
            reason: format!("this build holds no kernels/{}.cu", self.stem),
        })?;
        let _lock = LOAD_LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _relaxed = RelaxedCapture::enter(op)?;
        let library = fatbin.library(op)?;
        let (mut kernel, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: valid out pointers, a loaded library, a C string. cuFuncLoad makes lazy loading happen here, in relaxed
        // capture mode, instead of at the launch.
        unsafe {
            check(
                op,
                "cuLibraryGetKernel",
                sys::cuLibraryGetKernel(&raw mut kernel, library, self.name.as_ptr()),
            )?;
            check(op, "cuKernelGetFunction", sys::cuKernelGetFunction(&raw mut function, kernel))?;
            check(op, "cuFuncLoad", sys::cuFuncLoad(function))?;
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let status = sys::cuFuncSetAttribute(function, attribute, self.shared_bytes as i32);
            check(op, "cuFuncSetAttribute", status)?;
        }
        slot.store(function, Ordering::Release);
        Ok(function)
    }
}

/// Why this build has no kernels for a device, `None` when it has them.
pub fn unsupported_reason(device: &DeviceInfo) -> Option<String> {
    if device.target().is_some() {
        return None;
    }
    let (major, minor) = device.capability;
    Some(format!(
        "{} has compute capability {major}.{minor}; this build has kernels for {}",
        device.name,
        TARGETS.join(", ")
    ))
}
