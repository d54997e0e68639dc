// The kernels of kvtide: blocks of a paged pool into contiguous payloads and back, XXH3-128 of
// payloads, and casts to and from the formats of one byte.
//
// One source, two compilers: NVRTC makes the PTX that is checked in (no toolkit header is needed),
// and an ordinary C++ compiler makes the functions that the tests and the fake driver run on the
// CPU (host_shim.h). So the source keeps to what both have, and to three rules:
//
// 1. No barriers, no shuffles, no shared memory: every thread can run to its end by itself.
// 2. Any grid and any block do the whole work: each loop strides by what was launched. The launcher
//    chooses sizes for speed only.
// 3. Floating point only through the intrinsics that round once (__fdiv_rn, __fmul_rn, __fadd_rn),
//    so that no compiler fuses two operations into one with another result.
//
// The tables are those of src/abi.rs; the host has checked them. Twins: src/twin.rs.

#ifdef KV_HOST_SHIM
#include "host_shim.h"
#else
#define UNROLL _Pragma("unroll")
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct PlaneEntry {
    u64 offset, block_stride, row_stride, row_bytes, payload_offset;
    u32 rows, reserved;
};

struct MoveEntry {
    u64 payload;
    u32 place, sum;
};

struct SumEntry {
    u64 payload, bytes, expected[2], found[2];
    u32 verdict, compare;
    u64 lanes;
};

struct CastEntry {
    u64 wide_elements, narrow_elements, scales;
    u32 rows, heads, head_elements, wide;
};

static_assert(sizeof(PlaneEntry) == 48, "as in src/abi.rs");
static_assert(sizeof(MoveEntry) == 16, "as in src/abi.rs");
static_assert(sizeof(SumEntry) == 64, "as in src/abi.rs");
static_assert(sizeof(CastEntry) == 40, "as in src/abi.rs");

#define UNIT_BYTES 16384u
#define NO_SUM 0xffffffffu
#define VERDICT_EQUAL 1u
#define VERDICT_DIFFERS 2u
#define WIDE_FP16 1u

// ------------------------------------------------------------------------------ gather and scatter

// Copies `count` elements that lie one behind the other, four loads of a thread in flight.
template <typename V>
__device__ void copy_run(u64 to, u64 from, u32 count) {
    const V* source = (const V*)from;
    V* target = (V*)to;
    u32 step = blockDim.x;
    u32 at = threadIdx.x;
#ifdef KV_PLANT_OVERRUN
    // For the proof that the sanitizer run would find it: one element too far.
    count += 1;
#endif
    for (; at + 3 * step < count; at += 4 * step) {
        V first = source[at];
        V second = source[at + step];
        V third = source[at + 2 * step];
        V fourth = source[at + 3 * step];
        target[at] = first;
        target[at + step] = second;
        target[at + 2 * step] = third;
        target[at + 3 * step] = fourth;
    }
    for (; at < count; at += step) {
        target[at] = source[at];
    }
}

// Where an element of a plane of spaced rows lies in the region.
template <typename V>
__device__ u64 row_address(u64 pool, u64 row_stride, u32 row_elements, u32 element) {
    u32 row = element / row_elements;
    return pool + row * row_stride + (element - row * row_elements) * (u64)sizeof(V);
}

// Copies `count` elements of a plane of spaced rows, from its element `start` on. `pool` is where
// the plane of this place starts; `payload` is where its element `start` lies in the payload.
template <typename V, bool GATHER>
__device__ void copy_rows(
    u64 payload, u64 pool, u64 row_stride, u32 row_elements, u32 start, u32 count
) {
    V* line = (V*)payload;
    u32 step = blockDim.x;
    u32 at = threadIdx.x;
    for (; at + 3 * step < count; at += 4 * step) {
        V values[4];
        V* places[4];
        UNROLL
        for (u32 k = 0; k < 4; k++) {
            u32 element = start + at + k * step;
            places[k] = (V*)row_address<V>(pool, row_stride, row_elements, element);
        }
        UNROLL
        for (u32 k = 0; k < 4; k++) {
            values[k] = GATHER ? *places[k] : line[at + k * step];
        }
        UNROLL
        for (u32 k = 0; k < 4; k++) {
            *(GATHER ? line + at + k * step : places[k]) = values[k];
        }
    }
    for (; at < count; at += step) {
        V* place = (V*)row_address<V>(pool, row_stride, row_elements, start + at);
        if (GATHER) {
            line[at] = *place;
        } else {
            *place = line[at];
        }
    }
}

