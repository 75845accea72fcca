//! The thread pool of the CPU implementations. It survives fork: a child gets a pool of its own at its first use.

use std::num::NonZero;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread::available_parallelism;

use rayon::ThreadPool;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

static POOL: AtomicPtr<ThreadPool> = AtomicPtr::new(ptr::null_mut());

/// A fork copies the pool's memory without its threads; the child forgets it and never joins it.
extern "C" fn forget_pool() {
    POOL.store(ptr::null_mut(), Ordering::Release);
}

/// Called once, when the module is imported: before there is a pool, and where no other thread can be in between.
pub fn forget_pool_in_children() {
    // SAFETY: registers a function that lives as long as the process and does one atomic store.
    unsafe { libc::pthread_atfork(None, None, Some(forget_pool)) };
}

fn pool() -> Option<&'static ThreadPool> {
    // SAFETY: the pointer is null or a leaked pool.
    if let Some(pool) = unsafe { POOL.load(Ordering::Acquire).as_ref() } {
        return Some(pool);
    }
    // A process that may start no thread (a limit of its container) works on the calling one.
    // RAYON_NUM_THREADS may ask for fewer threads than there are processors, not for more.
    let processors = available_parallelism().map_or(1, NonZero::get);
    let asked = std::env::var("RAYON_NUM_THREADS").ok().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
    let threads = asked.map_or(processors, |n: usize| n.min(processors));
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
    let pool = builder.thread_name(|i| format!("hotpath-cpu-{i}")).build().ok()?;
    let made = Box::into_raw(Box::new(pool));
    match POOL.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: leaked above, and a pool is never freed once it is published.
        Ok(_) => Some(unsafe { &*made }),
        Err(other) => {
            // SAFETY: `made` was not published; `other` is a published pool.
            unsafe {
                drop(Box::from_raw(made));
                Some(&*other)
            }
        }
    }
}

/// Calls `body` on sub-ranges that together are `0..count`, in parallel where `count * bytes_each` is worth it.
pub fn for_ranges(count: u64, bytes_each: u64, body: impl Fn(Range<u64>) + Sync) {
    const WORTH_A_THREAD: u64 = 64 << 10;
    let chunk = (WORTH_A_THREAD / bytes_each.max(1)).max(1);
    if count <= chunk {
        return body(0..count);
    }
    let Some(pool) = pool() else { return body(0..count) };
    let chunks = count.div_ceil(chunk);
    pool.install(|| {
        (0..chunks).into_par_iter().for_each(|i| body(i * chunk..((i + 1) * chunk).min(count)));
    });
}
