//! The fixed-size record that describes a stored block. The same 256 bytes describe it in host RAM
//! and on NVMe, and the code here checks both. FORMAT.md has the table of offsets.

use serde::{Deserialize, Serialize};
use twox_hash::{XxHash3_64, XxHash3_128};

use super::{BlockKey, NamespaceId, Narrow};

/// Bytes of an encoded descriptor.
pub const DESCRIPTOR_BYTES: usize = 256;

/// The newest version of the encoding that this code writes and reads. Blocks that are as the
/// engine had them are written in version 1, which has no narrow form.
pub const DESCRIPTOR_VERSION: u8 = 2;

/// Bytes of the magic. In host RAM it is written last: until then a disowned block stays so.
pub(crate) const MAGIC_BYTES: usize = 4;
const MAGIC: [u8; MAGIC_BYTES] = *b"KVTd";
/// In the place of the magic once the block was disowned, also where the rest is still to be
/// written. It differs in one byte, so that in a whole descriptor it is there or is not, whenever
/// the daemon ends.
pub(crate) const DISOWNED: [u8; MAGIC_BYTES] = *b"KVTo";
const SUM_AT: usize = DESCRIPTOR_BYTES - 8;

/// An XXH3-128 checksum, little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
pub struct Sum128(pub [u8; 16]);

impl Sum128 {
    /// The checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Sum128 {
        Sum128(XxHash3_128::oneshot(bytes).to_le_bytes())
    }
}

/// How the stored bytes relate to the block's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[repr(u8)]
pub enum Codec {
    /// The bytes themselves.
    #[default]
    Raw = 0,
    /// LZ4 on the exponent plane of 16-bit elements, the other plane as it is.
    Lz4 = 1,
}

/// Where a descriptor lies. It seeds the descriptor's checksum, so that a descriptor of an earlier
/// life of a segment, of another store, or on a misdirected page is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In the table beside the host arena.
    Host {
        /// Salt of the arena.
        salt: u64,
        /// The slot it describes.
        slot: u32,
    },
    /// In a segment's descriptor area.
    Segment {
        /// Salt of the store.
        salt: u128,
        /// Number of the segment.
        segment: u32,
        /// The segment's sequence at the time of writing.
        sequence: u64,
    },
}

impl Place {
    fn seed(self) -> u64 {
        match self {
            Place::Host { salt, slot } => {
                let mut bytes = [0; 13];
                bytes[0] = 1;
                bytes[1..9].copy_from_slice(&salt.to_le_bytes());
                bytes[9..].copy_from_slice(&slot.to_le_bytes());
                XxHash3_64::oneshot(&bytes)
            }
            Place::Segment { salt, segment, sequence } => {
                let mut bytes = [0; 29];
                bytes[0] = 2;
                bytes[1..17].copy_from_slice(&salt.to_le_bytes());
                bytes[17..21].copy_from_slice(&segment.to_le_bytes());
                bytes[21..].copy_from_slice(&sequence.to_le_bytes());
                XxHash3_64::oneshot(&bytes)
            }
        }
    }
}

/// What is known of one stored block.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Descriptor {
    /// How the payload is encoded.
    pub codec: Codec,
    /// What each element was narrowed to on its way out of the engine's memory; `None`: the block
    /// is as the engine had it. All lengths and checksums are those of the narrow form.
    pub narrow: Option<Narrow>,
    /// Number of the namespace in the store's table.
    pub namespace: NamespaceId,
    /// The namespace's generation when the block was stored; an older one is dead.
    pub generation: u32,
    /// The block's key.
    pub key: BlockKey,
    /// Key of the block before it, [`BlockKey::ROOT`] for the first one.
    pub parent: BlockKey,
    /// Position in the chain, from 0.
    pub position: u32,
    /// Tokens in the block.
    pub tokens: u32,
    /// Bytes of the block itself.
    pub raw_bytes: u32,
    /// Bytes of the payload as stored.
    pub stored_bytes: u32,
    /// Checksum of the block itself.
    pub raw_sum: Sum128,
    /// Checksum of the stored bytes (equal to `raw_sum` for [`Codec::Raw`]).
    pub stored_sum: Sum128,
    /// Write sequence: larger is newer.
    pub sequence: u64,
    /// Number of the segment (0 in host RAM).
    pub segment: u32,
    /// The segment's sequence (0 in host RAM).
    pub segment_sequence: u64,
    /// Offset of the payload in its segment, bytes, a multiple of 4 KiB (0 in host RAM).
    pub offset: u32,
    /// When it was stored, seconds since the Unix epoch.
    pub created_s: u64,
    /// The session that stored it, as the client named it, 0 for none.
    pub session: u64,
}