// Copies `bytes` bytes of one plane of one place, from byte `start` of the plane on; `payload` is
// where that byte lies in the payload. The widest access that everything is aligned to is taken.
template <bool GATHER>
__device__ void copy_plane(u64 payload, u64 pool, const PlaneEntry& plane, u32 start, u32 bytes) {
    if (plane.rows == 1 || plane.row_stride == plane.row_bytes) {
        u64 place = pool + start;
        u64 to = GATHER ? payload : place;
        u64 from = GATHER ? place : payload;
        u64 alignment = to | from;
        u32 done = 0;
        if ((alignment & 15) == 0) {
            done = bytes & ~15u;
            copy_run<uint4>(to, from, done / 16);
        } else if ((alignment & 3) == 0) {
            done = bytes & ~3u;
            copy_run<u32>(to, from, done / 4);
        }
        if (done < bytes) {
            copy_run<u8>(to + done, from + done, bytes - done);
        }
        return;
    }
    u64 alignment = payload | pool | plane.row_stride | plane.row_bytes | start | bytes;
    u32 row_bytes = (u32)plane.row_bytes;
    if ((alignment & 15) == 0) {
        copy_rows<uint4, GATHER>(
            payload, pool, plane.row_stride, row_bytes / 16, start / 16, bytes / 16
        );
    } else if ((alignment & 3) == 0) {
        copy_rows<u32, GATHER>(
            payload, pool, plane.row_stride, row_bytes / 4, start / 4, bytes / 4
        );
    } else {
        copy_rows<u8, GATHER>(payload, pool, plane.row_stride, row_bytes, start, bytes);
    }
}

// The last plane that starts at or before byte `at` of a payload.
__device__ u32 plane_at(const PlaneEntry* planes, u32 plane_count, u64 at) {
    u32 low = 0;
    u32 high = plane_count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (planes[middle].payload_offset <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// A unit of work is UNIT_BYTES of one payload; the units of all moves are dealt out to the blocks
// of threads, and a block copies its unit plane by plane.
template <bool GATHER>
__device__ void move_blocks(
    u64 region,
    const PlaneEntry* planes,
    u32 plane_count,
    const MoveEntry* moves,
    u32 move_count,
    u64 payload_bytes,
    const SumEntry* sums
) {
    u64 units = (payload_bytes + UNIT_BYTES - 1) / UNIT_BYTES;
    for (u64 unit = blockIdx.x; unit < units * move_count; unit += gridDim.x) {
        MoveEntry move = moves[unit / units];
        if (!GATHER && move.sum != NO_SUM && sums[move.sum].verdict != VERDICT_EQUAL) {
            continue;
        }
        u64 at = unit % units * UNIT_BYTES;
        u64 end = at + UNIT_BYTES < payload_bytes ? at + UNIT_BYTES : payload_bytes;
        for (u32 p = plane_at(planes, plane_count, at); p < plane_count && at < end; p++) {
            PlaneEntry plane = planes[p];
            u64 plane_end = plane.payload_offset + plane.row_bytes * plane.rows;
            u32 bytes = (u32)((plane_end < end ? plane_end : end) - at);
            u64 pool = region + plane.offset + plane.block_stride * move.place;
            copy_plane<GATHER>(
                move.payload + at, pool, plane, (u32)(at - plane.payload_offset), bytes
            );
            at += bytes;
        }
    }
}

// Pool to payloads.
extern "C" __global__ void kvtide_gather(
    u64 region,
    const PlaneEntry* planes,
    u32 plane_count,
    const MoveEntry* moves,
    u32 move_count,
    u64 payload_bytes
) {
    move_blocks<true>(region, planes, plane_count, moves, move_count, payload_bytes, nullptr);
}

// Payloads to pool; a move whose sum was not found equal writes nothing.
extern "C" __global__ void kvtide_scatter(
    u64 region,
    const PlaneEntry* planes,
    u32 plane_count,
    const MoveEntry* moves,
    u32 move_count,
    u64 payload_bytes,
    const SumEntry* sums
) {
    move_blocks<false>(region, planes, plane_count, moves, move_count, payload_bytes, sums);
}

// `bytes` bytes become the pattern `value`, little-endian, from `address` on.
extern "C" __global__ void kvtide_fill(u64 address, u64 bytes, u32 value) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 step = (u64)gridDim.x * blockDim.x;
    u64 done = 0;
    if ((address & 15) == 0) {
        done = bytes & ~15ull;
        uint4 four = {value, value, value, value};
        for (u64 k = at; k < done / 16; k += step) {
            ((uint4*)address)[k] = four;
        }
    } else if ((address & 3) == 0) {
        done = bytes & ~3ull;
        for (u64 k = at; k < done / 4; k += step) {
            ((u32*)address)[k] = value;
        }
    }
    for (u64 k = done + at; k < bytes; k += step) {
        ((u8*)address)[k] = (u8)(value >> 8 * (k & 3));
    }
}

// ---------------------------------------------------------------------------------------- XXH3-128
//
// XXH3 of more than 240 bytes takes stripes of 64 bytes; 16 stripes are a block. Within a block the
// stripes only add to the eight accumulators, so all blocks are computed at once (stripes); what
// remains serial is one multiplication for each block and accumulator (fold). The scratch of a
// payload has eight words for each block, the last one included, and then the eight folded ones.

__device__ const u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull,
    0x1cad21f72c81017cull,
    0xdb979083e96dd4deull,
    0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull,
    0x2172ffcc7dd05a82ull,
    0x8e2443f7744608b8ull,
    0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull,
    0xa32e531b8b65d088ull,
    0x4ef90da297486471ull,
    0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull,
    0x1d4f0bc7c7bbdcf9ull,
    0x3159b4cd4be0518aull,
    0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull,
    0xeb6313faffa081c5ull,
    0x49daf0b751dd0d17ull,
    0x9e68d429265516d3ull,
    0xfca1477d58be162bull,
    0xce31d07ad1b8f88full,
    0x280416958f3acb45ull,
    0x7e404bbbcafbd7afull,
};

