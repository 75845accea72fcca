//! The auxiliary stream of a device, made once a process, and the events that fork to it and join it.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{
    self, CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags, CUstreamCaptureStatus,
};

use super::launch::Stream;
use super::{DeviceGuard, DeviceState, MAX_DEVICES, RelaxedCapture, check, device};
use crate::error::Result;

const OP: &str = "overlap";

/// Event pairs of a device, one for each micro-batch that can be between its fork and its join.
pub const SLOTS: usize = 16;

/// Up to here a stream's handle names a default stream, of whichever context is current.
const LAST_DEFAULT_STREAM: usize = 2;

struct Pair {
    forked: CUevent,
    done: CUevent,
}

/// Who uses an auxiliary stream.
struct Use {
    /// The stream that forked last, and the capture that it was part of when it began to.
    main: Option<(CUstream, u64)>,
    /// The stream that forked last outside of captures.
    eager: Option<CUstream>,
    /// Forks without a join so far.
    open: usize,
}

/// The auxiliary stream of a device.
pub struct Side {
    device: &'static DeviceState,
    stream: CUstream,
    pairs: [Pair; SLOTS],
    handover: CUevent,
    state: Mutex<Use>,
}

// SAFETY: the driver's streams and events are handles that every thread may use; what changes is behind the mutex.
unsafe impl Send for Side {}
// SAFETY: as above.
unsafe impl Sync for Side {}

static SIDES: [AtomicPtr<Side>; MAX_DEVICES] = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_DEVICES];
static SIDES_LOCK: Mutex<()> = Mutex::new(());

impl Side {
    /// The auxiliary stream of device `index`, made at its first use, also while a stream captures.
    pub fn of(index: i32) -> Result<&'static Self> {
        let device = device(OP, index)?;
        let slot = &SIDES[device.info.index as usize];
        // SAFETY: the slot holds null or a leaked Side.
        if let Some(side) = unsafe { slot.load(Ordering::Acquire).as_ref() } {
            return Ok(side);
        }
        let _lock = SIDES_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as above.
        if let Some(side) = unsafe { slot.load(Ordering::Acquire).as_ref() } {
            return Ok(side);
        }
        let side: &'static Self = Box::leak(Box::new(Self::new(device)?));
        slot.store(ptr::from_ref(side).cast_mut(), Ordering::Release);
        Ok(side)
    }

    fn new(device: &'static DeviceState) -> Result<Self> {
        let _guard = DeviceGuard::enter(OP, device)?;
        let _relaxed = RelaxedCapture::enter(OP)?;
        let mut stream = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: valid out pointer; the device's context is current.
        check(OP, "cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        let mut pairs = [const { Pair { forked: ptr::null_mut(), done: ptr::null_mut() } }; SLOTS];
        for pair in &mut pairs {
            *pair = Pair { forked: new_event()?, done: new_event()? };
        }
        let state = Mutex::new(Use { main: None, eager: None, open: 0 });
        Ok(Self { device, stream, pairs, handover: new_event()?, state })
    }

    pub fn stream(&self) -> Stream {
        Stream(self.stream.cast())
    }

    /// Lets the auxiliary stream go on from where `main` is now. `again`: the slot has no join since its last fork.
    ///
    /// False, and nothing done, where the two streams must not meet: `main` is the auxiliary stream itself, or one of
    /// the two belongs to a capture that the other is not part of.
    pub fn fork(&self, main: Stream, slot: usize, again: bool) -> Result<bool> {
        let main = main.0.cast();
        let _guard = self.context_for(main)?;
        let mut state = self.state();
        let known = match state.main {
            Some((last, NO_CAPTURE)) => last == main,
            Some((last, id)) => last == main && capture(main)? == Some(id),
            None => false,
        };
        if !known {
            let Some(id) = self.meet(main, &state)? else { return Ok(false) };
            state.main = Some((main, id));
            if id == NO_CAPTURE {
                state.eager = Some(main);
            }
        }
        let forked = self.pairs[slot].forked;
        record(forked, main)?;
        wait(self.stream, forked)?;
        state.open += usize::from(!again);
        Ok(true)
    }

    /// Marks the end of a slot's work on the auxiliary stream.
    pub fn mark(&self, slot: usize) -> Result<()> {
        record(self.pairs[slot].done, self.stream)
    }

    /// Lets `main` wait for the mark of a slot.
    pub fn join(&self, main: Stream, slot: usize) -> Result<()> {
        let main = main.0.cast();
        self.close();
        let _guard = self.context_for(main)?;
        wait(main, self.pairs[slot].done)
    }

    /// Forks that wait for their join.
    pub fn open(&self) -> usize {
        self.state().open
    }

    /// One fork fewer that waits for its join.
    pub fn close(&self) {
        let mut state = self.state();
        state.open = state.open.saturating_sub(1);
    }

    /// The capture of a `main` that has not forked last, if it may fork. Outside of captures, the auxiliary stream then
    /// waits for the last such stream too: that may still read memory that was made on the auxiliary stream and freed.
    fn meet(&self, main: CUstream, state: &Use) -> Result<Option<u64>> {
        if main == self.stream {
            return Ok(None);
        }
        let (Some(mine), Some(side)) = (capture(main)?, capture(self.stream)?) else {
            return Ok(None);
        };
        if !may_meet(mine, side, state.open) {
            return Ok(None);
        }
        if let Some(last) = state.eager
            && mine == NO_CAPTURE
            && last != main
        {
            let _guard = self.context_for(last)?;
            if capture(last)? != Some(NO_CAPTURE) {
                return Ok(None);
            }
            record(self.handover, last)?;
            wait(self.stream, self.handover)?;
        }
        Ok(Some(mine))
    }

    fn state(&self) -> MutexGuard<'_, Use> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device's context, where the meaning of a stream's handle depends on it.
    fn context_for(&self, stream: CUstream) -> Result<Option<DeviceGuard>> {
        if stream as usize <= LAST_DEFAULT_STREAM {
            DeviceGuard::enter(OP, self.device).map(Some)
        } else {
            Ok(None)
        }
    }
}