/// Why 256 bytes are not a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// All bytes are zero: nothing was ever written here, or it was erased.
    #[error("empty")]
    Empty,
    /// Its block was given up while operations still read the slot, or while it was still filled.
    /// In host RAM only.
    #[error("the block was given up; only operations that had begun before go on")]
    Disowned,
    /// The first bytes are not those of a descriptor.
    #[error("not a descriptor")]
    Magic,
    /// The descriptor's own checksum does not match, for this place.
    #[error("the descriptor's checksum does not match its place and bytes")]
    Checksum,
    /// Written by a newer version.
    #[error("descriptor version {0}; this program reads up to {DESCRIPTOR_VERSION}")]
    Version(u8),
    /// A codec this program does not know.
    #[error("unknown codec {0}")]
    Codec(u8),
    /// A narrow form this program does not know.
    #[error("unknown narrow form {0}")]
    Narrow(u8),
}

impl Descriptor {
    /// The 256 bytes, sealed for `place`.
    pub fn encode(&self, place: Place) -> [u8; DESCRIPTOR_BYTES] {
        let mut out = [0; DESCRIPTOR_BYTES];
        let mut put = Put { out: &mut out, at: 0 };
        put.bytes(&MAGIC);
        let (version, narrow) = self.narrow.map_or((1, 0), |narrow| (2, narrow as u8));
        put.bytes(&[version, self.codec as u8, narrow, 0]);
        put.bytes(&self.namespace.0.to_le_bytes());
        put.bytes(&self.generation.to_le_bytes());
        put.bytes(&self.key.0);
        put.bytes(&self.parent.0);
        put.bytes(&self.position.to_le_bytes());
        put.bytes(&self.tokens.to_le_bytes());
        put.bytes(&self.raw_bytes.to_le_bytes());
        put.bytes(&self.stored_bytes.to_le_bytes());
        put.bytes(&self.raw_sum.0);
        put.bytes(&self.stored_sum.0);
        put.bytes(&self.sequence.to_le_bytes());
        put.bytes(&self.segment_sequence.to_le_bytes());
        put.bytes(&self.segment.to_le_bytes());
        put.bytes(&self.offset.to_le_bytes());
        put.bytes(&self.created_s.to_le_bytes());
        put.bytes(&self.session.to_le_bytes());
        let (body, sum) = out.split_at_mut(SUM_AT);
        sum.copy_from_slice(&XxHash3_64::oneshot_with_seed(place.seed(), body).to_le_bytes());
        out
    }

    /// Reads the 256 bytes found at `place`.
    ///
    /// # Errors
    /// Anything but the exact bytes that [`Descriptor::encode`] made for the same place.
    pub fn decode(
        bytes: &[u8; DESCRIPTOR_BYTES],
        place: Place,
    ) -> Result<Descriptor, DescriptorError> {
        let (body, sum) = bytes.split_at(SUM_AT);
        let mut get = Get { bytes: body, at: 0 };
        match (get.array(), place) {
            (MAGIC, _) => {}
            (DISOWNED, Place::Host { .. }) => return Err(DescriptorError::Disowned),
            _ if bytes.iter().all(|byte| *byte == 0) => return Err(DescriptorError::Empty),
            _ => return Err(DescriptorError::Magic),
        }
        if XxHash3_64::oneshot_with_seed(place.seed(), body).to_le_bytes() != sum {
            return Err(DescriptorError::Checksum);
        }
        let [version, codec, narrow, _] = get.array();
        if !(1..=DESCRIPTOR_VERSION).contains(&version) {
            return Err(DescriptorError::Version(version));
        }
        let codec = match codec {
            0 => Codec::Raw,
            1 => Codec::Lz4,
            other => return Err(DescriptorError::Codec(other)),
        };
        let narrow = match (version, narrow) {
            (1, _) => None,
            (_, 1) => Some(Narrow::Int8),
            (_, 2) => Some(Narrow::Fp8),
            (_, other) => return Err(DescriptorError::Narrow(other)),
        };
        Ok(Descriptor {
            codec,
            narrow,
            namespace: NamespaceId(get.u32()),
            generation: get.u32(),
            key: BlockKey(get.array()),
            parent: BlockKey(get.array()),
            position: get.u32(),
            tokens: get.u32(),
            raw_bytes: get.u32(),
            stored_bytes: get.u32(),
            raw_sum: Sum128(get.array()),
            stored_sum: Sum128(get.array()),
            sequence: get.u64(),
            segment_sequence: get.u64(),
            segment: get.u32(),
            offset: get.u32(),
            created_s: get.u64(),
            session: get.u64(),
        })
    }