#define PRIME32_1 0x9e3779b1ull
#define PRIME64_1 0x9e3779b185ebca87ull
#define PRIME64_2 0xc2b2ae3d27d4eb4full
#define SUM_BYTES_MIN 241u
#define SUM_BLOCK_BYTES 1024u

__device__ const u64 SUM_START[8] = {
    0xc2b2ae3dull, 0x9e3779b185ebca87ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull,
    0x85ebca77c2b2ae63ull, 0x85ebca77ull, 0x27d4eb2f165667c5ull, 0x9e3779b1ull,
};

__device__ u64 load_word(u64 address) {
    if ((address & 7) == 0) {
        return *(const u64*)address;
    }
    u64 word = 0;
    UNROLL
    for (u32 k = 0; k < 8; k++) {
        word |= (u64)((const u8*)address)[k] << 8 * k;
    }
    return word;
}

// The word of the secret at any byte.
__device__ u64 secret_word(u32 byte) {
    u32 shift = byte % 8 * 8;
    u64 low = SECRET[byte / 8];
    return shift == 0 ? low : low >> shift | SECRET[byte / 8 + 1] << (64 - shift);
}

__device__ u64 keyed_product(u64 keyed) {
    return (keyed & 0xffffffffull) * (keyed >> 32);
}

// Adds what two neighbouring words of a stripe give to their two accumulators.
__device__ void add_pair(
    u64& even, u64& odd, u64 data_even, u64 data_odd, u64 key_even, u64 key_odd
) {
    even += data_odd + keyed_product(data_even ^ key_even);
    odd += data_even + keyed_product(data_odd ^ key_odd);
}

