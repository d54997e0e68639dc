// Runs every kernel on heap buffers of odd sizes and alignments, for the sanitizers of the
// compiler: each buffer is exactly as large as the tables say, so an access one byte too far is
// found. What the kernels compute is checked only as far as it costs nothing; the Rust tests do
// that. sanitize.sh compiles this twice: as it is, which must be clean, and with KV_PLANT_OVERRUN,
// which must be found.
#include "host_launch.cpp"

extern "C" void* malloc(unsigned long);
extern "C" void free(void*);
extern "C" int printf(const char*, ...);

namespace {

int failures = 0;

// `bytes` bytes that start `skew` behind a multiple of 16 and end with the allocation.
struct Buffer {
    u8* start;
    u64 bytes;
    u64 skew;

    Buffer(u64 bytes, u64 skew) : bytes(bytes), skew(skew) {
        start = (u8*)malloc(bytes + skew) + skew;
        for (u64 k = 0; k < bytes; k++) {
            start[k] = (u8)(k * 131 + (k >> 8) * 17 + 7);
        }
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() {
        free(start - skew);
    }
    u64 address() const {
        return (u64)start;
    }
};

template <typename T>
u64 pointer(T& value) {
    return (u64)&value;
}

template <int N>
void launch(const char* name, u32 grid_x, u32 grid_y, u32 block, const u64 (&arguments)[N]) {
    u64 values[N];
    void* parameters[N];
    for (int k = 0; k < N; k++) {
        values[k] = arguments[k];
        parameters[k] = &values[k];
    }
    u32 grid[3] = {grid_x, grid_y, 1};
    u32 threads[3] = {block, 1, 1};
    if (kvtide_cpu_launch(name, __builtin_strlen(name), grid, threads, parameters) != 0) {
        printf("no kernel is named %s\n", name);
        failures++;
    }
}

void must(bool holds, const char* what, u64 at) {
    if (!holds) {
        printf("%s (case %llu)\n", what, at);
        failures++;
    }
}

// Gathers place 1 of two, scatters it back, for three planes: dense, spaced rows, one run.
void move(u64 row_bytes, u64 gap, u32 rows, u64 skew, u32 grid, u32 block) {
    PlaneEntry planes[3] = {};
    u64 at = 0;
    u64 payload_bytes = 0;
    for (int p = 0; p < 3; p++) {
        PlaneEntry& plane = planes[p];
        plane.rows = p == 2 ? 1 : rows;
        plane.row_bytes = row_bytes;
        plane.row_stride = p == 1 ? row_bytes + gap : row_bytes;
        u64 span = plane.row_stride * (plane.rows - 1) + row_bytes;
        plane.block_stride = span;
        plane.offset = at;
        plane.payload_offset = payload_bytes;
        at += 2 * span;
        payload_bytes += row_bytes * plane.rows;
    }
    Buffer region(at, skew);
    Buffer payload(payload_bytes, skew);
    MoveEntry entry = {payload.address(), 1, 0};
    SumEntry sum = {};
    sum.verdict = VERDICT_EQUAL;
    u64 tables[7] = {
        region.address(), (u64)planes, 3, pointer(entry), 1, payload_bytes, pointer(sum)
    };
    u64 gather[6] = {tables[0], tables[1], tables[2], tables[3], tables[4], tables[5]};
    launch("kvtide_gather", grid, 1, block, gather);
    must(payload.start[0] == region.start[planes[0].block_stride], "the first byte moved", skew);
    must(payload.start[payload_bytes - 1] == region.start[at - 1], "the last byte moved", skew);
    payload.start[payload_bytes - 1] ^= 0xff;
    launch("kvtide_scatter", grid, 1, block, tables);
    must(payload.start[payload_bytes - 1] == region.start[at - 1], "the last byte came back", skew);
}

void sum(u64 bytes, u64 skew, u32 grid, u32 block) {
    Buffer payload(bytes, skew);
    u64 words = 8 * ((bytes + 1023) / 1024) + 8;
    Buffer scratch(words * 8, 0);
    SumEntry entry = {};
    entry.payload = payload.address();
    entry.bytes = bytes;
    for (u32 round = 0; round < 2; round++) {
        entry.compare = round;
        u64 arguments[3] = {pointer(entry), 1, scratch.address()};
        launch("kvtide_sum_stripes", grid, 1, block, arguments);
        launch("kvtide_sum_fold", grid, 1, block, arguments);
        launch("kvtide_sum_finish", grid, 1, block, arguments);
        entry.expected[0] = entry.found[0];
        entry.expected[1] = entry.found[1];
    }
    must(entry.verdict == (bytes > 240 ? 1 : 2), "a payload equals itself", bytes);
}

void cast(u32 rows, u32 heads, u32 head_elements, u64 skew, u32 wide_format) {
    u64 elements = (u64)rows * heads * head_elements;
    Buffer wide(elements * 2, skew * 2);
    Buffer narrow(elements, skew);
    Buffer scales(heads * 4, 4);
    CastEntry entry = {};
    entry.wide_elements = wide.address();
    entry.narrow_elements = narrow.address();
    entry.scales = scales.address();
    entry.rows = rows;
    entry.heads = heads;
    entry.head_elements = head_elements;
    entry.wide = wide_format;
    u64 fill[3] = {scales.address(), heads * 4ull, 0};
    launch("kvtide_fill", 2, 1, 3, fill);
    u64 one[2] = {pointer(entry), 1};
    launch("kvtide_peaks", 3, 1, 32, one);
    u64 limit[3] = {pointer(entry), 1, __float_as_uint(127.0f)};
    launch("kvtide_scales", 1, 1, 32, limit);
    launch("kvtide_to_fp8", 3, 1, 32, one);
    launch("kvtide_from_fp8", 3, 1, 32, one);
    launch("kvtide_to_int8", 3, 1, 32, one);
    launch("kvtide_from_int8", 3, 1, 32, one);
}

}  // namespace

int main() {
    const u64 skews[] = {0, 1, 2, 4, 8, 12};
    for (u64 skew : skews) {
        move(16, 16, 3, skew, 2, 5);
        move(1, 1, 1, skew, 1, 32);
        move(37, 3, 11, skew, 3, 32);
        move(100, 4, 7, skew, 1, 64);
        move(4096, 64, 9, skew, 5, 256);
        move(17000, 1, 2, skew, 2, 128);
        const u64 lengths[] = {0, 1, 240, 241, 255, 256, 1024, 1025, 1089, 9217, 20000, 65537};
        for (u64 bytes : lengths) {
            sum(bytes, skew, 2, 32);
        }
        for (u64 bytes = 0; bytes < 70; bytes++) {
            Buffer buffer(bytes, skew);
            u64 fill[3] = {buffer.address(), bytes, 0x01020304};
            launch("kvtide_fill", 2, 1, 3, fill);
            must(bytes == 0 || buffer.start[0] == 4, "the fill starts", bytes);
        }
        for (u32 wide = 0; wide < 2; wide++) {
            cast(3, 2, 8, skew, wide);
            cast(33, 3, 5, skew, wide);
            cast(1, 1, 1, skew, wide);
        }
    }
    printf("%s\n", failures == 0 ? "all kernels ran" : "FAILED");
    return failures == 0 ? 0 : 2;
}
