//! Where counters lie: a block of memory that starts as zeros, on the heap or mapped from a file.
//!
//! The only file with unsafe code. What is handed out are atomics and nothing else, for which any
//! bits are a value, so it does not matter what a file held before, nor that other processes write to
//! it at the same time. Nothing here knows what the bits mean, and no file is opened.
//!
//! A file that is made shorter while it is mapped ends the process (SIGBUS) at the next access behind
//! its end; whoever opens it has to see to it that nobody else can.

#![allow(unsafe_code, reason = "memory that outlives the process can be had in no other way")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::atomics::{AtomicU64, AtomicU128};

/// Two neighbouring cache lines, which are fetched together.
pub const LINE_BYTES: usize = 128;
/// What a mapping starts at a multiple of.
pub const PAGE_BYTES: usize = 4096;

/// A block of memory, shared by all that is laid out in it.
pub struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    kind: Kind,
}

enum Kind {
    Heap(Layout),
    Mapped,
}

// SAFETY: the block is only ever accessed through atomics, and freed when nobody holds it any more.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// A block of the process's own; `None` if there is no room for it.
    pub fn heap(bytes: usize) -> Option<Arc<Memory>> {
        let layout = Layout::from_size_align(bytes.max(LINE_BYTES), PAGE_BYTES).ok()?;
        // SAFETY: the size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Arc::new(Memory { base, bytes: layout.size(), kind: Kind::Heap(layout) }))
    }

    /// The first `bytes` of a file, shared with whoever maps it as well. The file must be that long.
    pub fn mapped(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Arc<Memory>> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses an address at which nothing else lies.
        let base = unsafe { mmap(null_mut(), bytes, access, flags, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Memory { base, bytes, kind: Kind::Mapped }))
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `count` words, from byte `at` on, which is a multiple of 16; `None` if they are not all within.
    pub fn words(self: &Arc<Self>, at: usize, count: usize) -> Option<AtomicSlice<AtomicU128>> {
        self.slice(at, count)
    }

    /// `count` numbers, from byte `at` on, which is a multiple of 8; `None` if they are not all within.
    pub fn numbers(self: &Arc<Self>, at: usize, count: usize) -> Option<AtomicSlice<AtomicU64>> {
        self.slice(at, count)
    }

    /// Of atomics only: see above.
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
        match self.kind {
            // SAFETY: it was allocated with this layout, and nobody holds a part of it.
            Kind::Heap(layout) => unsafe { dealloc(self.base.as_ptr(), layout) },
            // SAFETY: it was mapped with this length, and nobody holds a part of it. There is nobody to
            // tell of a failure, and none that could happen.
            Kind::Mapped => drop(unsafe { munmap(self.base.as_ptr().cast(), self.bytes) }),
        }
    }
}

/// Some atomics in a block of memory.
pub struct AtomicSlice<T> {
    first: NonNull<T>,
    count: usize,
    _memory: Arc<Memory>,
    _of: PhantomData<[T]>,
}

// SAFETY: it is a part of a block, which is shared by threads, and of atomics.
unsafe impl<T: Sync> Send for AtomicSlice<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for AtomicSlice<T> {}

impl<T> Deref for AtomicSlice<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `cells` has checked that they lie within the block, and on what boundary; the block
        // lives as long as this. All bits are a value of an atomic, and the rest of the world changes them
        // atomically as well.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomics::Ordering;

    #[test]
    fn a_block_is_zeros_and_ends_where_it_ends() {
        let memory = Memory::heap(256).unwrap();
        assert!(memory.words(0, 16).unwrap().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        memory.numbers(8, 1).unwrap()[0].store(7, Ordering::Relaxed);
        assert_eq!(memory.words(0, 1).unwrap()[0].load(Ordering::Relaxed), 7 << 64);
        assert!(memory.words(0, 17).is_none() && memory.words(16, 16).is_none() && memory.words(8, 1).is_none());
        assert!(memory.words(0, usize::MAX).is_none() && memory.numbers(usize::MAX - 7, 1).is_none());
    }
}