// One item of work is a pair of accumulators of one block, so four threads share a block and read
// its stripes side by side.
__device__ void sum_item(const SumEntry& entry, u64 item, u64* scratch) {
    u32 pair = (u32)(item & 3);
    u64 block = item >> 2;
    u64 last = entry.bytes - 1;
    u32 stripes = block < last / SUM_BLOCK_BYTES ? 16 : (u32)(last % SUM_BLOCK_BYTES) / 64;
    u64 from = entry.payload + block * SUM_BLOCK_BYTES + pair * 16;
    const u64* keys = SECRET + 2 * pair;
    u64 even = 0;
    u64 odd = 0;
    if (stripes == 16 && (from & 15) == 0) {
        const ulonglong2* words = (const ulonglong2*)from;
        UNROLL
        for (u32 half = 0; half < 16; half += 8) {
            ulonglong2 data[8];
            UNROLL
            for (u32 k = 0; k < 8; k++) {
                data[k] = words[(half + k) * 4];
            }
            UNROLL
            for (u32 k = 0; k < 8; k++) {
                u32 key = half + k;
                add_pair(even, odd, data[k].x, data[k].y, keys[key], keys[key + 1]);
            }
        }
    } else {
        for (u32 k = 0; k < stripes; k++) {
            u64 data_even = load_word(from + k * 64);
            u64 data_odd = load_word(from + k * 64 + 8);
            add_pair(even, odd, data_even, data_odd, keys[k], keys[k + 1]);
        }
    }
    u64* to = scratch + entry.lanes + block * 8 + pair * 2;
    to[0] = even;
    to[1] = odd;
}

// First launch: what each block of each payload adds to the accumulators. Payloads along y.
extern "C" __global__ void kvtide_sum_stripes(const SumEntry* sums, u32 count, u64* scratch) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u32 e = blockIdx.y; e < count; e += gridDim.y) {
        SumEntry entry = sums[e];
        if (entry.bytes < SUM_BYTES_MIN) {
            continue;
        }
        u64 items = ((entry.bytes - 1) / SUM_BLOCK_BYTES + 1) * 4;
        for (u64 item = at; item < items; item += step) {
            sum_item(entry, item, scratch);
        }
    }
}

__device__ u64 scrambled(u64 sum, u64 key) {
    return (sum ^ sum >> 47 ^ key) * PRIME32_1;
}

// Second launch: the serial chain, one thread for each payload and accumulator, with eight loads
// ahead of it.
extern "C" __global__ void kvtide_sum_fold(const SumEntry* sums, u32 count, u64* scratch) {
    u64 step = (u64)gridDim.x * blockDim.x;
    u64 chains = (u64)count * 8;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < chains; at += step) {
        const SumEntry* entry = sums + at / 8;
        if (entry->bytes < SUM_BYTES_MIN) {
            continue;
        }
        u32 lane = (u32)(at & 7);
        u64 blocks = (entry->bytes - 1) / SUM_BLOCK_BYTES;
        u64* words = scratch + entry->lanes + lane;
        u64 key = SECRET[16 + lane];
        u64 sum = SUM_START[lane];
        u64 block = 0;
        u64 next[8];
        UNROLL
        for (u64 k = 0; k < 8; k++) {
            next[k] = words[(k < blocks ? k : blocks) * 8];
        }
        for (; block + 8 <= blocks; block += 8) {
            u64 now[8];
            UNROLL
            for (u32 k = 0; k < 8; k++) {
                u64 ahead = block + 8 + k;
                now[k] = next[k];
                next[k] = words[(ahead < blocks ? ahead : blocks) * 8];
            }
            UNROLL
            for (u32 k = 0; k < 8; k++) {
                sum = scrambled(sum + now[k], key);
            }
        }
        for (; block < blocks; block++) {
            sum = scrambled(sum + words[block * 8], key);
        }
        words[(blocks + 1) * 8] = sum + words[blocks * 8];
    }
}

__device__ u64 merged(const u64* sums, u32 secret_byte, u64 start) {
    u64 all = start;
    UNROLL
    for (u32 k = 0; k < 8; k += 2) {
        u64 left = sums[k] ^ secret_word(secret_byte + 8 * k);
        u64 right = sums[k + 1] ^ secret_word(secret_byte + 8 * k + 8);
        all += left * right ^ __umul64hi(left, right);
    }
    all ^= all >> 37;
    all *= 0x165667919e3779f9ull;
    return all ^ all >> 32;
}

