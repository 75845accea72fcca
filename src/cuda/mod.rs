//! The CUDA driver: kernels embedded in the extension, devices, launches. Loaded at the first CUDA call, never at import.

pub mod event;
pub mod launch;
pub mod module;

use std::ffi::CStr;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute, CUresult, CUstreamCaptureMode};
use once_cell::sync::OnceCell;

use crate::error::{Error, Result};

/// The kernels are CUDA 13 machine code, which older drivers do not load.
const MIN_DRIVER: i32 = 13_000;

/// Devices a process can have here; the driver numbers them from 0.
pub const MAX_DEVICES: usize = 64;

/// Turns a driver status into an error that names the op and the call.
pub fn check(op: &'static str, call: &'static str, status: CUresult) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(driver_error(op, call, status)) }
}

#[cold]
fn driver_error(op: &'static str, call: &'static str, status: CUresult) -> Error {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut at = ptr::null();
        // SAFETY: the driver writes a pointer to a static string, or leaves null for a code it does not know.
        unsafe {
            get(status, &raw mut at);
            if at.is_null() {
                String::from("unknown")
            } else {
                CStr::from_ptr(at).to_string_lossy().into_owned()
            }
        }
    };
    let mut description = text(sys::cuGetErrorString);
    if status == CUresult::CUDA_ERROR_NOT_INITIALIZED && INITIALIZED.get().is_some() {
        description
            .push_str("; CUDA was initialised before this process was forked, start workers with spawn");
    }
    Error::Cuda { op, call, code: status as u32, name: text(sys::cuGetErrorName), text: description }
}

static INITIALIZED: OnceCell<i32> = OnceCell::new();

/// Loads libcuda and initialises it, once. Returns the driver's version, such as 13000.
pub fn initialize(op: &'static str) -> Result<i32> {
    INITIALIZED
        .get_or_try_init(|| {
            let unsupported = |reason: String| Error::Unsupported { op, reason };
            // SAFETY: loads the driver's library, whose initialisers are NVIDIA's.
            if !unsafe { sys::is_culib_present() } {
                return Err(unsupported("no NVIDIA driver found (libcuda.so.1 cannot be loaded)".into()));
            }
            let mut version = 0;
            // SAFETY: the out pointer is valid; both calls exist in every driver.
            unsafe {
                check(op, "cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
                if version < MIN_DRIVER {
                    let (major, minor) = (version / 1000, version % 1000 / 10);
                    return Err(unsupported(format!(
                        "the NVIDIA driver is for CUDA {major}.{minor}; the kernels need a driver for CUDA 13.0 or newer"
                    )));
                }
                check(op, "cuInit", sys::cuInit(0))?;
            }
            Ok(version)
        })
        .copied()
}

/// What launches and plans need to know of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    pub index: i32,
    pub name: String,
    pub capability: (i32, i32),
    pub sms: i32,
    pub l2_bytes: i32,
    pub memory_bytes: usize,
}

impl DeviceInfo {
    /// The target in this build whose machine code runs on the device.
    pub fn target(&self) -> Option<&'static str> {
        target_for(self.capability, module::TARGETS)
    }
}

