// Change lists: which words of a batch's chunks change and by what XOR, in increasing order, the same on every run.
//   gs_count, gs_rows, gs_groups, gs_firsts   how many entries there are, and where those of each part begin
//   gs_write                                  the entries
//   gs_list_sums, gs_compare                  whether a list is what was digested
// Tables, in scratch, 16-byte aligned: counts u8[ntiles * 1024], rows u16[ntiles * 64], totals u32[ntiles],
// groups u32[ceil(ntiles / 64)], firsts u32[ntiles + 1], so a batch has fewer than 2^32 entries.
// A list: index u16[n] (number of the word within its tile) and value u16[n] (new XOR live); those of tile t are
// firsts[t] up to firsts[t + 1]. A tile's words are unique, and regions share no byte: no store needs an atomic.

#define GROUP_TILES 64ull

// Bytes that are all zero but for a 1 at the end of every word of `unit` bytes.
__device__ __forceinline__ u64 word_ones(u64 unit)
{
    return unit == 2 ? 0x0001000100010001ull : 0x0101010101010101ull;
}

// `word_ones`, with a 0 for every word of v that is zero.
__device__ __forceinline__ u64 changed_ones(u64 v, u64 unit)
{
    const u64 ones = word_ones(unit);
    const u64 top = 8 * unit - 1;
    const u64 low = ~(ones << top);
    return (((v & low) + low) | v) >> top & ones;
}

// Sum of up to 16 counts, one per byte.
__device__ __forceinline__ u64 sum_counts(u64 x, u64 y)
{
    const u64 even = 0x00FF00FF00FF00FFull;
    const u64 pairs = (x & even) + (x >> 8 & even) + (y & even) + (y >> 8 & even);
    return pairs * word_ones(2) >> 48;
}

// counts[tile * 1024 + segment] = changed words of that segment, 0 in chunks that are not listed.
// Grid: 4 blocks per tile, one thread per segment.
extern "C" __global__ void gs_count(const Chunk* __restrict__ chunks, const u32* __restrict__ tile_chunk, u64 ntiles,
                                    u8* __restrict__ counts, const u32* gate)
{
    if (gate && *gate) return;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 tile = thread / TILE_SEGMENTS;
    if (tile >= ntiles) return;
    const Chunk& chunk = chunks[tile_chunk[tile]];
    u64 ones = 0;  // at most 8 in each word's place
    const u64 unit = chunk.unit;
    if (chunk.listed && chunk.delta) {
        const u64 at = (tile - chunk.first_tile) * TILE_NBYTES + thread % TILE_SEGMENTS * SEGMENT_NBYTES;
        const u64 left = bytes_left(chunk, at, SEGMENT_NBYTES);
        if (left == SEGMENT_NBYTES) {
            const ulonglong2* segment = (const ulonglong2*)(chunk.delta + at);
#pragma unroll
            for (u32 i = 0; i < SEGMENT_NBYTES / 16; ++i) {
                const ulonglong2 v = segment[i];
                ones += changed_ones(v.x, unit) + changed_ones(v.y, unit);
            }
        } else {
            for (u64 i = 0; i < left; i += 16) {
                const Vector v = load_delta(chunk, at + i, left - i < 16 ? left - i : 16);
                ones += changed_ones(v.x, unit) + changed_ones(v.y, unit);
            }
        }
    }
    counts[thread] = (u8)(ones * word_ones(unit) >> (64 - 8 * unit));
}

// rows[tile * 64 + row] = entries of the tile before that row; totals[tile] = entries of the tile.
// Grid: one thread per tile.
extern "C" __global__ void gs_rows(const u8* __restrict__ counts, u64 ntiles, u16* __restrict__ rows,
                                   u32* __restrict__ totals, const u32* gate)
{
    if (gate && *gate) return;
    const u64 tile = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (tile >= ntiles) return;
    const ulonglong2* row_counts = (const ulonglong2*)(counts + tile * TILE_SEGMENTS);
    uint4* packed = (uint4*)(rows + tile * TILE_ROWS);
    u32 total = 0;
#pragma unroll 2
    for (u32 row = 0; row < TILE_ROWS; row += 8) {
        u32 before[8];  // stays in registers: every index is known when it is compiled
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const ulonglong2 v = row_counts[row + i];
            before[i] = total;  // below 2^16: 63 rows have at most 64512 words
            total += (u32)sum_counts(v.x, v.y);
        }
        uint4 eight;
        eight.x = before[0] | before[1] << 16;
        eight.y = before[2] | before[3] << 16;
        eight.z = before[4] | before[5] << 16;
        eight.w = before[6] | before[7] << 16;
        packed[row / 8] = eight;
    }
    totals[tile] = total;
}

