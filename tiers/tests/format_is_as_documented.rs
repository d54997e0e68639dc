//! The bytes on disk do not change unnoticed: known values encode to the bytes of the fixtures, and
//! every offset in FORMAT.md's tables is where the field really is.
#![cfg(feature = "store")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking"
)]

use std::fmt::Write;

use kvtide_tiers::block::{
    BlockKey, Codec, Descriptor, ElementType, NamespaceId, Narrow, Place, Sum128,
};
use kvtide_tiers::codec;
use kvtide_tiers::segment::{SegmentHeader, StoreGeometry, Superblock};

const GEOMETRY: StoreGeometry =
    StoreGeometry { segment_bytes: 4 << 20, segments: 0x1112_1314, descriptor_pages: 0x51 };
const SALT: u128 = 0xa0a1_a2a3_a4a5_a6a7_a8a9_aaab_acad_aeaf;
const SEQUENCE: u64 = 0x0201_0203_0405_0607;

fn superblock() -> Superblock {
    Superblock {
        write: 0x0102_0304_0506_0708,
        uuid: std::array::from_fn(|at| 0x20 + at as u8),
        salt: SALT,
        geometry: GEOMETRY,
        epoch: 0x6162_6364,
        clean: true,
        created_s: 0x7172_7374_7576_7778,
        quarantined: vec![0x8182_8384, 0x9192_9394],
    }
}

fn header() -> SegmentHeader {
    SegmentHeader {
        segment: 0x3132_3334,
        sequence: SEQUENCE,
        created_s: 0x4142_4344_4546_4748,
        geometry: GEOMETRY,
    }
}

fn descriptor() -> (Descriptor, Place) {
    let place = Place::Segment { salt: SALT, segment: 0x3132_3334, sequence: SEQUENCE };
    let descriptor = Descriptor {
        codec: Codec::Lz4,
        narrow: None,
        namespace: NamespaceId(0x0b0b_0b01),
        generation: 0x0b0b_0b02,
        key: BlockKey(std::array::from_fn(|at| 0xc0 + at as u8)),
        parent: BlockKey(std::array::from_fn(|at| 0xe0 + at as u8)),
        position: 0x0b0b_0b03,
        tokens: 0x0b0b_0b04,
        raw_bytes: 0x0b0b_0b05,
        stored_bytes: 0x0b0b_0b06,
        raw_sum: Sum128([0x5a; 16]),
        stored_sum: Sum128([0x5b; 16]),
        sequence: 0x0c0c_0c0c_0c0c_0c01,
        segment: 0x3132_3334,
        segment_sequence: SEQUENCE,
        offset: 0x0b0b_0000,
        created_s: 0x0c0c_0c0c_0c0c_0c02,
        session: 0x0c0c_0c0c_0c0c_0c03,
    };
    (descriptor, place)
}

/// Lines of 16 bytes with their offsets; lines of zeros are left out.
fn dump(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (line, chunk) in bytes.chunks(16).enumerate() {
        if chunk.iter().any(|byte| *byte != 0) {
            write!(text, "{:04x}:", line * 16).unwrap();
            for byte in chunk {
                write!(text, " {byte:02x}").unwrap();
            }
            text.push('\n');
        }
    }
    text
}

