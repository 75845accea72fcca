//! What `vllm_hotpath.overlap` calls: fork to a device's auxiliary stream and join it, two driver calls each.

use pyo3::prelude::*;

use crate::cuda::event::{SLOTS, Side};
use crate::cuda::launch::Stream;
use crate::error::Result;

/// A device's auxiliary stream. Slots are checked in Python.
#[pyclass(frozen, module = "vllm_hotpath._core")]
pub struct SideStream {
    side: &'static Side,
}

#[pymethods]
impl SideStream {
    #[classattr]
    const SLOTS: usize = SLOTS;

    #[new]
    fn new(device_index: i32) -> Result<Self> {
        Ok(Self { side: Side::of(device_index)? })
    }

    /// The driver's handle.
    #[getter]
    fn handle(&self) -> usize {
        self.side.stream().0 as usize
    }

    /// Forks of all threads that wait for their join.
    #[getter]
    fn open(&self) -> usize {
        self.side.open()
    }

    #[pyo3(signature = (main, slot, again, /))]
    fn fork(&self, main: usize, slot: usize, again: bool) -> Result<bool> {
        self.side.fork(stream(main), slot, again)
    }

    #[pyo3(signature = (slot, /))]
    fn mark(&self, slot: usize) -> Result<()> {
        self.side.mark(slot)
    }

    #[pyo3(signature = (main, slot, /))]
    fn join(&self, main: usize, slot: usize) -> Result<()> {
        self.side.join(stream(main), slot)
    }

    fn close(&self) {
        self.side.close();
    }
}

fn stream(handle: usize) -> Stream {
    Stream(handle as *mut std::ffi::c_void)
}
