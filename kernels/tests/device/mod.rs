//! The launchers against the twins, on whatever driver the context is of: a real GPU's or the fake.
//! Two test files include this one, so both run the same.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use kvtide_kernels::abi::{self, CastEntry, Entry, MoveEntry, NO_SUM, PlaneEntry, SumEntry};
use kvtide_kernels::driver::{Context, DeviceBuffer, Stream};
use kvtide_kernels::launch::{Kernels, Pool, scratch_bytes};
use kvtide_kernels::twin::{self, Narrow, Shape, Wide};

/// What every check needs.
struct Device {
    context: Context,
    stream: Stream,
    kernels: Kernels,
}

/// Device memory with some bytes, `skew` behind the start of its allocation.
struct Bytes {
    buffer: DeviceBuffer,
    skew: u64,
    bytes: usize,
}

impl Bytes {
    fn address(&self) -> u64 {
        self.buffer.address() + self.skew
    }
}

impl Device {
    fn put(&self, content: &[u8], skew: u64) -> Bytes {
        let buffer = DeviceBuffer::alloc(&self.context, content.len() as u64 + skew + 1).unwrap();
        let bytes = Bytes { buffer, skew, bytes: content.len() };
        // SAFETY: the allocation has room behind the skew; both live until the stream has passed.
        unsafe {
            self.stream
                .copy_to_device(bytes.address(), content.as_ptr(), content.len() as u64)
                .unwrap();
        }
        self.stream.synchronize().unwrap();
        bytes
    }

    fn table<E: Entry>(&self, entries: &[E]) -> Bytes {
        self.put(abi::as_bytes(entries), 0)
    }

    fn get(&self, bytes: &Bytes) -> Vec<u8> {
        let mut content = vec![0; bytes.bytes];
        // SAFETY: as many bytes are there; both live until the stream has passed.
        unsafe {
            self.stream
                .copy_to_host(content.as_mut_ptr(), bytes.address(), bytes.bytes as u64)
                .unwrap();
        }
        self.stream.synchronize().unwrap();
        content
    }

    fn sums(&self, table: &Bytes) -> Vec<SumEntry> {
        let mut entries = vec![SumEntry::default(); table.bytes / size_of::<SumEntry>()];
        abi::as_bytes_mut(&mut entries).copy_from_slice(&self.get(table));
        entries
    }
}