fn compare(name: &str, bytes: &[u8]) {
    let path = format!("{}/tests/fixtures/{name}.hex", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("KVTIDE_WRITE_FIXTURES").is_some() {
        std::fs::write(&path, dump(bytes)).unwrap();
    }
    let fixture = std::fs::read_to_string(&path).unwrap();
    assert_eq!(dump(bytes), fixture, "{name}: a change of bytes on disk needs a new version");
}

#[test]
fn known_values_encode_to_the_fixtures() {
    let (descriptor, place) = descriptor();
    compare("superblock_v1", &superblock().encode());
    compare("segment_header_v1", &header().encode(SALT));
    compare("descriptor_v1", &descriptor.encode(place));
    let narrowed = Descriptor { codec: Codec::Raw, narrow: Some(Narrow::Fp8), ..descriptor };
    compare("descriptor_v2", &narrowed.encode(place));
    let raw: Vec<u8> = (0..128u8).flat_map(|at| [at.wrapping_mul(37), 0x3f]).collect();
    // Another release of the compressor may find other matches, so this one is decoded.
    let fixture = read("lz4_bf16_v1");
    let mut out = vec![0; raw.len()];
    codec::decode(Codec::Lz4, ElementType::Bf16, &fixture, &mut out).unwrap();
    assert_eq!(out, raw);
}

/// The bytes of a fixture without lines of zeros.
fn read(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/{name}.hex", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let bytes = text.lines().flat_map(|line| line.split_once(':').unwrap().1.split_whitespace());
    bytes.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

/// Offset and length of a field in the table under a heading of FORMAT.md.
fn documented(section: &str, field: &str) -> (usize, usize) {
    let path = format!("{}/../FORMAT.md", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let (_, rest) = text.split_once(&format!("\n## {section}\n")).unwrap();
    let section_text = rest.split("\n## ").next().unwrap();
    for line in section_text.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if cells.get(3) == Some(&field) {
            return (cells[1].parse().unwrap(), cells[2].parse().unwrap());
        }
    }
    panic!("FORMAT.md, {section}: no field {field}");
}

fn all_there(section: &str, bytes: &[u8], fields: &[(&str, &[u8])]) {
    for (field, value) in fields {
        let (offset, length) = documented(section, field);
        assert_eq!(value.len(), length, "{section}: {field}");
        assert_eq!(&bytes[offset..offset + length], *value, "{section}: {field}");
    }
}

#[test]
fn the_page_tables_of_format_md_are_true() {
    let one = superblock();
    let bytes = one.encode();
    all_there(
        "Superblock",
        &bytes,
        &[
            ("magic", b"KVTstore"),
            ("version", &1u32.to_le_bytes()),
            ("write", &one.write.to_le_bytes()),
            ("uuid", &one.uuid),
            ("salt", &SALT.to_le_bytes()),
            ("segment_bytes", &GEOMETRY.segment_bytes.to_le_bytes()),
            ("segments", &GEOMETRY.segments.to_le_bytes()),
            ("descriptor_pages", &GEOMETRY.descriptor_pages.to_le_bytes()),
            ("epoch", &one.epoch.to_le_bytes()),
            ("clean", &1u32.to_le_bytes()),
            ("quarantined_count", &2u32.to_le_bytes()),
            ("created_s", &one.created_s.to_le_bytes()),
            ("checksum", &bytes[4080..]),
        ],
    );
    let (list, _) = documented("Superblock", "quarantined");
    assert_eq!(bytes[list..list + 4], one.quarantined[0].to_le_bytes());
    let two = header();
    let bytes = two.encode(SALT);
    all_there(
        "Segment header",
        &bytes,
        &[
            ("magic", b"KVTsegmt"),
            ("version", &1u32.to_le_bytes()),
            ("salt", &SALT.to_le_bytes()),
            ("sequence", &two.sequence.to_le_bytes()),
            ("created_s", &two.created_s.to_le_bytes()),
            ("segment", &two.segment.to_le_bytes()),
            ("segment_bytes", &GEOMETRY.segment_bytes.to_le_bytes()),
            ("segments", &GEOMETRY.segments.to_le_bytes()),
            ("descriptor_pages", &GEOMETRY.descriptor_pages.to_le_bytes()),
            ("checksum", &bytes[4080..]),
        ],
    );
}

#[test]
fn the_descriptor_table_of_format_md_is_true() {
    let (three, place) = descriptor();
    let bytes = three.encode(place);
    all_there(
        "Descriptor",
        &bytes,
        &[
            ("magic", b"KVTd"),
            ("codec", &[1]),
            ("narrow", &[0]),
            ("namespace", &three.namespace.0.to_le_bytes()),
            ("generation", &three.generation.to_le_bytes()),
            ("key", &three.key.0),
            ("parent", &three.parent.0),
            ("position", &three.position.to_le_bytes()),
            ("tokens", &three.tokens.to_le_bytes()),
            ("raw_bytes", &three.raw_bytes.to_le_bytes()),
            ("stored_bytes", &three.stored_bytes.to_le_bytes()),
            ("raw_sum", &three.raw_sum.0),
            ("stored_sum", &three.stored_sum.0),
            ("sequence", &three.sequence.to_le_bytes()),
            ("segment_sequence", &three.segment_sequence.to_le_bytes()),
            ("segment", &three.segment.to_le_bytes()),
            ("offset", &three.offset.to_le_bytes()),
            ("created_s", &three.created_s.to_le_bytes()),
            ("session", &three.session.to_le_bytes()),
            ("checksum", &bytes[248..]),
        ],
    );
}
