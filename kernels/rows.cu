// How decoded records of xor_rows become part of their chunks' deltas, all of a launch judged before one is applied.
//   gs_record_check, gs_record_apply
// A record is about a band of its tensor (2^20 bytes; the last one is shorter), in rows of 128 words of two bytes: a
// form byte, then rows (u8 counts by row; by changed word u8 positions in the row, low bytes, high bytes) or words (low
// bytes of all words, high bytes). The last byte of an odd tensor is a word without a high byte.
// Live memory is not looked at.

#define RECORD_ROWS 0
#define RECORD_WORDS 1
#define ROW_WORDS 128ull
#define ROW_NBYTES (2 * ROW_WORDS)
#define GROUP_ROWS 16ull  // rows that one thread works on: their counts are one vector

struct Record {
    const u8* data;      // at any address
    u64 nbytes;
    u64 band_begin;      // tensor byte
    u64 band_nbytes;     // at least 1
    u64 tensor;          // its number in `bad`
    u64 chunk;
    u64 tensor_begin;    // as a Layer's
    u64 tensor_stride;
};

__device__ __forceinline__ u64 band_words(const Record& record)
{
    return (record.band_nbytes + 1) / 2;
}

__device__ __forceinline__ u64 band_rows(const Record& record)
{
    return (record.band_nbytes + ROW_NBYTES - 1) / ROW_NBYTES;
}

// Number of changed words that the size of a record in rows has room for: nothing is read beyond them, whatever its
// counts say.
__device__ __forceinline__ u64 change_room(const Record& record)
{
    return (record.nbytes - 1 - band_rows(record)) / 3;
}

// Whether the record is of a known form, and of a size that it may have. Before that, no other byte of it is read.
__device__ __forceinline__ bool is_whole_record(const Record& record)
{
    if (!record.nbytes || record.nbytes > 1 + record.band_nbytes) return false;
    if (record.data[0] == RECORD_WORDS) return record.nbytes == 1 + record.band_nbytes;
    const u64 least = 1 + band_rows(record);
    return record.data[0] == RECORD_ROWS && record.nbytes >= least && (record.nbytes - least) % 3 == 0;
}

// Changed words before a group of rows, as the counts have it.
__device__ __forceinline__ u64 changes_before(const Record& record, u64 group)
{
    u64 before = 0;
#pragma unroll 4
    for (u64 i = 0; i < group; ++i) {
        const Vector v = load_vector(record.data + 1 + i * GROUP_ROWS, GROUP_ROWS);
        before += sum_counts(v.x, v.y);
    }
    return before;
}

// Whether the changed words `at` up to `at + count` of a row are in order, within the row, and changes.
__device__ __forceinline__ bool is_valid_row(const Record& record, u64 row, u64 at, u64 count, u64 room)
{
    const u64 left = band_words(record) - row * ROW_WORDS;
    const u64 words = left < ROW_WORDS ? left : ROW_WORDS;
    const u8* positions = record.data + 1 + band_rows(record);
    u64 least = 0;
    for (u64 i = at; i < at + count; ++i) {
        const u64 position = positions[i];
        const u8 low = positions[room + i], high = positions[2 * room + i];
        if (position < least || position >= words || !(low | high)) return false;
        if (high && row * ROW_NBYTES + 2 * position + 1 >= record.band_nbytes) return false;
        least = position + 1;
    }
    return true;
}

// Whether a group of rows may be applied; of the last one also whether the counts add up to the record's size.
__device__ __forceinline__ bool is_valid_group(const Record& record, u64 group)
{
    const u64 rows = band_rows(record), room = change_room(record);
    const u64 begin = group * GROUP_ROWS;
    const u64 end = begin + GROUP_ROWS < rows ? begin + GROUP_ROWS : rows;
    u64 at = changes_before(record, group);
    for (u64 row = begin; row < end; ++row) {
        const u64 count = record.data[1 + row];
        if (at + count > room || !is_valid_row(record, row, at, count, room)) return false;
        at += count;
    }
    return end < rows || at == room;
}

// bad[tensor] |= 2 and *gate = 1 for a record that breaks a rule of the format. One refusal may hide others of the
// launch.
// Grid: one block per record.
extern "C" __global__ void gs_record_check(const Record* __restrict__ records, u64 nrecords, u32* bad, u32* gate)
{
    if (gate && *gate) return;
    if (blockIdx.x >= nrecords) return;
    const Record record = records[blockIdx.x];
    bool refused = !is_whole_record(record);
    const u64 groups = (band_rows(record) + GROUP_ROWS - 1) / GROUP_ROWS;
    if (!refused && record.data[0] == RECORD_ROWS)
        for (u64 group = threadIdx.x; group < groups && !refused; group += blockDim.x)
            refused = !is_valid_group(record, group);
    if (!refused) return;
    atomicOr(&bad[record.tensor], REFUSED_PAYLOAD);
    if (gate) atomicOr(gate, 1u);
}

// delta ^= byte, for a byte of the band that falls into the chunk.
__device__ __forceinline__ void xor_byte(const Record& record, const Chunk& chunk, u64 in_band, u8 byte)
{
    if (!byte) return;
    const u64 at = chunk_position(chunk, record.tensor_begin, record.tensor_stride, record.band_begin + in_band);
    if (at < chunk.nbytes) ((u8*)chunk.delta)[at] ^= byte;
}

__device__ __forceinline__ void apply_group(const Record& record, const Chunk& chunk, u64 group)
{
    const u64 rows = band_rows(record), room = change_room(record);
    const u64 begin = group * GROUP_ROWS;
    const u64 end = begin + GROUP_ROWS < rows ? begin + GROUP_ROWS : rows;
    const u8* positions = record.data + 1 + rows;
    u64 at = changes_before(record, group);
    for (u64 row = begin; row < end; ++row)
        for (u64 count = record.data[1 + row]; count; --count, ++at) {
            const u64 in_band = row * ROW_NBYTES + 2 * positions[at];
            xor_byte(record, chunk, in_band, positions[room + at]);
            xor_byte(record, chunk, in_band + 1, positions[2 * room + at]);
        }
}

// XORs a record into its chunk's delta, as far as it falls into it; words are unique, so no two threads meet. Only
// behind a check that refused nothing. Grid: one block per record.
extern "C" __global__ void gs_record_apply(const Record* __restrict__ records, u64 nrecords, Chunk* chunks,
                                           const u32* gate)
{
    if (gate && *gate) return;
    if (blockIdx.x >= nrecords) return;
    const Record record = records[blockIdx.x];
    const Chunk chunk = chunks[record.chunk];
    if (record.data[0] == RECORD_ROWS) {
        const u64 groups = (band_rows(record) + GROUP_ROWS - 1) / GROUP_ROWS;
        for (u64 group = threadIdx.x; group < groups; group += blockDim.x) apply_group(record, chunk, group);
        return;
    }
    const u64 words = band_words(record);
    const u8* low = record.data + 1;
    const u8* high = low + words;
    for (u64 word = threadIdx.x; word < words; word += blockDim.x) {
        xor_byte(record, chunk, 2 * word, low[word]);
        if (2 * word + 1 < record.band_nbytes) xor_byte(record, chunk, 2 * word + 1, high[word]);
    }
}