/// A capture of that id, or of none, may meet the auxiliary stream in its capture, with that many forks open.
fn may_meet(mine: u64, side: u64, open: usize) -> bool {
    mine == side || (side == NO_CAPTURE && open == 0)
}

const NO_CAPTURE: u64 = 0;

/// The id of the capture that a stream is part of; `None` if it cannot be told, or has failed.
fn capture(stream: CUstream) -> Result<Option<u64>> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut id = NO_CAPTURE;
    // SAFETY: valid out pointers; those that are null are optional.
    let result = unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream,
            &raw mut status,
            &raw mut id,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    // The default stream, while a stream that synchronises with it captures.
    if result == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
        return Ok(None);
    }
    check(OP, "cuStreamGetCaptureInfo", result)?;
    Ok(match status {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Some(NO_CAPTURE),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Some(id),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED => None,
    })
}

fn new_event() -> Result<CUevent> {
    let mut event = ptr::null_mut();
    // SAFETY: valid out pointer; the caller has made a context current.
    let status = unsafe { sys::cuEventCreate(&raw mut event, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32) };
    check(OP, "cuEventCreate", status)?;
    Ok(event)
}

fn record(event: CUevent, stream: CUstream) -> Result<()> {
    // SAFETY: the event is never destroyed; the stream is one of torch's, or ours, of the same device.
    check(OP, "cuEventRecord", unsafe { sys::cuEventRecord(event, stream) })
}

fn wait(stream: CUstream, event: CUevent) -> Result<()> {
    // SAFETY: as in `record`.
    check(OP, "cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
}

#[cfg(test)]
mod tests {
    use super::{NO_CAPTURE, may_meet};

    #[test]
    fn captures_meet_only_what_is_theirs_or_idle() {
        for (mine, side, open, expected) in [
            (NO_CAPTURE, NO_CAPTURE, 0, true),
            (NO_CAPTURE, NO_CAPTURE, 2, true),
            (7, NO_CAPTURE, 0, true),
            (7, 7, 1, true),
            (7, NO_CAPTURE, 1, false),
            (NO_CAPTURE, 7, 0, false),
            (8, 7, 0, false),
        ] {
            assert_eq!(may_meet(mine, side, open), expected, "{mine} {side} {open}");
        }
    }
}
