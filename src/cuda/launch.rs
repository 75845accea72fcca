//! Kernel launches: one parameter struct, programmatic dependent launch, optional clusters.

use std::ffi::c_void;
use std::mem;
use std::ptr;

use cudarc::driver::sys::{
    self, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, CUstreamCaptureStatus,
};

use super::module::Kernel;
use super::{DeviceGuard, check, device};
use crate::error::{Error, Result};

/// A stream of the driver; any thread may launch on it.
#[derive(Clone, Copy)]
pub struct Stream(pub *mut c_void);

// SAFETY: the driver's streams are handles that every thread may use.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Whether its launches go into a graph. What cannot be told is not captured.
    pub fn is_capturing(self) -> bool {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a valid out pointer; the query is legal while the stream captures.
        let answer = unsafe { sys::cuStreamIsCapturing(self.0.cast(), &raw mut status) };
        answer == sys::CUresult::CUDA_SUCCESS
            && status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
    }
}

/// Grid and block of a launch, in blocks and threads.
#[derive(Clone, Copy)]
pub struct Launch {
    pub grid: u64,
    pub block: u32,
    pub shared_bytes: u32,
    /// Blocks of a thread-block cluster; 1 launches without one.
    pub cluster: u32,
}

/// Blocks that one grid dimension can have.
pub const MAX_GRID: u64 = (1 << 31) - 1;

impl Launch {
    /// A one-dimensional grid without dynamic shared memory or clusters.
    pub fn of(grid: u64, block: u32) -> Self {
        Self { grid, block, shared_bytes: 0, cluster: 1 }
    }
}

/// A struct that is the sole parameter of a kernel, laid out as its twin in `kernels/`.
///
/// # Safety
/// `#[repr(C)]`, the same fields in the same order as the kernel's parameter struct, and no padding that is read.
pub unsafe trait Params: Copy {}

/// Launches `kernel` on `stream` of device `index`, allowed to start while the stream's kernel before it ends.
pub fn launch<P: Params>(
    op: &'static str,
    kernel: &Kernel,
    index: i32,
    stream: Stream,
    shape: Launch,
    params: &P,
) -> Result<()> {
    if shape.grid > MAX_GRID {
        let reason =
            format!("the call needs {} thread blocks; a launch holds at most {MAX_GRID}", shape.grid);
        return Err(Error::Unsupported { op, reason });
    }
    let device = device(op, index)?;
    let _guard = DeviceGuard::enter(op, device)?;
    let function = kernel.function(op, device)?;

    // SAFETY: CUlaunchAttribute is plain data, for which all zeros is a value.
    let mut attributes: [CUlaunchAttribute; 2] = unsafe { mem::zeroed() };
    attributes[0].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[0].value.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[1].value.clusterDim.x = shape.cluster;
    attributes[1].value.clusterDim.y = 1;
    attributes[1].value.clusterDim.z = 1;

    let config = CUlaunchConfig {
        gridDimX: shape.grid as u32,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: shape.block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shape.shared_bytes,
        hStream: stream.0.cast(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: if shape.cluster > 1 { 2 } else { 1 },
    };
    let mut arguments = [ptr::from_ref(params).cast_mut().cast::<c_void>()];
    // SAFETY: the function belongs to the current context; its one parameter has the layout of `P` (trait Params); the
    // driver copies parameters and attributes before it returns.
    let status = unsafe {
        sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), ptr::null_mut())
    };
    check(op, "cuLaunchKernelEx", status)
}

/// Multiplier and shift that divide any number below 2^31 by `divisor`. Twin of `hotpath::FastDiv` in
/// `kernels/common.cuh`, which has the derivation's source.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FastDiv {
    divisor: u32,
    multiplier: u32,
    shift: u32,
}

impl FastDiv {
    /// # Panics
    /// Unless `divisor` is from 1 to 2^31, which the ops' checks see to.
    pub fn new(divisor: u32) -> Self {
        assert!((1..=1 << 31).contains(&divisor), "division by {divisor}");
        let shift = divisor.next_power_of_two().trailing_zeros();
        let multiplier = (1_u64 << (31 + shift)) / u64::from(divisor) + 1;
        Self { divisor, multiplier: multiplier as u32, shift }
    }
}

#[cfg(test)]
mod tests {
    use super::FastDiv;

    fn divide(by: FastDiv, n: u32) -> u32 {
        ((u64::from(n << 1) * u64::from(by.multiplier)) >> 32) as u32 >> by.shift
    }

    #[test]
    fn fast_division_is_exact_below_two_to_the_31() {
        let edges = [0, 1, 2, 3, (1 << 31) - 1, (1 << 31) - 2, 1 << 30, (1 << 30) - 1];
        let divisors =
            (1..2000).chain((1..31).flat_map(|b| [(1_u32 << b) - 1, 1 << b, (1 << b) + 1])).chain([1 << 31]);
        for d in divisors.filter(|d| *d > 0) {
            let by = FastDiv::new(d);
            let around = (1..40_u32).flat_map(|k| {
                let m = (u64::from(d) * u64::from(k * 7919)) as u32 & 0x7FFF_FFFF;
                [m.saturating_sub(1), m, m + u32::from(m < 0x7FFF_FFFF)]
            });
            for n in edges.into_iter().chain(around) {
                assert_eq!(divide(by, n), n / d, "{n} / {d}");
            }
        }
    }
}
