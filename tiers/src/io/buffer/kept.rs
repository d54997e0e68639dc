//! How the host tier outlives its daemon: the arena's memory and its table are memfds, which the
//! service manager holds while one daemon ends and the next one starts.
//!
//! The table is one file: a head page, the slot size of each slab (u32, 0: not cut), padded to a
//! page, and the descriptors. Nothing in it is trusted: the head carries a checksum, each
//! descriptor one that is seeded by the head's salt and its slot, and payloads are compared with
//! their descriptors whenever they are handed out, as always. A table that another version wrote,
//! or for an arena of another size, is refused as a whole.
//!
//! A block that is given up while its slot is still read or filled is disowned: one byte of its
//! descriptor's magic is changed ([`Arena::disown`](super::Arena::disown)). Daemons from before
//! that mark refuse such a descriptor, too, as they do any with another magic, so the version is
//! the same.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, SealFlags};
use twox_hash::XxHash3_64;

use super::mapping::Mapping;
use crate::block::{DESCRIPTOR_BYTES, PAGE_BYTES, page_ceil};
use crate::catalog::SlotId;

const MAGIC: [u8; 8] = *b"KVTarena";
/// The version of the table that this code writes and reads.
const VERSION: u32 = 1;
/// Bytes of the head that say something; its checksum follows.
const HEAD_BYTES: usize = 32;

/// The files of an arena.
#[derive(Debug)]
pub struct ArenaFiles {
    /// The memory of the slots.
    pub memory: OwnedFd,
    /// The table that says what is in them.
    pub table: OwnedFd,
}

/// What an earlier daemon left in one slab.
#[derive(Debug)]
pub struct KeptSlab {
    /// Which.
    pub slab: u32,
    /// How it is cut.
    pub slot_bytes: u32,
    /// Slots with descriptors, which are still to be checked.
    pub slots: Vec<(SlotId, [u8; DESCRIPTOR_BYTES])>,
}

/// The table's head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    bytes: u64,
    slab_bytes: u32,
    salt: u64,
}

impl Head {
    /// The head of a new arena, whose size was checked.
    pub(super) fn new(bytes: u64, slab_bytes: u32) -> io::Result<Head> {
        let mut salt = [0; 8];
        getrandom::fill(&mut salt).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Head { bytes, slab_bytes, salt: u64::from_le_bytes(salt) })
    }

    pub(super) fn salt(&self) -> u64 {
        self.salt
    }

    pub(super) fn slab_bytes(&self) -> u32 {
        self.slab_bytes
    }

    pub(super) fn slabs(&self) -> u64 {
        self.bytes / u64::from(self.slab_bytes)
    }

    /// Whether a slab can be cut into slots of so many bytes.
    pub(super) fn is_slot_size(&self, slot_bytes: u32) -> bool {
        let whole = slot_bytes != 0 && u64::from(slot_bytes).is_multiple_of(PAGE_BYTES);
        whole && slot_bytes <= self.slab_bytes
    }

    fn descriptors_offset(&self) -> u64 {
        PAGE_BYTES + page_ceil(self.slabs() * 4)
    }

    /// A place for each page of the arena, dense within each slab.
    pub(super) fn descriptor_offset(&self, slab: u32, index: u32) -> u64 {
        let per_slab = u64::from(self.slab_bytes) / PAGE_BYTES;
        let at = u64::from(slab) * per_slab + u64::from(index);
        self.descriptors_offset() + at * DESCRIPTOR_BYTES as u64
    }

    pub(super) fn table_bytes(&self) -> u64 {
        self.descriptors_offset() + self.bytes / PAGE_BYTES * DESCRIPTOR_BYTES as u64
    }

    /// Magic (8), version (4), slab bytes (4), arena bytes (8), salt (8), and the XXH3-64 of these.
    pub(super) fn encode(&self) -> [u8; HEAD_BYTES + 8] {
        let mut out = [0; HEAD_BYTES + 8];
        let fields: [&[u8]; 5] = [
            &MAGIC,
            &VERSION.to_le_bytes(),
            &self.slab_bytes.to_le_bytes(),
            &self.bytes.to_le_bytes(),
            &self.salt.to_le_bytes(),
        ];
        let (head, sum) = out.split_at_mut(HEAD_BYTES);
        let mut rest = &mut *head;
        for field in fields {
            let (place, behind) = rest.split_at_mut(field.len());
            place.copy_from_slice(field);
            rest = behind;
        }
        sum.copy_from_slice(&XxHash3_64::oneshot(head).to_le_bytes());
        out
    }
}