/// Bytes without a pattern, always the same for a seed.
fn noise(bytes: usize, seed: u64) -> Vec<u8> {
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

/// Runs every launcher and compares what it leaves with its twin, to the bit.
pub(crate) fn launchers_do_what_the_twins_say(context: &Context) {
    let device = Device {
        context: context.clone(),
        stream: Stream::new(context).unwrap(),
        kernels: Kernels::load(context).unwrap(),
    };
    for (name, mut planes, block_gap) in pools() {
        let payload_bytes = abi::lay_out(&mut planes).unwrap();
        assert!(payload_bytes >= abi::SUM_BYTES_MIN);
        for skew in [0, 4, 1] {
            move_and_sum(&device, name, &planes, block_gap, payload_bytes, skew);
        }
    }
    sum_lengths(&device);
    fills(&device);
    for wide in [Wide::Bf16, Wide::Fp16] {
        for narrow in [Narrow::Fp8, Narrow::Int8] {
            casts(&device, wide, narrow, 128);
            casts(&device, wide, narrow, 4);
        }
    }
}

/// Places in each pool; two of them are moved.
const PLACES: u32 = 4;

/// Name, planes, and bytes of the region.
fn pools() -> Vec<(&'static str, Vec<PlaneEntry>, u64)> {
    let plane = |offset, block_stride, row_stride, row_bytes, rows| PlaneEntry {
        offset,
        block_stride,
        row_stride,
        row_bytes,
        rows,
        ..Default::default()
    };
    let places = u64::from(PLACES);
    let grouped = (0..64u64).map(|at| plane(at * places * 32768, 32768, 32768, 32768, 1)).collect();
    let latent = vec![plane(0, 1_124_352, 1_124_352, 1_124_352, 1)];
    let tokens =
        (0..6u64).map(|at| plane(at * places * 64 * 512, 64 * 512, 512, 256, 64)).collect();
    let outermost = (0..16u64).map(|at| plane(at * 40_000, 16 * 40_000, 100, 100, 400)).collect();
    let odd = vec![plane(3, 1000, 37, 31, 11), plane(5000, 400, 1, 333, 1)];
    vec![
        ("grouped", grouped, 64 * places * 32768),
        ("latent", latent, places * 1_124_352),
        ("tokens", tokens, 6 * places * 64 * 512),
        ("outermost", outermost, places * 16 * 40_000),
        ("odd", odd, 5000 + places * 400),
    ]
}

/// Gathers two places, sums them, and scatters both to other places; one with the sum it has, one
/// with a sum that differs in a bit, which must leave its place alone.
fn move_and_sum(
    device: &Device,
    name: &str,
    planes: &[PlaneEntry],
    region_bytes: u64,
    payload_bytes: u64,
    skew: u64,
) {
    let content = noise(region_bytes as usize, 1);
    let region = device.put(&content, skew);
    let table = device.table(planes);
    let mut want: Vec<Vec<u8>> = vec![vec![0; payload_bytes as usize]; 2];
    twin::gather(&content, planes, 0, &mut want[0]).unwrap();
    twin::gather(&content, planes, 2, &mut want[1]).unwrap();
    let payloads =
        [device.put(&vec![0; want[0].len()], 0), device.put(&vec![0; want[1].len()], skew)];
    let entry = |at: usize, place, sum| MoveEntry { payload: payloads[at].address(), place, sum };
    let gathers = device.table(&[entry(0, 0, NO_SUM), entry(1, 2, NO_SUM)]);
    let scatters = device.table(&[entry(0, 3, 0), entry(1, 1, 1)]);
    let lanes = scratch_bytes(payload_bytes) / 8;
    let mut asked: Vec<SumEntry> = Vec::new();
    for (at, payload) in want.iter().enumerate() {
        asked.push(SumEntry {
            payload: payloads[at].address(),
            bytes: payload_bytes,
            expected: twin::sum(payload).unwrap(),
            compare: 1,
            lanes: at as u64 * lanes,
            ..Default::default()
        });
    }
    asked[1].expected[1] ^= 1 << 40;
    let sums = device.table(&asked);
    let scratch = device.put(&vec![0; lanes as usize * 16], 0);
    let pool = Pool {
        region: region.address(),
        planes: table.address(),
        plane_count: planes.len() as u32,
        payload_bytes,
    };
    // SAFETY: all tables name memory that lives until the stream has passed and has room for what
    // they say; only this stream uses it.
    unsafe {
        let (kernels, stream) = (&device.kernels, &device.stream);
        kernels.gather(stream, &pool, gathers.address(), 2).unwrap();
        kernels.sum(stream, sums.address(), 2, payload_bytes, scratch.address()).unwrap();
        kernels.scatter(stream, &pool, scatters.address(), 2, sums.address()).unwrap();
    }
    device.stream.synchronize().unwrap();
    for (payload, want) in payloads.iter().zip(&want) {
        assert!(device.get(payload) == *want, "{name}, skew {skew}: gathered");
    }
    let found = device.sums(&sums);
    let said: Vec<SumEntry> =
        asked.iter().zip(&want).map(|(asked, payload)| twin::sum_entry(*asked, payload)).collect();
    assert_eq!(found, said, "{name}, skew {skew}");
    assert_eq!([found[0].verdict, found[1].verdict], [1, 2]);
    let steps: Vec<u8> = want
        .iter()
        .flat_map(|payload| twin::sum_scratch(payload))
        .flat_map(u64::to_le_bytes)
        .collect();
    assert!(device.get(&scratch) == steps, "{name}, skew {skew}: each step of the sums");
    let mut after = content;
    twin::scatter(&mut after, planes, 3, &want[0]).unwrap();
    assert!(device.get(&region) == after, "{name}, skew {skew}: scattered");
}

fn sum_lengths(device: &Device) {
    let lengths = [0, 240, 241, 1023, 1024, 1025, 1088, 1089, 8192, 8193, 9217, 100_003, 3 << 20];
    let content = noise(3 << 20, 4);
    let payloads: Vec<Bytes> = lengths
        .iter()
        .enumerate()
        .map(|(at, bytes)| device.put(&content[..*bytes], [0, 8, 1][at % 3]))
        .collect();
    let mut entries = Vec::new();
    let mut lanes = 0;
    for payload in &payloads {
        let bytes = payload.bytes as u64;
        entries.push(SumEntry { payload: payload.address(), bytes, lanes, ..Default::default() });
        lanes += scratch_bytes(bytes) / 8;
    }
    let sums = device.table(&entries);
    let scratch = device.put(&vec![0; lanes as usize * 8], 0);
    let count = entries.len() as u32;
    // SAFETY: as in `move_and_sum`.
    unsafe {
        device
            .kernels
            .sum(&device.stream, sums.address(), count, 3 << 20, scratch.address())
            .unwrap();
    }
    for (found, bytes) in device.sums(&sums).iter().zip(lengths) {
        assert_eq!(found.found, twin::sum(&content[..bytes]).unwrap_or_default(), "{bytes} bytes");
    }
}

fn fills(device: &Device) {
    for (bytes, skew) in [(0, 0), (1, 0), (100_003, 0), (4099, 4), (33, 3), (5 << 20, 0)] {
        let target = device.put(&vec![9; bytes + 8], skew);
        // SAFETY: the target has more than these bytes, and only this stream uses it.
        unsafe {
            device
                .kernels
                .fill(&device.stream, target.address(), bytes as u64, 0x0403_0201)
                .unwrap();
        }
        let mut want = vec![9; bytes + 8];
        twin::fill(&mut want[..bytes], 0x0403_0201);
        assert!(device.get(&target) == want, "a fill of {bytes} bytes at {skew}");
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// All 65,536 elements by scales of all kinds, there and back, and their own scales.
fn casts(device: &Device, wide: Wide, narrow: Narrow, head_elements: usize) {
    let scales = [1.0, 0.37, -3.3, 1e-30, 1e30, 1e-44, 0.0, f32::NAN];
    let heads = scales.len();
    let shape = Shape { rows: 65_536 / heads / head_elements, heads, head_elements };
    let source: Vec<u16> = (0..=u16::MAX).collect();
    let elements: Vec<u8> = source.iter().flat_map(|word| word.to_le_bytes()).collect();
    let wides = device.put(&elements, 0);
    let narrows = device.put(&vec![0; source.len()], 0);
    let given = device.put(&floats(&scales), 0);
    let own = device.put(&floats(&vec![0.0; heads]), 0);
    let entry = |scales: &Bytes| CastEntry {
        wide_elements: wides.address(),
        narrow_elements: narrows.address(),
        scales: scales.address(),
        rows: shape.rows as u32,
        heads: heads as u32,
        head_elements: head_elements as u32,
        wide: if wide == Wide::Bf16 { abi::WIDE_BF16 } else { abi::WIDE_FP16 },
    };
    let (to_own, to_given) = (device.table(&[entry(&own)]), device.table(&[entry(&given)]));
    let count = source.len() as u64;
    let (kernels, stream) = (&device.kernels, &device.stream);
    // SAFETY: as in `move_and_sum`, for both tables.
    unsafe {
        kernels.scales(stream, narrow, to_own.address(), 1, count).unwrap();
        kernels.to_narrow(stream, narrow, to_given.address(), 1, count).unwrap();
    }
    let peaks = twin::peaks(&source, wide, shape).unwrap();
    assert_eq!(device.get(&own), floats(&twin::scales(&peaks, narrow)), "{wide:?} {narrow:?}");
    let mut want = vec![0; source.len()];
    twin::to_narrow(&source, wide, narrow, shape, &scales, &mut want).unwrap();
    assert!(device.get(&narrows) == want, "{wide:?} to {narrow:?}");
    // SAFETY: as above.
    unsafe { kernels.from_narrow(stream, narrow, to_given.address(), 1, count).unwrap() };
    let mut back = vec![0; source.len()];
    twin::from_narrow(&want, narrow, wide, shape, &scales, &mut back).unwrap();
    let back: Vec<u8> = back.iter().flat_map(|word| word.to_le_bytes()).collect();
    assert!(device.get(&wides) == back, "{narrow:?} to {wide:?}");
}
