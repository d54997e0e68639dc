//! Copies with non-temporal stores: what is written goes to memory without being read into the
//! caches first and without pushing anything out of them.
//!
//! A plain copy reads each line of its target before it overwrites it. For blocks that are larger
//! than a core's share of the caches, and that the copying core does not read again, that third of
//! the memory traffic is wasted (`bench/PROFILE.md` has the measurements).

/// Pieces shorter than this are copied plainly: they cost more in setting up than they save.
const PIECE_BYTES_MIN: usize = 1024;

/// Copies `from` to `to`, past the caches. For lengths that differ, only the shorter one is copied.
pub(crate) fn stream_copy(from: &[u8], to: &mut [u8]) {
    let len = from.len().min(to.len());
    // SAFETY: both ranges are as long as `len`, and an exclusive reference overlaps no other.
    unsafe { stream(from.as_ptr(), to.as_mut_ptr(), len) }
}

/// Copies `len` bytes, past the caches. When it returns, whoever is told of it by an ordinary
/// release sees the bytes.
///
/// # Safety
/// `from` must be readable and `to` writable for `len` bytes, and the ranges must not overlap.
/// Another process may write to `from` or read `to` at the same time, and sees any mix.
pub(crate) unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    let head = to.align_offset(lines::LINE_BYTES);
    if len < PIECE_BYTES_MIN || head > len {
        // SAFETY: the caller's word.
        return unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
    let whole = (len - head) / lines::LINE_BYTES * lines::LINE_BYTES;
    let tail = head + whole;
    // SAFETY: head, whole lines and tail together are the `len` bytes of the caller's word; the
    // lines start on a line's boundary of the target.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        lines::copy(from.add(head), to.add(head), whole);
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), len - tail);
    }
}

/// Asks for `len` bytes from `from` on to be brought into the nearest cache. Only a hint: any
/// address will do, and nothing is read that can be seen.
pub(crate) fn prefetch(from: *const u8, len: usize) {
    for at in (0..len).step_by(lines::LINE_BYTES) {
        lines::prefetch(from.wrapping_add(at));
    }
}

#[cfg(target_arch = "x86_64")]
mod lines {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };

    /// Bytes of a cache line.
    pub(super) const LINE_BYTES: usize = 64;

    /// How far ahead the source is asked for.
    const AHEAD_BYTES: usize = 512;

    /// Asks for one line.
    pub(super) fn prefetch(line: *const u8) {
        // SAFETY: SSE is part of x86-64, and a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }

    /// Copies whole lines with SSE2's non-temporal stores, which every x86-64 has, then orders them
    /// before all stores that follow (they are ordered with nothing else).
    ///
    /// # Safety
    /// As of [`super::stream`]; `to` lies on a line's boundary and `len` is whole lines.
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let mut at = 0;
        while at < len {
            // SAFETY: `at` and the 64 bytes behind it lie within `len`, by the caller's word; a
            // prefetch may name any address.
            unsafe {
                let (source, target) = (from.add(at).cast::<__m128i>(), to.add(at).cast());
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD_BYTES).cast());
                let parts = [0, 1, 2, 3].map(|part| _mm_loadu_si128(source.add(part)));
                for (part, bytes) in parts.into_iter().enumerate() {
                    _mm_stream_si128(<*mut __m128i>::add(target, part), bytes);
                }
            }
            at += LINE_BYTES;
        }
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() };
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod lines {
    /// Bytes of a cache line.
    pub(super) const LINE_BYTES: usize = 64;

    /// Stable Rust has no such hint here.
    pub(super) fn prefetch(_line: *const u8) {}

    /// Stable Rust has no non-temporal stores here.
    ///
    /// # Safety
    /// As of [`super::stream`].
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's word.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Every byte and no other, whatever the alignment.
        #[test]
        fn what_is_streamed_is_what_a_copy_makes(
            len in 0usize..9000, from_at in 0usize..70, to_at in 0usize..70, seed in any::<u8>(),
        ) {
            let byte = |at: usize| (at as u8).wrapping_mul(29) ^ (at >> 8) as u8 ^ seed;
            let source: Vec<u8> = (0..from_at + len).map(byte).collect();
            let mut target = vec![0xa5; to_at + len + 80];
            let mut wanted = target.clone();
            wanted[to_at..to_at + len].copy_from_slice(&source[from_at..]);
            // SAFETY: both vectors have so many bytes behind their starts.
            unsafe { stream(source[from_at..].as_ptr(), target[to_at..].as_mut_ptr(), len) };
            prop_assert_eq!(target, wanted);
        }
    }
}