impl ArenaFiles {
    /// Bytes of the arena, as the table says; `None` when it does not, or the memory is shorter.
    pub fn arena_bytes(&self) -> Option<u64> {
        let bytes = self.head().ok()?.bytes;
        let length = rustix::fs::fstat(&self.memory).ok()?.st_size;
        u64::try_from(length).is_ok_and(|length| bytes <= length).then_some(bytes)
    }

    /// Gives the memory back to the operating system, whoever else holds the file: it would
    /// otherwise stay taken for as long as any descriptor of it is open.
    ///
    /// # Errors
    /// The file is not a memfd, whose contents are nobody's business here, or cannot be emptied.
    pub fn release(&self) -> io::Result<()> {
        rustix::fs::fcntl_get_seals(&self.memory)?;
        let length = u64::try_from(rustix::fs::fstat(&self.memory)?.st_size).unwrap_or(0);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.memory, hole, 0, length)?)
    }

    fn head(&self) -> io::Result<Head> {
        let mut found = [0; HEAD_BYTES + 8];
        let read = rustix::io::pread(&self.table, &mut found, 0)?;
        let (head, sum) = found.split_at(HEAD_BYTES);
        let Some((magic, fields)) = head.split_first_chunk::<8>() else {
            return refused("it has no head".to_owned());
        };
        let whole = XxHash3_64::oneshot(head).to_le_bytes() == sum;
        if read != found.len() || *magic != MAGIC || !whole {
            return refused("its table has no head that is whole".to_owned());
        }
        let (words, _) = fields.as_chunks::<4>();
        let word = |at: usize| words.get(at).map_or(0, |bytes| u32::from_le_bytes(*bytes));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 1)) << 32;
        if word(0) != VERSION {
            let text = format!("its table has version {}; this program reads {VERSION}", word(0));
            return refused(text);
        }
        Ok(Head { slab_bytes: word(1), bytes: long(2), salt: long(4) })
    }

    /// Reads the head, and compares it with the arena that is wanted.
    pub(super) fn check(&self, bytes: u64, slab_bytes: u32) -> io::Result<Head> {
        for fd in [&self.memory, &self.table] {
            if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
                return refused("it is not a memfd that is sealed against shrinking".to_owned());
            }
        }
        let head = self.head()?;
        if (head.bytes, head.slab_bytes) != (bytes, slab_bytes) {
            let text = format!(
                "it has {} bytes in slabs of {}, and the configuration asks for {bytes} in slabs \
                 of {slab_bytes}",
                head.bytes, head.slab_bytes
            );
            return refused(text);
        }
        for (fd, least) in [(&self.memory, bytes), (&self.table, head.table_bytes())] {
            let length = rustix::fs::fstat(fd)?.st_size;
            if u64::try_from(length).is_ok_and(|length| length < least) {
                return refused(format!("one of its files has {length} bytes instead of {least}"));
            }
        }
        Ok(head)
    }
}

fn refused(why: String) -> io::Result<Head> {
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// The slot size of a slab; 0 for one that is not cut.
pub(super) fn read_binding(table: &Mapping, slab: u32) -> u32 {
    let mut bytes = [0; 4];
    table.copy_out(PAGE_BYTES + u64::from(slab) * 4, &mut bytes);
    u32::from_le_bytes(bytes)
}

pub(super) fn write_binding(table: &Mapping, slab: u32, slot_bytes: u32) {
    table.copy_in(PAGE_BYTES + u64::from(slab) * 4, &slot_bytes.to_le_bytes());
}