// groups[g] = entries of tiles 64 g up to 64 (g + 1). Grid: one thread per group.
extern "C" __global__ void gs_groups(const u32* __restrict__ totals, u64 ntiles, u32* __restrict__ groups)
{
    const u64 group = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 begin = group * GROUP_TILES;
    if (begin >= ntiles) return;
    const u64 end = begin + GROUP_TILES < ntiles ? begin + GROUP_TILES : ntiles;
    u32 total = 0;
#pragma unroll 16
    for (u64 tile = begin; tile < end; ++tile) total += totals[tile];
    groups[group] = total;
}

// firsts[tile] = entries before that tile; firsts[ntiles] = entries of the batch. Grid: one thread per group.
extern "C" __global__ void gs_firsts(const u32* __restrict__ totals, const u32* __restrict__ groups, u64 ntiles,
                                     u32* __restrict__ firsts)
{
    const u64 own = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 begin = own * GROUP_TILES;
    if (begin >= ntiles) return;
    const u64 end = begin + GROUP_TILES < ntiles ? begin + GROUP_TILES : ntiles;
    u32 before = 0;
#pragma unroll 16
    for (u64 group = 0; group < own; ++group) before += groups[group];
#pragma unroll 16
    for (u64 tile = begin; tile < end; ++tile) {
        firsts[tile] = before;
        before += totals[tile];
    }
    if (end == ntiles) firsts[ntiles] = before;
}

// Appends the changed ones of the words in `v`, of which the first is number `number` of its tile; returns the new end.
__device__ __forceinline__ u64 write_words(u64 v, u64 unit, u64 number, u16* index, u16* value, u64 end)
{
    const u64 mask = unit == 2 ? 0xFFFF : 0xFF;
    for (; v; v >>= 8 * unit, ++number) {
        const u64 word = v & mask;
        if (!word) continue;
        index[end] = (u16)number;
        value[end] = (u16)word;
        ++end;
    }
    return end;
}

// The entries, from the tables of the kernels above. Grid: 4 blocks per tile, one thread per segment.
extern "C" __global__ void gs_write(const Chunk* __restrict__ chunks, const u32* __restrict__ tile_chunk, u64 ntiles,
                                    const u8* __restrict__ counts, const u16* __restrict__ rows,
                                    const u32* __restrict__ firsts, u16* __restrict__ index, u16* __restrict__ value,
                                    const u32* gate)
{
    if (gate && *gate) return;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 tile = thread / TILE_SEGMENTS;
    if (tile >= ntiles || !counts[thread]) return;
    const u64 segment = thread % TILE_SEGMENTS;
    const u64 in_row = segment % ROW_SEGMENTS;
    const ulonglong2 row = *(const ulonglong2*)(counts + thread - in_row);
    const u64 below = (1ull << 8 * (in_row % 8)) - 1;  // the bytes of the segments before this one
    const u64 before = in_row < 8 ? sum_counts(row.x & below, 0) : sum_counts(row.x, row.y & below);
    u64 end = (u64)firsts[tile] + rows[thread / ROW_SEGMENTS] + before;

    const Chunk& chunk = chunks[tile_chunk[tile]];
    const u64 unit = chunk.unit;
    const u64 begin = segment * SEGMENT_NBYTES;
    const u64 at = (tile - chunk.first_tile) * TILE_NBYTES + begin;
    const u64 left = bytes_left(chunk, at, SEGMENT_NBYTES);
    for (u64 i = 0; i < left; i += 16) {
        const Vector v = load_delta(chunk, at + i, left - i < 16 ? left - i : 16);
        end = write_words(v.x, unit, (begin + i) / unit, index, value, end);
        end = write_words(v.y, unit, (begin + i + 8) / unit, index, value, end);
    }
}

// sums[tile] += mix_entry(index, value) over the tile's entries. What the digest pass summed for the tile is equal,
// unless the list is not what was digested. sums is zeroed before. Grid: one block per tile.
extern "C" __global__ void gs_list_sums(u64 ntiles, const u32* __restrict__ firsts, const u16* __restrict__ index,
                                        const u16* __restrict__ value, u64* __restrict__ sums)
{
    const u64 tile = blockIdx.x;
    if (tile >= ntiles) return;
    const u64 end = firsts[tile + 1];
    u64 sum = 0;
    for (u64 entry = (u64)firsts[tile] + threadIdx.x; entry < end; entry += blockDim.x)
        sum += mix_entry(index[entry], value[entry]);
    if (sum) atomicAdd(&sums[tile], sum);
}

// *differs = 1 where a[i * a_stride] != b[i * b_stride] for an i < n; strides in words. Grid: one thread per i.
extern "C" __global__ void gs_compare(const u64* __restrict__ a, u64 a_stride, const u64* __restrict__ b,
                                      u64 b_stride, u64 n, u32* __restrict__ differs)
{
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && a[i * a_stride] != b[i * b_stride]) *differs = 1;
}
