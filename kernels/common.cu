// Types and address arithmetic shared by all kernels. The loader joins the files of this folder, this one first, into
// one translation unit; nothing is included. Sizes and positions are in bytes and 64 bits wide unless said otherwise.
//
// A region is the live bytes of one checkpoint tensor, or of a slice of it, in region order: position q counts bytes
// from 0. It lies in memory as runs of run_nbytes, run_stride apart (one run where it is contiguous).
// A chunk is a range of one region whose delta (new XOR live) lies packed in scratch. It starts at a multiple of
// TILE_NBYTES and, unless it ends its region, is a multiple of it long.
// A tile is TILE_NBYTES of a chunk (the last one of a chunk may be shorter): one thread block works on one tile.
// An entry of a change list is one word of `unit` bytes of a tile that changes: its number within the tile, and new
// XOR live. unit is 2 where every word of the region lies on an even address, else 1; the last byte of a region of
// odd size is then an entry of its own, with a value below 256.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE_NBYTES 65536ull
#define BLOCK_NBYTES 1024ull                          // of XXH3: 16 stripes of 64 bytes
#define TILE_BLOCKS (TILE_NBYTES / BLOCK_NBYTES)      // 64
#define SEGMENT_NBYTES 64ull                          // counted by one thread
#define TILE_SEGMENTS (TILE_NBYTES / SEGMENT_NBYTES)  // 1024
#define ROW_SEGMENTS 16ull                            // a row is 16 segments: their counts are one 16-byte load
#define TILE_ROWS (TILE_SEGMENTS / ROW_SEGMENTS)      // 64

struct Chunk {
    const u8* delta;    // of the range, packed, 16-byte aligned; null: zeros, so that new is live
    u8* live;           // where the region begins
    u64 run_nbytes;     // the region's nbytes where it is contiguous
    u64 run_stride;     // live bytes from one run's begin to the next one's
    u64 offset;         // of the range in the region
    u64 nbytes;         // of the range
    u64 region_nbytes;
    u64 region;         // number of the region: its row in the tables of states and digests
    u64 first_tile;     // number of the chunk's first tile in the batch
    u64 unit;           // bytes per word of its change list: 1 or 2
    u64 listed;         // 0: digested only, another name of the same storage has the list
};

struct Vector {  // 16 bytes; little endian, as all of XXH3
    u64 x, y;
};

// Number of bytes of a chunk from its position `at` on, at most `most`.
__device__ __forceinline__ u64 bytes_left(const Chunk& chunk, u64 at, u64 most)
{
    if (at >= chunk.nbytes) return 0;
    const u64 left = chunk.nbytes - at;
    return left < most ? left : most;
}

// Address of the live byte at region position q.
__device__ __forceinline__ u8* live_at(const Chunk& chunk, u64 q)
{
    if (chunk.run_nbytes == chunk.region_nbytes) return chunk.live + q;
    return chunk.live + q / chunk.run_nbytes * chunk.run_stride + q % chunk.run_nbytes;
}

// 16 bytes from an address that is a multiple of sizeof(Part).
template <class Part> __device__ __forceinline__ Vector load_parts(const u8* address)
{
    const Part* parts = (const Part*)address;
    const u32 half = 8 / sizeof(Part);
    Vector v;
    v.x = v.y = 0;
#pragma unroll
    for (u32 i = 0; i < half; ++i) {
        v.x |= (u64)parts[i] << 8 * sizeof(Part) * i;
        v.y |= (u64)parts[half + i] << 8 * sizeof(Part) * i;
    }
    return v;
}

// Up to 16 bytes from `address`, zeros behind them, with the widest loads that the address allows.
__device__ __forceinline__ Vector load_vector(const u8* address, u64 nbytes)
{
    Vector v;
    if (nbytes < 16) {
        v.x = v.y = 0;
        for (u64 i = 0; i < nbytes; ++i) {
            const u64 byte = address[i];
            if (i < 8) v.x |= byte << (8 * i);
            else v.y |= byte << (8 * (i - 8));
        }
        return v;
    }
    if (((u64)address & 15) == 0) {
        const ulonglong2 w = *(const ulonglong2*)address;
        v.x = w.x;
        v.y = w.y;
        return v;
    }
    if (((u64)address & 7) == 0) return load_parts<u64>(address);
    if (((u64)address & 3) == 0) return load_parts<u32>(address);
    if (((u64)address & 1) == 0) return load_parts<u16>(address);
    return load_parts<u8>(address);
}

// Up to 16 live bytes from region position q on, which may span runs.
__device__ __forceinline__ Vector load_live(const Chunk& chunk, u64 q, u64 nbytes)
{
    if (chunk.run_nbytes == chunk.region_nbytes) return load_vector(chunk.live + q, nbytes);
    const u64 column = q % chunk.run_nbytes;
    if (column + nbytes <= chunk.run_nbytes)
        return load_vector(chunk.live + q / chunk.run_nbytes * chunk.run_stride + column, nbytes);
    Vector v;
    v.x = v.y = 0;
    for (u64 i = 0; i < nbytes; ++i) {
        const u64 byte = *live_at(chunk, q + i);
        if (i < 8) v.x |= byte << (8 * i);
        else v.y |= byte << (8 * (i - 8));
    }
    return v;
}

// Up to 16 bytes of the delta from chunk position `at`, a multiple of 16, on.
__device__ __forceinline__ Vector load_delta(const Chunk& chunk, u64 at, u64 nbytes)
{
    if (chunk.delta) return load_vector(chunk.delta + at, nbytes);
    Vector v;
    v.x = v.y = 0;
    return v;
}

// What one entry adds to an order-free sum over entries, modulo 2^64: any other index or word gives another addend.
__device__ __forceinline__ u64 mix_entry(u64 index, u64 word)
{
    u64 h = (index << 16 | word) + 1;
    h *= 0x9E3779B185EBCA87ull;
    h ^= h >> 29;
    h *= 0xC2B2AE3D27D4EB4Full;
    return h ^ h >> 32;
}
