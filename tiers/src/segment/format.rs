//! The pages that describe a store: superblocks and segment headers. FORMAT.md has the tables.
//!
//! Every page carries its own checksum, and a page is read only after the checksum held. Nothing
//! here does I/O, and no input makes it panic.

use serde::{Deserialize, Serialize};
use twox_hash::{XxHash3_64, XxHash3_128};

use super::{SEGMENT_BYTES_RANGE, SUPERBLOCK_AREA_BYTES, StoreGeometry};
use crate::block::{DESCRIPTOR_BYTES, PAGE_BYTES};

/// Bytes of a page, for arrays.
pub const PAGE: usize = PAGE_BYTES as usize;

/// The version of the store format that this code writes and reads.
pub const FORMAT_VERSION: u32 = 1;

/// Most segments that a store can keep out of use. One more, and the tier belongs offline.
pub const QUARANTINED_MAX: usize = 960;

/// What an erased descriptor's place holds. Zeros would do as well, but a long run of them looks
/// like the end of the descriptor area, and would hide the blocks behind it from recovery.
pub const ERASED_DESCRIPTOR: [u8; DESCRIPTOR_BYTES] = {
    let mut bytes = [0; DESCRIPTOR_BYTES];
    let (marker, _) = bytes.split_at_mut(4);
    marker.copy_from_slice(b"KVTx");
    bytes
};

/// Where the two superblocks lie, bytes from the start of the store. They are apart so that one
/// misdirected or torn transfer does not take both.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, SUPERBLOCK_AREA_BYTES / 2];

const SUPERBLOCK_MAGIC: [u8; 8] = *b"KVTstore";
const HEADER_MAGIC: [u8; 8] = *b"KVTsegmt";
const SUM_AT: usize = PAGE - 16;
const QUARANTINED_AT: usize = 128;

/// Why a page is not what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// All bytes are zero: nothing was ever written here.
    #[error("empty")]
    Empty,
    /// The first bytes are not those of such a page.
    #[error("not a page of a kvtide store")]
    Magic,
    /// The checksum does not match the page's bytes.
    #[error("the page's checksum does not match its bytes")]
    Checksum,
    /// Written by a newer version.
    #[error("store format {0}; this program reads up to {FORMAT_VERSION}")]
    Version(u32),
    /// A page of another store.
    #[error("the page belongs to another store")]
    Foreign,
    /// The checksum holds but a field is out of bounds.
    #[error("field `{0}` is out of bounds")]
    Field(&'static str),
}

/// What is known of a whole store. Two copies lie in the store; the one with the larger `write`
/// is in force.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Superblock {
    /// Number of this superblock's writing, from 1. Even ones go to copy A, odd ones to copy B.
    pub write: u64,
    /// Names the store.
    pub uuid: [u8; 16],
    /// Random; seeds the checksums of segment headers and descriptors.
    pub salt: u128,
    /// The shape of the store.
    pub geometry: StoreGeometry,
    /// Number of times the store was opened for writing.
    pub epoch: u32,
    /// Whether the last run ended by a clean stop.
    pub clean: bool,
    /// When the store was made, seconds since the Unix epoch.
    pub created_s: u64,
    /// Segments that are out of use for their errors, ascending, at most [`QUARANTINED_MAX`].
    pub quarantined: Vec<u32>,
}

impl Superblock {
    /// Offset in the store of the copy that this writing goes to.
    pub fn offset(&self) -> u64 {
        let [a, b] = SUPERBLOCK_OFFSETS;
        if self.write.is_multiple_of(2) { a } else { b }
    }

    /// The page. Quarantined segments beyond [`QUARANTINED_MAX`] are left out.
    pub fn encode(&self) -> [u8; PAGE] {
        let quarantined = self.quarantined.iter().take(QUARANTINED_MAX);
        let mut page = PageWriter::new(SUPERBLOCK_MAGIC);
        page.put(&self.write.to_le_bytes());
        page.put(&self.uuid);
        page.put(&self.salt.to_le_bytes());
        page.put_geometry(&self.geometry);
        page.put(&self.epoch.to_le_bytes());
        page.put(&u32::from(self.clean).to_le_bytes());
        page.put(&(quarantined.len() as u32).to_le_bytes());
        page.put(&self.created_s.to_le_bytes());
        page.at = QUARANTINED_AT;
        for segment in quarantined {
            page.put(&segment.to_le_bytes());
        }
        page.seal(0)
    }

