//! Keeps the stacks of loom's threads for the next interleaving. loom maps a stack for each thread of each interleaving and
//! unmaps it afterwards, which takes more time than the interleaving.

use std::ffi::c_int;
use std::sync::Mutex;

use libc::{MAP_FAILED, MAP_STACK, SYS_mmap, SYS_munmap, c_void, off_t, size_t, syscall};

/// Bytes of a stack of loom, with its guard page.
const STACK_BYTES: size_t = 0x9000;
/// Addresses of the stacks that no thread uses, and of all.
static UNUSED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static ALL: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Replaces the function of the C library in this program.
///
/// # Safety
///
/// As of `mmap` of the C library.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    let is_stack = bytes == STACK_BYTES && flags & MAP_STACK != 0;
    let unused = if is_stack { UNUSED.lock().expect("no thread panicked").pop() } else { None };
    if let Some(stack) = unused {
        return stack as *mut c_void;
    }
    // SAFETY: the caller's.
    let mapped = unsafe { syscall(SYS_mmap, address, bytes, protection, flags, file, offset) as *mut c_void };
    if is_stack && mapped != MAP_FAILED {
        ALL.lock().expect("no thread panicked").push(mapped as usize);
    }
    mapped
}

/// Replaces the function of the C library in this program.
///
/// # Safety
///
/// As of `munmap` of the C library.
#[unsafe(no_mangle)]
unsafe extern "C" fn munmap(address: *mut c_void, bytes: size_t) -> c_int {
    if bytes == STACK_BYTES && ALL.lock().expect("no thread panicked").contains(&(address as usize)) {
        UNUSED.lock().expect("no thread panicked").push(address as usize);
        return 0;
    }
    // SAFETY: the caller's.
    unsafe { syscall(SYS_munmap, address, bytes) as c_int }
}