// Third launch: the stripe that ends the payload, the merge, and the verdict; one thread for each
// payload. A payload that is too short to be summed has the sum 0 and differs.
extern "C" __global__ void kvtide_sum_finish(SumEntry* sums, u32 count, const u64* scratch) {
    u32 step = gridDim.x * blockDim.x;
    for (u32 e = blockIdx.x * blockDim.x + threadIdx.x; e < count; e += step) {
        SumEntry* entry = sums + e;
        u64 bytes = entry->bytes;
        u64 low = 0;
        u64 high = 0;
        bool enough = bytes >= SUM_BYTES_MIN;
        if (enough) {
            const u64* folded = scratch + entry->lanes + ((bytes - 1) / SUM_BLOCK_BYTES + 1) * 8;
            u64 from = entry->payload + bytes - 64;
            u64 words[8];
            u64 all[8];
            UNROLL
            for (u32 k = 0; k < 8; k++) {
                words[k] = load_word(from + 8 * k);
                all[k] = folded[k];
            }
            UNROLL
            for (u32 k = 0; k < 8; k += 2) {
                u64 key_even = secret_word(121 + 8 * k);
                u64 key_odd = secret_word(129 + 8 * k);
                add_pair(all[k], all[k + 1], words[k], words[k + 1], key_even, key_odd);
            }
            low = merged(all, 11, bytes * PRIME64_1);
            high = merged(all, 117, ~(bytes * PRIME64_2));
        }
        entry->found[0] = low;
        entry->found[1] = high;
        if (entry->compare != 0) {
            bool equal = enough && low == entry->expected[0] && high == entry->expected[1];
            entry->verdict = equal ? VERDICT_EQUAL : VERDICT_DIFFERS;
        }
    }
}

// ------------------------------------------------------------------------------------------- casts

#define F32_INFINITY 0x7f800000u
#define WIDE_NAN 0x7fffu

__device__ float bf16_to_float(u16 element) {
    return __uint_as_float((u32)element << 16);
}

__device__ u16 float_to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > F32_INFINITY) {
        return WIDE_NAN;
    }
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ float fp16_to_float(u16 element) {
    u32 sign = (u32)(element & 0x8000) << 16;
    u32 exponent = element >> 10 & 31;
    u32 mantissa = element & 0x3ff;
    u32 bits;
    if (exponent == 0) {
        // 2^-24 for each step; exact.
        bits = __float_as_uint(__fmul_rn((float)mantissa, __uint_as_float(0x33800000)));
    } else if (exponent == 31) {
        bits = F32_INFINITY | mantissa << 13;
    } else {
        bits = (exponent + 112) << 23 | mantissa << 13;
    }
    return __uint_as_float(bits | sign);
}

__device__ u16 float_to_fp16(float value) {
    u32 bits = __float_as_uint(value);
    u32 sign = bits >> 16 & 0x8000;
    u32 magnitude = bits & 0x7fffffff;
    if (magnitude > F32_INFINITY) {
        return WIDE_NAN;
    }
    if (magnitude >= 0x47800000) {
        return (u16)(sign | 0x7c00);
    }
    if (magnitude < 0x38800000) {
        // Below 2^-14: adding 0.5 leaves steps of 2^-24 in the last bits, rounded to even.
        float steps = __fadd_rn(__uint_as_float(magnitude), 0.5f);
        return (u16)(sign | (__float_as_uint(steps) - 0x3f000000));
    }
    u32 rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (u16)(sign | ((rounded >> 13) - (112 << 10)));
}

__device__ float fp8_to_float(u8 element) {
    u32 sign = (u32)(element & 0x80) << 24;
    u32 magnitude = element & 0x7f;
    u32 bits;
    if (magnitude == 0x7f) {
        bits = 0x7fc00000;
    } else if (magnitude < 8) {
        // 2^-9 for each step; exact.
        bits = __float_as_uint(__fmul_rn((float)magnitude, __uint_as_float(0x3b000000)));
    } else {
        bits = (magnitude << 20) + (120 << 23);
    }
    return __uint_as_float(bits | sign);
}

__device__ u8 float_to_fp8(float value) {
    u32 bits = __float_as_uint(value);
    u32 sign = bits >> 24 & 0x80;
    u32 magnitude = bits & 0x7fffffff;
    if (magnitude > F32_INFINITY) {
        return 0x7f;
    }
    if (magnitude >= 0x43e00000) {
        return (u8)(sign | 0x7e);
    }
    if (magnitude < 0x3c800000) {
        // Below 2^-6: adding 2^14 leaves steps of 2^-9 in the last bits, rounded to even.
        float steps = __fadd_rn(__uint_as_float(magnitude), 16384.0f);
        return (u8)(sign | (__float_as_uint(steps) - 0x46800000));
    }
    u32 rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
    return (u8)(sign | ((rounded >> 20) - (120 << 3)));
}

