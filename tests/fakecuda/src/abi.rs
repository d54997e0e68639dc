//! The arguments of the C interface, as types that are safe to use inside.
//!
//! Each has the layout of what stands in the driver's header, and is only ever made by a caller of
//! the C interface, whose promise (pointers are null or good for what the call reads and writes,
//! until it returns) makes their methods safe.

use std::ffi::{CStr, c_char, c_void};

use kvtide_kernels::driver::sys;

use crate::call::INVALID_VALUE;

/// A pointer that the call writes one `T` through.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes `value`; a null pointer is refused.
    pub(crate) fn put(self, value: T) -> Result<(), u32> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller of the C interface promises that the pointer is good for one `T`,
        // though not that it is aligned.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes `value` unless the pointer is null.
    pub(crate) fn put_if_wanted(self, value: T) {
        if !self.0.is_null() {
            self.put(value).unwrap_or_default();
        }
    }

    /// The same pointer, for calls whose argument has a type that another argument says.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Reads the `index`-th of an array of values.
    pub(crate) fn nth(self, index: usize) -> Result<T, u32>
    where
        T: Copy,
    {
        In(self.0.cast_const()).nth(index)
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl Out<c_char> {
    /// Writes `text` with its end into a buffer of `bytes`, cut to fit.
    pub(crate) fn put_text(self, text: &str, bytes: i32) -> Result<(), u32> {
        let room = usize::try_from(bytes).map_err(|_| INVALID_VALUE)?;
        if self.0.is_null() || room == 0 {
            return Err(INVALID_VALUE);
        }
        let text = text.as_bytes();
        let length = text.len().min(room - 1);
        // SAFETY: the caller promises a buffer of `bytes`, and `length` is less.
        unsafe {
            self.0.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), length);
            self.0.cast::<u8>().add(length).write(0);
        }
        Ok(())
    }
}

/// A pointer that the call reads one `T`, or an array of them, through.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> Result<T, u32> {
        self.nth(0)
    }

    pub(crate) fn nth(self, index: usize) -> Result<T, u32> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller of the C interface promises as many values as it says.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

/// A string with its end.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Result<String, u32> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller of the C interface promises a string with its end.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| INVALID_VALUE)
    }
}

/// The arguments of a launch: a pointer to each value.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Params(*mut *mut c_void);

impl Params {
    /// A copy of the value of each parameter, whose sizes are `bytes`.
    pub(crate) fn capture(self, bytes: &[usize]) -> Result<Vec<Box<[u64]>>, u32> {
        let values = bytes.iter().enumerate().map(|(index, &bytes)| {
            let from = In(self.0.cast_const()).nth(index)?;
            if from.is_null() {
                return Err(INVALID_VALUE);
            }
            // In words, so that a copy is aligned for every type.
            let mut value = vec![0_u64; bytes.div_ceil(8)].into_boxed_slice();
            // SAFETY: the caller promises a value of the parameter's size at each pointer, and the
            // copy has at least as many bytes.
            unsafe {
                value.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from.cast::<u8>(), bytes);
            }
            Ok(value)
        });
        values.collect()
    }
}

/// A name of memory or of an event for other processes.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// `CUmemLocation`, with numbers for its enumerations: a caller may pass any.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AllocationProp {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location: Location,
    win32: usize,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}

/// `CUmemcpyAttributes`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct CopyAttributes {
    pub(crate) access_order: u32,
    hints: [Location; 2],
    flags: u32,
}

// The layouts are those of the driver's header, from which cudarc's types are made.
const _: () = {
    assert!(size_of::<AllocationProp>() == size_of::<sys::CUmemAllocationProp>());
    assert!(
        std::mem::offset_of!(AllocationProp, location)
            == std::mem::offset_of!(sys::CUmemAllocationProp, location)
    );
    assert!(size_of::<AccessDesc>() == size_of::<sys::CUmemAccessDesc>());
    assert!(size_of::<CopyAttributes>() == size_of::<sys::CUmemcpyAttributes>());
    assert!(size_of::<IpcHandle>() == size_of::<sys::CUipcMemHandle>());
    assert!(size_of::<IpcHandle>() == size_of::<sys::CUipcEventHandle>());
};
