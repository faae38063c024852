//! The memory of counters: a mapping of zeros, or of a file.
//!
//! This is the only file with unsafe code. It hands out atomics only. Every bit pattern is a valid atomic, so neither
//! the contents of a file nor concurrent writes of other processes matter. This module opens no files and does not
//! interpret the bits.
//!
//! If a mapped file is truncated, the next access beyond its end kills the process (SIGBUS). The caller must make sure
//! that no other process can truncate it.

#![allow(unsafe_code, reason = "a mapping of memory that outlives the process needs it")]

use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::atomics::{AtomicU64, AtomicU128};

/// Two adjacent cache lines, which are fetched together.
pub const LINE_BYTES: usize = 128;
/// The alignment of a mapping.
pub const PAGE_BYTES: usize = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A block of memory, shared by everything that is laid out in it.
pub struct Memory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the block is accessed through atomics only, and freed when the last reference is dropped.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps a block of zeros; `None` if there is too little memory. Pages are huge where the kernel has such: a lookup in a
    /// large table then waits for memory once, and not also for the address of the page.
    pub fn zeroed(bytes: usize) -> Option<Arc<Memory>> {
        let (bytes, access) = (bytes.max(LINE_BYTES), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses an unused address.
        let base = unsafe { mmap_anonymous(null_mut(), bytes, access, MapFlags::PRIVATE) }.ok()?;
        let memory = Arc::new(Memory { base: NonNull::new(base.cast())?, bytes });
        if bytes >= HUGE_PAGE_BYTES {
            // SAFETY: the block is mapped, and the advice changes no byte of it. A kernel that does not know it ignores it.
            let _ = unsafe { madvise(base, bytes, Advice::LinuxHugepage) };
        }
        Some(memory)
    }

    /// Maps the first `bytes` of a file, shared with other processes that map it. The file must be that long.
    ///
    /// # Errors
    ///
    /// The error of `mmap`.
    pub fn mapped(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Arc<Memory>> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses an unused address.
        let base = unsafe { mmap(null_mut(), bytes, access, flags, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Memory { base, bytes }))
    }

    /// The size of the block.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `count` words from byte `at` on, which is a multiple of 16; `None` if they are out of bounds.
    pub fn words(self: &Arc<Self>, at: usize, count: usize) -> Option<AtomicSlice<AtomicU128>> {
        self.slice(at, count)
    }

    /// `count` numbers from byte `at` on, which is a multiple of 8; `None` if they are out of bounds.
    pub fn numbers(self: &Arc<Self>, at: usize, count: usize) -> Option<AtomicSlice<AtomicU64>> {
        self.slice(at, count)
    }

    /// To be called with atomics as `T` only.
    fn slice<T>(self: &Arc<Self>, at: usize, count: usize) -> Option<AtomicSlice<T>> {
        let end = count.checked_mul(size_of::<T>())?.checked_add(at)?;
        if end > self.bytes || !at.is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: `at` is within the block.
        let first = unsafe { self.base.add(at) }.cast();
        Some(AtomicSlice { first, count, _memory: Arc::clone(self), _of: PhantomData })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the block was mapped with this length, and there are no references to it any more. With valid arguments
        // `munmap` does not fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A slice of atomics in a block of memory.
pub struct AtomicSlice<T> {
    first: NonNull<T>,
    count: usize,
    _memory: Arc<Memory>,
    _of: PhantomData<[T]>,
}

impl<T> AtomicSlice<T> {
    /// Starts to bring the cache line of the element at `index` into the cache, and does not wait for it. No effect on
    /// processors other than x86-64, nor if the index is out of bounds.
    // An instruction of its own: the clock is read after all ordinary reads are complete, which would include this one.
    #[inline(always)]
    pub fn prefetch(&self, index: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let element = self.first.as_ptr().wrapping_add(index);
            // SAFETY: every x86-64 processor has the instruction. It is a hint: it changes no memory, and never fails, at whatever
            // address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(element.cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = index;
    }
}

// SAFETY: the slice is part of a block that threads may share, and consists of atomics.
unsafe impl<T: Sync> Send for AtomicSlice<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for AtomicSlice<T> {}

impl<T> Deref for AtomicSlice<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `slice` has checked bounds and alignment; the block lives as long as this reference. Every bit
        // pattern is a valid atomic, and other processes change the memory atomically as well.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomics::Ordering;

    #[test]
    fn a_block_is_zeroed_and_its_bounds_are_checked() {
        let memory = Memory::zeroed(256).unwrap();
        assert!(memory.words(0, 16).unwrap().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        memory.numbers(8, 1).unwrap()[0].store(7, Ordering::Relaxed);
        assert_eq!(memory.words(0, 1).unwrap()[0].load(Ordering::Relaxed), 7 << 64);
        assert!(memory.words(0, 17).is_none() && memory.words(16, 16).is_none() && memory.words(8, 1).is_none());
        assert!(memory.words(0, usize::MAX).is_none() && memory.numbers(usize::MAX - 7, 1).is_none());
    }

    #[test]
    fn a_prefetch_at_any_index_changes_nothing() {
        let memory = Memory::zeroed(256).unwrap();
        let words = memory.words(0, 16).unwrap();
        words[15].store(7, Ordering::Relaxed);
        for index in [0, 15, 16, 1 << 40, usize::MAX] {
            words.prefetch(index);
            memory.words(0, 0).unwrap().prefetch(index);
        }
        let values: Vec<u128> = words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        assert_eq!(values, [vec![0; 15], vec![7]].concat());
    }
}
