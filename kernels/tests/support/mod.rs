//! Memory at chosen alignments with guards around it, and launches on the CPU.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::ffi::c_void;

use kvtide_kernels::abi::{Entry, as_bytes, as_bytes_mut};
use kvtide_kernels::cpu;

const GUARD_BYTES: usize = 64;
const GUARD: u8 = 0xa5;

/// Bytes that start at a multiple of 64 plus `skew`, with guards before and behind them.
pub(crate) struct Memory {
    words: Vec<u128>,
    start: usize,
    bytes: usize,
}

impl Memory {
    pub(crate) fn new(bytes: usize, skew: usize) -> Memory {
        let words = vec![0u128; (bytes + skew + 2 * GUARD_BYTES + 64).div_ceil(16)];
        let base = words.as_ptr() as usize;
        let start = (base + GUARD_BYTES).next_multiple_of(64) - base + skew;
        let mut memory = Memory { words, start, bytes };
        memory.all_mut().fill(GUARD);
        memory
    }

    pub(crate) fn of(content: &[u8], skew: usize) -> Memory {
        let mut memory = Memory::new(content.len(), skew);
        memory.bytes_mut().copy_from_slice(content);
        memory
    }

    pub(crate) fn table<E: Entry>(entries: &[E]) -> Memory {
        Memory::of(as_bytes(entries), 0)
    }

    /// The table that the memory holds now.
    pub(crate) fn entries<E: Entry + Default>(&self) -> Vec<E> {
        let mut entries = vec![E::default(); self.bytes / size_of::<E>()];
        as_bytes_mut(&mut entries).copy_from_slice(self.bytes());
        entries
    }

    fn all_mut(&mut self) -> &mut [u8] {
        let bytes = self.words.len() * 16;
        // SAFETY: the vector's memory as bytes, borrowed as long as the vector.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), bytes) }
    }

    fn all(&self) -> &[u8] {
        // SAFETY: the vector's memory as bytes, borrowed as long as the vector.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.words.len() * 16) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.all()[self.start..self.start + self.bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, end) = (self.start, self.start + self.bytes);
        &mut self.all_mut()[start..end]
    }

    /// Where it lies, for a kernel to read and write.
    pub(crate) fn address(&mut self) -> u64 {
        self.bytes_mut().as_mut_ptr() as u64
    }

    /// Panics if anything was written outside of the bytes.
    pub(crate) fn check_guards(&self) {
        let all = self.all();
        let behind = &all[self.start + self.bytes..];
        let clean = all[..self.start].iter().chain(behind).all(|byte| *byte == GUARD);
        assert!(clean, "something was written beside a buffer of {} bytes", self.bytes);
    }
}

/// A parameter of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Arg {
    Wide(u64),
    Word(u32),
    Float(f32),
}

/// How a launch is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) grid: [u32; 3],
    pub(crate) block: u32,
    /// Every thread by itself, or all of them folded into one.
    pub(crate) threads: bool,
}

impl Launch {
    pub(crate) fn of(x: u32, y: u32, block: u32) -> Launch {
        Launch { grid: [x, y, 1], block, threads: true }
    }

    pub(crate) fn folded(self) -> Launch {
        Launch { threads: false, ..self }
    }

    /// Runs a kernel. Addresses among the arguments, and those in the tables they lead to, must be
    /// of [`Memory`] that lives and has room for what the tables say; each test sees to it.
    pub(crate) fn run(self, name: &str, args: &[Arg]) {
        let sizes = cpu::parameters(name).unwrap();
        assert_eq!(sizes.len(), args.len(), "{name}");
        let mut values: Vec<u64> = Vec::new();
        for (arg, size) in args.iter().zip(sizes) {
            let (value, bytes) = match *arg {
                Arg::Wide(value) => (value, 8),
                Arg::Word(value) => (u64::from(value), 4),
                Arg::Float(value) => (u64::from(value.to_bits()), 4),
            };
            assert_eq!(*size, bytes, "{name}");
            values.push(value);
        }
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let block = [self.block, 1, 1];
        // SAFETY: as many pointers as parameters, each to a value of its size (little-endian, so
        // that the low half of a u64 is a u32); the addresses are the test's promise.
        let result = unsafe {
            if self.threads {
                cpu::launch_threads(name, self.grid, block, 0, pointers.as_mut_ptr())
            } else {
                cpu::launch(name, self.grid, block, 0, pointers.as_mut_ptr())
            }
        };
        assert_eq!(result, Ok(()));
    }
}

/// Some bytes without a pattern, always the same for a seed.
pub(crate) fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut all = Vec::with_capacity(bytes + 8);
    while all.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        all.extend_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    all.truncate(bytes);
    all
}