__device__ float int8_to_float(u8 element) {
    return (float)(signed char)element;
}

__device__ u8 float_to_int8(float value) {
    if ((__float_as_uint(value) & 0x7fffffff) > F32_INFINITY) {
        return 0;
    }
    float clamped = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
    // 1.5 * 2^23 leaves whole steps in the last bits, rounded to even.
    return (u8)(__float_as_uint(__fadd_rn(clamped, 12582912.0f)) & 0xff);
}

template <bool FP16>
__device__ float wide_to_float(u16 element) {
    return FP16 ? fp16_to_float(element) : bf16_to_float(element);
}

template <bool FP16>
__device__ u16 float_to_wide(float value) {
    return FP16 ? float_to_fp16(value) : float_to_bf16(value);
}

template <bool FP8>
__device__ float narrow_to_float(u8 element) {
    return FP8 ? fp8_to_float(element) : int8_to_float(element);
}

template <bool FP8>
__device__ u8 float_to_narrow(float value) {
    return FP8 ? float_to_fp8(value) : float_to_int8(value);
}

__device__ bool is_nan(float value) {
    return (__float_as_uint(value) & 0x7fffffff) > F32_INFINITY;
}

template <bool FP16, bool FP8>
__device__ u8 narrowed(u16 element, float scale) {
    float value = wide_to_float<FP16>(element);
    bool zero = (__float_as_uint(scale) & 0x7fffffff) == 0 && !is_nan(value);
    return float_to_narrow<FP8>(zero ? 0.0f : __fdiv_rn(value, scale));
}

template <bool FP16, bool FP8>
__device__ u16 widened(u8 element, float scale) {
    return float_to_wide<FP16>(__fmul_rn(narrow_to_float<FP8>(element), scale));
}

// Whether eight elements can be taken at once: they are one head's, and aligned.
__device__ bool by_eight(const CastEntry& entry) {
    return (entry.wide_elements & 15) == 0 && (entry.narrow_elements & 7) == 0 &&
           entry.head_elements % 8 == 0;
}

__device__ u64 element_count(const CastEntry& entry) {
    return (u64)entry.rows * entry.heads * entry.head_elements;
}

__device__ float scale_at(const CastEntry& entry, u64 element) {
    return ((const float*)entry.scales)[element / entry.head_elements % entry.heads];
}

// Tensors along y, elements along x.
template <bool FP16, bool FP8>
__device__ void narrow_tensor(const CastEntry& entry) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 step = (u64)gridDim.x * blockDim.x;
    u64 count = element_count(entry);
    if (by_eight(entry)) {
        for (u64 k = at; k < count / 8; k += step) {
            uint4 in = ((const uint4*)entry.wide_elements)[k];
            u32 words[4] = {in.x, in.y, in.z, in.w};
            u32 out[2] = {0, 0};
            float scale = scale_at(entry, k * 8);
            UNROLL
            for (u32 e = 0; e < 8; e++) {
                u16 element = (u16)(words[e / 2] >> e % 2 * 16);
                out[e / 4] |= (u32)narrowed<FP16, FP8>(element, scale) << e % 4 * 8;
            }
            uint2 result = {out[0], out[1]};
            ((uint2*)entry.narrow_elements)[k] = result;
        }
        return;
    }
    const u16* from = (const u16*)entry.wide_elements;
    u8* to = (u8*)entry.narrow_elements;
    for (u64 k = at; k < count; k += step) {
        to[k] = narrowed<FP16, FP8>(from[k], scale_at(entry, k));
    }
}