    /// Reads a page.
    ///
    /// # Errors
    /// Anything but the bytes of [`Superblock::encode`], of this version.
    pub fn decode(bytes: &[u8; PAGE]) -> Result<Superblock, FormatError> {
        let mut page = PageReader::open(bytes, SUPERBLOCK_MAGIC)?;
        page.check(0)?;
        let mut superblock = Superblock {
            write: page.u64(),
            uuid: page.take(),
            salt: u128::from_le_bytes(page.take()),
            geometry: page.geometry()?,
            epoch: page.u32(),
            clean: page.u32() != 0,
            quarantined: Vec::new(),
            created_s: 0,
        };
        let count = page.u32() as usize;
        superblock.created_s = page.u64();
        if count > QUARANTINED_MAX {
            return Err(FormatError::Field("quarantined segments"));
        }
        page.at = QUARANTINED_AT;
        superblock.quarantined = (0..count).map(|_| page.u32()).collect();
        Ok(superblock)
    }
}

/// The first page of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SegmentHeader {
    /// Number of the segment.
    pub segment: u32,
    /// Names this life of the segment: open epoch << 32 | counter. Never the same twice in a store.
    pub sequence: u64,
    /// When this life began, seconds since the Unix epoch.
    pub created_s: u64,
    /// The shape of the store, so that `fsck` can find its way with both superblocks gone.
    pub geometry: StoreGeometry,
}

impl SegmentHeader {
    /// The open epoch in which this life of the segment began.
    pub fn epoch(&self) -> u32 {
        (self.sequence >> 32) as u32
    }

    /// The page, for the store with this salt.
    pub fn encode(&self, salt: u128) -> [u8; PAGE] {
        let mut page = PageWriter::new(HEADER_MAGIC);
        page.put(&salt.to_le_bytes());
        page.put(&self.sequence.to_le_bytes());
        page.put(&self.created_s.to_le_bytes());
        page.put(&self.segment.to_le_bytes());
        page.put_geometry(&self.geometry);
        page.seal(header_seed(salt, self.segment))
    }

    /// Reads a page of the store with this salt. The caller compares `segment` with the place where
    /// it found the page: a whole page at another place is a swapped segment.
    ///
    /// # Errors
    /// Anything but the bytes of [`SegmentHeader::encode`] for the same salt, of this version.
    pub fn decode(bytes: &[u8; PAGE], salt: u128) -> Result<SegmentHeader, FormatError> {
        let (header, found) = SegmentHeader::decode_any(bytes)?;
        if found == salt { Ok(header) } else { Err(FormatError::Foreign) }
    }

    /// Reads a page of whatever store, and that store's salt with it: for inspection only.
    ///
    /// # Errors
    /// Anything but the bytes of [`SegmentHeader::encode`], of this version.
    pub fn decode_any(bytes: &[u8; PAGE]) -> Result<(SegmentHeader, u128), FormatError> {
        let mut page = PageReader::open(bytes, HEADER_MAGIC)?;
        let salt = u128::from_le_bytes(page.take());
        let sequence = page.u64();
        let created_s = page.u64();
        let segment = page.u32();
        page.check(header_seed(salt, segment))?;
        let geometry = page.geometry()?;
        Ok((SegmentHeader { segment, sequence, created_s, geometry }, salt))
    }
}

/// Whether a shape read from outside is one that [`StoreGeometry`]'s arithmetic holds for.
pub fn geometry_is_sound(geometry: &StoreGeometry) -> bool {
    let payload_start = (1 + u64::from(geometry.descriptor_pages)) * PAGE_BYTES;
    SEGMENT_BYTES_RANGE.contains(&geometry.segment_bytes)
        && geometry.segment_bytes.is_multiple_of(1 << 20)
        && geometry.segments > 0
        && geometry.descriptor_pages > 0
        && payload_start < u64::from(geometry.segment_bytes)
}

fn header_seed(salt: u128, segment: u32) -> u64 {
    let mut bytes = [0; 20];
    let (left, right) = bytes.split_at_mut(16);
    left.copy_from_slice(&salt.to_le_bytes());
    right.copy_from_slice(&segment.to_le_bytes());
    XxHash3_64::oneshot(&bytes)
}

struct PageWriter {
    bytes: [u8; PAGE],
    at: usize,
}

impl PageWriter {
    fn new(magic: [u8; 8]) -> PageWriter {
        let mut page = PageWriter { bytes: [0; PAGE], at: 0 };
        page.put(&magic);
        page.put(&FORMAT_VERSION.to_le_bytes());
        page.at = 16;
        page
    }

    fn put(&mut self, bytes: &[u8]) {
        let end = self.at + bytes.len();
        let place = self.bytes.get_mut(self.at..end).expect("the fields fit in a page");
        place.copy_from_slice(bytes);
        self.at = end;
    }