    /// As [`Descriptor::decode`], for operations that were given the slot while its block was still
    /// owned: whether it was disowned since does not matter to them.
    ///
    /// # Errors
    /// As [`Descriptor::decode`], but for [`DescriptorError::Disowned`].
    pub fn decode_in_use(
        bytes: &[u8; DESCRIPTOR_BYTES],
        place: Place,
    ) -> Result<Descriptor, DescriptorError> {
        match Descriptor::decode(bytes, place) {
            Err(DescriptorError::Disowned) => {
                let mut owned = *bytes;
                owned[..MAGIC_BYTES].copy_from_slice(&MAGIC);
                Descriptor::decode(&owned, place)
            }
            other => other,
        }
    }
}

struct Put<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Put<'_> {
    fn bytes(&mut self, bytes: &[u8]) {
        let end = self.at + bytes.len();
        self.out
            .get_mut(self.at..end)
            .expect("descriptor fields fit in 248 bytes")
            .copy_from_slice(bytes);
        self.at = end;
    }
}

struct Get<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Get<'_> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let end = self.at + N;
        let bytes = self.bytes.get(self.at..end).expect("descriptor fields fit in 248 bytes");
        self.at = end;
        bytes.try_into().expect("the slice has N bytes")
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Descriptor {
        Descriptor {
            codec: Codec::Lz4,
            narrow: Some(Narrow::Fp8),
            namespace: NamespaceId(3),
            generation: 4,
            key: BlockKey([5; 32]),
            parent: BlockKey([6; 32]),
            position: 7,
            tokens: 16,
            raw_bytes: 4096,
            stored_bytes: 4000,
            raw_sum: Sum128([8; 16]),
            stored_sum: Sum128([9; 16]),
            sequence: 10,
            segment: 11,
            segment_sequence: 12,
            offset: 1 << 20,
            created_s: 14,
            session: 15,
        }
    }

    const PLACE: Place = Place::Segment { salt: 1, segment: 11, sequence: 12 };

    #[test]
    fn round_trip() {
        assert_eq!(Descriptor::decode(&sample().encode(PLACE), PLACE), Ok(sample()));
    }

    #[test]
    fn every_flipped_bit_is_refused() {
        let bytes = sample().encode(PLACE);
        for bit in 0..DESCRIPTOR_BYTES * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Descriptor::decode(&bad, PLACE).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_place_is_refused() {
        let bytes = sample().encode(PLACE);
        let others = [
            Place::Segment { salt: 2, segment: 11, sequence: 12 },
            Place::Segment { salt: 1, segment: 12, sequence: 12 },
            Place::Segment { salt: 1, segment: 11, sequence: 13 },
            Place::Host { salt: 1, slot: 11 },
        ];
        for place in others {
            assert_eq!(Descriptor::decode(&bytes, place), Err(DescriptorError::Checksum));
        }
    }

    #[test]
    fn erased_and_foreign_bytes_have_names() {
        assert_eq!(Descriptor::decode(&[0; 256], PLACE), Err(DescriptorError::Empty));
        assert_eq!(Descriptor::decode(&[1; 256], PLACE), Err(DescriptorError::Magic));
    }

    fn disowned(mut bytes: [u8; DESCRIPTOR_BYTES]) -> [u8; DESCRIPTOR_BYTES] {
        bytes[..MAGIC_BYTES].copy_from_slice(&DISOWNED);
        bytes
    }

    #[test]
    fn a_disowned_block_is_there_for_its_readers_and_for_nobody_else() {
        let here = Place::Host { salt: 1, slot: 2 };
        let bytes = disowned(sample().encode(here));
        assert_eq!(bytes[..4], *b"KVTo");
        assert_eq!(Descriptor::decode(&bytes, here), Err(DescriptorError::Disowned));
        assert_eq!(Descriptor::decode_in_use(&bytes, here), Ok(sample()));
        // A daemon from before the mark knows one magic, and nothing else begins a descriptor.
        assert_ne!(bytes[..4], MAGIC);
        assert_eq!(bytes[..3], MAGIC[..3], "one byte is there or is not");
        // While the slot is still filled there is nothing behind the mark.
        let filled = disowned([0; DESCRIPTOR_BYTES]);
        assert_eq!(Descriptor::decode(&filled, here), Err(DescriptorError::Disowned));
        assert_eq!(Descriptor::decode_in_use(&filled, here), Err(DescriptorError::Checksum));
        let there = Place::Host { salt: 1, slot: 3 };
        assert_eq!(Descriptor::decode_in_use(&bytes, there), Err(DescriptorError::Checksum));
        for bit in 0..DESCRIPTOR_BYTES * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            let found = Descriptor::decode_in_use(&bad, here);
            assert!(found.is_err(), "bit {bit}");
        }
        // Segments have no such mark.
        let bytes = disowned(sample().encode(PLACE));
        assert_eq!(Descriptor::decode(&bytes, PLACE), Err(DescriptorError::Magic));
        assert_eq!(Descriptor::decode_in_use(&bytes, PLACE), Err(DescriptorError::Magic));
    }

    /// The slot of a disowned block is voided, and later gets another block's descriptor, the magic
    /// last. Or it is disowned before it has a descriptor, and gets the rest of one later. Whatever
    /// the daemon's end leaves of these writes, from the front or from the back, the disowned block
    /// is not taken over, and the other one only once its descriptor is whole.
    #[test]
    fn no_torn_write_brings_a_disowned_block_back() {
        let here = Place::Host { salt: 1, slot: 2 };
        let next = Descriptor { key: BlockKey([16; 32]), ..sample() };
        let (empty, whole) = ([0; DESCRIPTOR_BYTES], next.encode(here));
        let early = disowned(empty);
        let disowned = disowned(sample().encode(here));
        let check = |torn: [u8; DESCRIPTOR_BYTES], cut: usize| {
            let found = Descriptor::decode(&torn, here);
            assert_eq!(found.is_ok(), torn == whole, "cut at {cut}: {found:?}");
            assert!(found.is_err() || found == Ok(next.clone()), "cut at {cut}: {found:?}");
        };
        let voided = [(disowned, empty), (early, empty), (empty, whole)];
        let filled = [(empty, early), (early, disowned)];
        // This leaves the voiding out, which no action does.
        let not_voided = [(disowned, whole)];
        for (from, to) in voided.into_iter().chain(filled).chain(not_voided) {
            for cut in MAGIC_BYTES..=DESCRIPTOR_BYTES {
                for (front, back) in [(from, to), (to, from)] {
                    let mut torn = from;
                    torn[MAGIC_BYTES..cut].copy_from_slice(&front[MAGIC_BYTES..cut]);
                    torn[cut..].copy_from_slice(&back[cut..]);
                    check(torn, cut);
                }
            }
            for cut in 0..=MAGIC_BYTES {
                for (front, back) in [(from, to), (to, from)] {
                    let mut torn = to;
                    torn[..cut].copy_from_slice(&front[..cut]);
                    torn[cut..MAGIC_BYTES].copy_from_slice(&back[cut..MAGIC_BYTES]);
                    check(torn, cut);
                }
            }
        }
    }
}