template <bool FP16, bool FP8>
__device__ void widen_tensor(const CastEntry& entry) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 step = (u64)gridDim.x * blockDim.x;
    u64 count = element_count(entry);
    if (by_eight(entry)) {
        for (u64 k = at; k < count / 8; k += step) {
            uint2 in = ((const uint2*)entry.narrow_elements)[k];
            u32 words[2] = {in.x, in.y};
            u32 out[4] = {0, 0, 0, 0};
            float scale = scale_at(entry, k * 8);
            UNROLL
            for (u32 e = 0; e < 8; e++) {
                u8 element = (u8)(words[e / 4] >> e % 4 * 8);
                out[e / 2] |= (u32)widened<FP16, FP8>(element, scale) << e % 2 * 16;
            }
            uint4 result = {out[0], out[1], out[2], out[3]};
            ((uint4*)entry.wide_elements)[k] = result;
        }
        return;
    }
    const u8* from = (const u8*)entry.narrow_elements;
    u16* to = (u16*)entry.wide_elements;
    for (u64 k = at; k < count; k += step) {
        to[k] = widened<FP16, FP8>(from[k], scale_at(entry, k));
    }
}

// Non-negative floats order like their bits, so the largest is found by atomicMax on the bits.
template <bool FP16>
__device__ void peaks_of_tensor(const CastEntry& entry) {
    u64 row_elements = (u64)entry.heads * entry.head_elements;
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 step = (u64)gridDim.x * blockDim.x;
    // An item is one element of the row and every row from its own on, `parts` apart: neighbouring
    // threads read neighbouring elements, and a thread does one atomic for some 32 loads.
    u64 parts = (entry.rows + 31) / 32;
    for (u64 item = at; item < row_elements * parts; item += step) {
        u64 element = item % row_elements;
        u32 peak = 0;
        UNROLL
        for (u64 row = item / row_elements; row < entry.rows; row += parts) {
            u16 bits = ((const u16*)entry.wide_elements)[row * row_elements + element];
            u32 magnitude = __float_as_uint(wide_to_float<FP16>(bits)) & 0x7fffffff;
            peak = magnitude < F32_INFINITY && magnitude > peak ? magnitude : peak;
        }
        atomicMax((u32*)entry.scales + element / entry.head_elements, peak);
    }
}

// The largest finite magnitude of each head, into `scales`, which was filled with 0 before.
extern "C" __global__ void kvtide_peaks(const CastEntry* casts, u32 count) {
    for (u32 e = blockIdx.y; e < count; e += gridDim.y) {
        CastEntry entry = casts[e];
        if (entry.wide == WIDE_FP16) {
            peaks_of_tensor<true>(entry);
        } else {
            peaks_of_tensor<false>(entry);
        }
    }
}

// Makes scales of peaks, in place: divided by the largest magnitude of the narrow format.
extern "C" __global__ void kvtide_scales(const CastEntry* casts, u32 count, float limit) {
    u32 step = gridDim.x * blockDim.x;
    for (u32 e = blockIdx.y; e < count; e += gridDim.y) {
        float* scales = (float*)casts[e].scales;
        for (u32 k = blockIdx.x * blockDim.x + threadIdx.x; k < casts[e].heads; k += step) {
            scales[k] = __fdiv_rn(scales[k], limit);
        }
    }
}

template <bool FP8>
__device__ void narrow_all(const CastEntry* casts, u32 count) {
    for (u32 e = blockIdx.y; e < count; e += gridDim.y) {
        CastEntry entry = casts[e];
        if (entry.wide == WIDE_FP16) {
            narrow_tensor<true, FP8>(entry);
        } else {
            narrow_tensor<false, FP8>(entry);
        }
    }
}

template <bool FP8>
__device__ void widen_all(const CastEntry* casts, u32 count) {
    for (u32 e = blockIdx.y; e < count; e += gridDim.y) {
        CastEntry entry = casts[e];
        if (entry.wide == WIDE_FP16) {
            widen_tensor<true, FP8>(entry);
        } else {
            widen_tensor<false, FP8>(entry);
        }
    }
}

extern "C" __global__ void kvtide_to_fp8(const CastEntry* casts, u32 count) {
    narrow_all<true>(casts, count);
}

extern "C" __global__ void kvtide_from_fp8(const CastEntry* casts, u32 count) {
    widen_all<true>(casts, count);
}

extern "C" __global__ void kvtide_to_int8(const CastEntry* casts, u32 count) {
    narrow_all<false>(casts, count);
}

extern "C" __global__ void kvtide_from_int8(const CastEntry* casts, u32 count) {
    widen_all<false>(casts, count);
}