    fn put_geometry(&mut self, geometry: &StoreGeometry) {
        for number in [geometry.segment_bytes, geometry.segments, geometry.descriptor_pages] {
            self.put(&number.to_le_bytes());
        }
    }

    fn seal(mut self, seed: u64) -> [u8; PAGE] {
        let (body, sum) = self.bytes.split_at_mut(SUM_AT);
        sum.copy_from_slice(&XxHash3_128::oneshot_with_seed(seed, body).to_le_bytes());
        self.bytes
    }
}

struct PageReader<'a> {
    bytes: &'a [u8; PAGE],
    version: u32,
    at: usize,
}

impl<'a> PageReader<'a> {
    fn open(bytes: &'a [u8; PAGE], magic: [u8; 8]) -> Result<PageReader<'a>, FormatError> {
        let mut page = PageReader { bytes, version: 0, at: 0 };
        if page.take() != magic {
            let empty = bytes.iter().all(|byte| *byte == 0);
            return Err(if empty { FormatError::Empty } else { FormatError::Magic });
        }
        page.version = page.u32();
        page.at = 16;
        Ok(page)
    }

    /// The place of the checksum and of the version is the same in all versions, so a newer page
    /// can be told from a damaged one.
    fn check(&self, seed: u64) -> Result<(), FormatError> {
        let (body, sum) = self.bytes.split_at(SUM_AT);
        if XxHash3_128::oneshot_with_seed(seed, body).to_le_bytes() != sum {
            return Err(FormatError::Checksum);
        }
        if self.version != FORMAT_VERSION {
            return Err(FormatError::Version(self.version));
        }
        Ok(())
    }

    fn geometry(&mut self) -> Result<StoreGeometry, FormatError> {
        let geometry = StoreGeometry {
            segment_bytes: self.u32(),
            segments: self.u32(),
            descriptor_pages: self.u32(),
        };
        if geometry_is_sound(&geometry) {
            Ok(geometry)
        } else {
            Err(FormatError::Field("geometry"))
        }
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let end = self.at + N;
        let bytes = self.bytes.get(self.at..end).expect("the fields fit in a page");
        self.at = end;
        bytes.try_into().expect("the slice has N bytes")
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: StoreGeometry =
        StoreGeometry { segment_bytes: 4 << 20, segments: 16, descriptor_pages: 4 };

    fn superblock() -> Superblock {
        Superblock {
            write: 7,
            uuid: [0xab; 16],
            salt: 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10,
            geometry: GEOMETRY,
            epoch: 3,
            clean: true,
            created_s: 1_700_000_000,
            quarantined: vec![2, 9],
        }
    }

    fn header() -> SegmentHeader {
        SegmentHeader {
            segment: 5,
            sequence: 3 << 32 | 17,
            created_s: 1_700_000_001,
            geometry: GEOMETRY,
        }
    }

    #[test]
    fn pages_round_trip_and_every_flipped_bit_is_refused() {
        let superblock_page = superblock().encode();
        let header_page = header().encode(9);
        assert_eq!(Superblock::decode(&superblock_page), Ok(superblock()));
        assert_eq!(SegmentHeader::decode(&header_page, 9), Ok(header()));
        for bit in (0..PAGE * 8).filter(|bit| *bit < 2048 || bit % 61 == 0 || *bit > 32_600) {
            let (mut one, mut two) = (superblock_page, header_page);
            one[bit / 8] ^= 1 << (bit % 8);
            two[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&one).is_err(), "superblock bit {bit}");
            assert!(SegmentHeader::decode(&two, 9).is_err(), "header bit {bit}");
        }
    }

    #[test]
    fn newer_foreign_and_empty_pages_have_names() {
        let mut page = superblock().encode();
        page[8] = 2;
        assert_eq!(Superblock::decode(&page), Err(FormatError::Checksum));
        let sum = XxHash3_128::oneshot(&page[..SUM_AT]).to_le_bytes();
        page[SUM_AT..].copy_from_slice(&sum);
        assert_eq!(Superblock::decode(&page), Err(FormatError::Version(2)));
        assert_eq!(Superblock::decode(&[0; PAGE]), Err(FormatError::Empty));
        assert_eq!(Superblock::decode(&[1; PAGE]), Err(FormatError::Magic));
        assert_eq!(SegmentHeader::decode(&header().encode(1), 2), Err(FormatError::Foreign));
    }

    #[test]
    fn superblocks_alternate() {
        let mut one = superblock();
        let first = one.offset();
        one.write += 1;
        assert_ne!(first, one.offset());
        assert_eq!(one.offset(), 0);
    }
}