/// Machine code of an `a` target runs on that capability alone, of an `f` target on its family: the same major number
/// and at least the same minor number.
fn target_for((major, minor): (i32, i32), targets: &[&'static str]) -> Option<&'static str> {
    targets.iter().copied().find(|target| {
        let (number, kind) = target.trim_start_matches("sm_").split_at(target.len() - 4);
        let number: i32 = number.parse().unwrap_or(0);
        match kind {
            "a" => number == major * 10 + minor,
            _ => number / 10 == major && number % 10 <= minor,
        }
    })
}

/// A device of the process, with its primary context retained for good: torch's is the same one.
pub struct DeviceState {
    pub info: DeviceInfo,
    context: CUcontext,
}

// SAFETY: a CUcontext is a handle that every thread may make current.
unsafe impl Send for DeviceState {}
// SAFETY: as above.
unsafe impl Sync for DeviceState {}

static DEVICES: [AtomicPtr<DeviceState>; MAX_DEVICES] =
    [const { AtomicPtr::new(ptr::null_mut()) }; MAX_DEVICES];
static DEVICES_LOCK: Mutex<()> = Mutex::new(());

/// The state of device `index`, made at its first use.
pub fn device(op: &'static str, index: i32) -> Result<&'static DeviceState> {
    let slot =
        usize::try_from(index).ok().and_then(|i| DEVICES.get(i)).ok_or_else(|| Error::Unsupported {
            op,
            reason: format!("cuda:{index} is not one of the {MAX_DEVICES} devices that can be used"),
        })?;
    // SAFETY: the slot holds null or a leaked, immutable DeviceState.
    if let Some(state) = unsafe { slot.load(Ordering::Acquire).as_ref() } {
        return Ok(state);
    }
    make_device(op, index, slot)
}

#[cold]
fn make_device(op: &'static str, index: i32, slot: &AtomicPtr<DeviceState>) -> Result<&'static DeviceState> {
    let _lock = DEVICES_LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: as in `device`.
    if let Some(state) = unsafe { slot.load(Ordering::Acquire).as_ref() } {
        return Ok(state);
    }
    let (handle, info) = describe_device(op, index)?;
    let _relaxed = RelaxedCapture::enter(op)?;
    let mut context = ptr::null_mut();
    // SAFETY: valid out pointer and device handle.
    check(op, "cuDevicePrimaryCtxRetain", unsafe {
        sys::cuDevicePrimaryCtxRetain(&raw mut context, handle)
    })?;
    let state = Box::leak(Box::new(DeviceState { info, context }));
    slot.store(state, Ordering::Release);
    Ok(state)
}

/// Reads a device's properties without making a context.
pub fn describe_device(op: &'static str, index: i32) -> Result<(CUdevice, DeviceInfo)> {
    initialize(op)?;
    let mut handle = 0;
    let mut name = [0_u8; 128];
    let mut memory_bytes = 0;
    // SAFETY: valid out pointers; the name buffer's length is passed along.
    unsafe {
        check(op, "cuDeviceGet", sys::cuDeviceGet(&raw mut handle, index))?;
        check(
            op,
            "cuDeviceGetName",
            sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, handle),
        )?;
        check(op, "cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, handle))?;
    }
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: valid out pointer and device handle.
        check(op, "cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&raw mut value, which, handle)
        })?;
        Ok::<i32, Error>(value)
    };
    let info = DeviceInfo {
        index,
        name: CStr::from_bytes_until_nul(&name)
            .map_or_else(|_| String::new(), |n| n.to_string_lossy().into_owned()),
        capability: (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sms: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        memory_bytes,
    };
    Ok((handle, info))
}

/// Every device of the process, for `doctor`.
pub fn list_devices(op: &'static str) -> Result<Vec<DeviceInfo>> {
    initialize(op)?;
    let mut count = 0;
    // SAFETY: valid out pointer.
    check(op, "cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    (0..count).map(|index| describe_device(op, index).map(|(_, info)| info)).collect()
}

/// Makes a device's primary context current, and the caller's again when dropped.
pub struct DeviceGuard {
    pushed: bool,
}

impl DeviceGuard {
    pub fn enter(op: &'static str, device: &DeviceState) -> Result<Self> {
        let mut current = ptr::null_mut();
        // SAFETY: valid out pointer; the context is retained for good.
        unsafe {
            check(op, "cuCtxGetCurrent", sys::cuCtxGetCurrent(&raw mut current))?;
            let pushed = current != device.context;
            if pushed {
                check(op, "cuCtxPushCurrent", sys::cuCtxPushCurrent_v2(device.context))?;
            }
            Ok(Self { pushed })
        }
    }
}

impl Drop for DeviceGuard {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: valid out pointer; this guard pushed the context on top of this thread's stack.
            unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}

/// While it lives, calls that load code or make contexts are legal although a stream of the process captures.
pub struct RelaxedCapture {
    previous: CUstreamCaptureMode,
}

impl RelaxedCapture {
    pub fn enter(op: &'static str) -> Result<Self> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver swaps the thread's mode with the one behind the valid pointer.
        let status = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        check(op, "cuThreadExchangeStreamCaptureMode", status)?;
        Ok(Self { previous: mode })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: restores the mode that `enter` replaced.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.previous) };
    }
}

#[cfg(test)]
mod tests {
    use super::target_for;

    const TARGETS: [&str; 3] = ["sm_90a", "sm_100f", "sm_120f"];

    #[test]
    fn a_targets_serve_one_capability_and_f_targets_their_family() {
        for (capability, target) in [
            ((9, 0), Some("sm_90a")),
            ((10, 0), Some("sm_100f")),
            ((10, 3), Some("sm_100f")),
            ((12, 0), Some("sm_120f")),
            ((12, 1), Some("sm_120f")),
            ((8, 0), None),
            ((8, 9), None),
            ((11, 0), None),
            ((9, 1), None),
        ] {
            assert_eq!(target_for(capability, &TARGETS), target, "{capability:?}");
        }
    }
}
