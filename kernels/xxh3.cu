// XXH3-128 (seed 0, default secret; the xxHash specification's XXH3 section) of what regions will hold, new = live XOR
// delta, or hold, where the chunks' delta is null. Nothing is written to live memory. Three launches over one batch:
//   gs_digest_sums    what each 1024-byte block adds to the 8 accumulators: all the memory traffic, no order
//   gs_digest_chain   folds a chunk's sums into its region's accumulators, one block after the other
//   gs_digest_finish  (xxh3_finish.cu) the rest behind the last whole block and the final mix, or all of a short region
// Chunks of one region are in consecutive batches, in order: `states` carries the accumulators from one to the next.
// All three do nothing where `gate` is given and *gate is not zero.

// The default secret as little-endian words.
__device__ const u64 SECRET[24] = {
    0xBE4BA423396CFEB8ull, 0x1CAD21F72C81017Cull, 0xDB979083E96DD4DEull, 0x1F67B3B7A4A44072ull,
    0x78E5C0CC4EE679CBull, 0x2172FFCC7DD05A82ull, 0x8E2443F7744608B8ull, 0x4C263A81E69035E0ull,
    0xCB00C391BB52283Cull, 0xA32E531B8B65D088ull, 0x4EF90DA297486471ull, 0xD8ACDEA946EF1938ull,
    0x3F349CE33F76FAA8ull, 0x1D4F0BC7C7BBDCF9ull, 0x3159B4CD4BE0518Aull, 0x647378D9C97E9FC8ull,
    0xC3EBD33483ACC5EAull, 0xEB6313FAFFA081C5ull, 0x49DAF0B751DD0D17ull, 0x9E68D429265516D3ull,
    0xFCA1477D58BE162Bull, 0xCE31D07AD1B8F88Full, 0x280416958F3ACB45ull, 0x7E404BBBCAFBD7AFull,
};

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull
#define PRIME_MX1 0x165667919E3779F9ull
#define PRIME_MX2 0x9FB21C651E98DF25ull

#define STRIPE_NBYTES 64u
#define BLOCK_STRIPES 16u
#define LANES 8ull               // accumulators
#define SHORT_NBYTES 240ull      // at most so long: no accumulators
#define STRIPES_AT_ONCE 2        // loaded by a thread before it works on the first
#define CHAIN_AHEAD 32           // sums that the chain has loaded before it needs them
#define SCRAMBLE_KEYS 16         // the secret's word for lane 0 when a block is folded in

// Number of whole blocks that precede a region's last bytes; they alone go through sums and chain.
__device__ __forceinline__ u64 whole_blocks(u64 region_nbytes)
{
    return region_nbytes > SHORT_NBYTES ? (region_nbytes - 1) / BLOCK_NBYTES : 0;
}

// Adds 16 bytes of a stripe to their two accumulators.
__device__ __forceinline__ void accumulate(Vector& lanes, const Vector& v, u64 key_x, u64 key_y)
{
    const u64 x = v.x ^ key_x;
    const u64 y = v.y ^ key_y;
    lanes.x += (x & 0xFFFFFFFF) * (x >> 32) + v.y;
    lanes.y += (y & 0xFFFFFFFF) * (y >> 32) + v.x;
}

// Sums over the entries of a change list to come: of new XOR live, and of what is live.
struct Checks {
    u64 delta, live;
};

// Adds the changed words of 16 bytes that begin at byte `at` of their tile. One turn per changed word, the first one
// first: where one in a hundred changes, the 32 threads that wait for each other make about one turn together.
__device__ __forceinline__ void add_changed(Checks& checks, Vector delta, const Vector& live, u32 at, u32 unit)
{
    const u32 mask = unit == 2 ? 0xFFFF : 0xFF;
    while (delta.x | delta.y) {
        const bool second = delta.x == 0;
        const u64 half = second ? delta.y : delta.x;
        u32 shift = (u32)half ? 0 : 32;
        if ((half >> shift & 0xFFFF) == 0) shift += 16;
        if ((half >> shift & mask) == 0) shift += 8;
        const u32 word = (u32)(half >> shift) & mask;
        const u32 live_word = (u32)((second ? live.y : live.x) >> shift) & mask;
        const u32 index = (at + (second ? 8 : 0) + shift / 8) >> (unit - 1);
        checks.delta += mix_entry(index, word);
        checks.live += mix_entry(index, live_word);
        (second ? delta.y : delta.x) = half ^ (u64)word << shift;
    }
}

// Whether all 16-byte vectors of the region are aligned, and no run is passed over within a step of 64 bytes.
__device__ __forceinline__ bool is_aligned(const Chunk& chunk)
{
    if (chunk.run_nbytes == chunk.region_nbytes) return ((u64)chunk.live & 15) == 0;
    return (((u64)chunk.live | chunk.run_nbytes | chunk.run_stride) & 15) == 0 && chunk.run_nbytes >= STRIPE_NBYTES;
}

// A thread's quarter of a whole block of an aligned region: its 16 bytes of each stripe, from chunk position `at` on,
// which is position `in_tile` of the tile. The bytes it reads do not depend on one another: two stripes are on their
// way at a time.
template <bool HAS_DELTA>
__device__ __forceinline__ void sum_aligned(const Chunk& chunk, u64 at, u32 in_tile, Vector& lanes, Checks& checks)
{
    const u64 q = chunk.offset + at;
    const bool listed = HAS_DELTA && chunk.listed;
    const u32 unit = chunk.unit;
    const u64 jump = chunk.run_stride - chunk.run_nbytes;
    const u64 run_nbytes = chunk.run_nbytes;
    u64 left = run_nbytes - (run_nbytes == chunk.region_nbytes ? q : q % run_nbytes);
    const u8* live = live_at(chunk, q);
    const u8* delta = chunk.delta + at;
    const u64* key = SECRET + at % STRIPE_NBYTES / 8;
#pragma unroll 1
    for (u32 group = 0; group < BLOCK_STRIPES; group += STRIPES_AT_ONCE) {
        ulonglong2 old[STRIPES_AT_ONCE], change[STRIPES_AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < STRIPES_AT_ONCE; ++i) {
            old[i] = *(const ulonglong2*)live;
            if (HAS_DELTA) change[i] = *(const ulonglong2*)(delta + i * STRIPE_NBYTES);
            const bool ends = left <= STRIPE_NBYTES;
            live += STRIPE_NBYTES + (ends ? jump : 0);
            left += (ends ? run_nbytes : 0) - STRIPE_NBYTES;
        }
#pragma unroll
        for (u32 i = 0; i < STRIPES_AT_ONCE; ++i) {
            const Vector before = {old[i].x, old[i].y};
            Vector after = before;
            if (HAS_DELTA) {
                const Vector d = {change[i].x, change[i].y};
                after.x ^= d.x;
                after.y ^= d.y;
                if (listed) add_changed(checks, d, before, in_tile + (group + i) * STRIPE_NBYTES, unit);
            }
            accumulate(lanes, after, key[i], key[i + 1]);
        }
        delta += STRIPES_AT_ONCE * STRIPE_NBYTES;
        key += STRIPES_AT_ONCE;
    }
}

// The same for any region, and for the last bytes of one, where the sums are of no use.
__device__ __forceinline__ void sum_any(const Chunk& chunk, u64 at, u32 in_tile, Vector& lanes, Checks& checks)
{
    const u64* key = SECRET + at % STRIPE_NBYTES / 8;
#pragma unroll 1
    for (u64 stripe = 0; stripe < BLOCK_STRIPES; ++stripe, at += STRIPE_NBYTES, in_tile += STRIPE_NBYTES, ++key) {
        const u64 nbytes = bytes_left(chunk, at, 16);
        if (nbytes == 0) return;
        Vector v = load_live(chunk, chunk.offset + at, nbytes);
        const Vector delta = load_delta(chunk, at, nbytes);
        if (chunk.listed) add_changed(checks, delta, v, in_tile, chunk.unit);
        v.x ^= delta.x;
        v.y ^= delta.y;
        accumulate(lanes, v, key[0], key[1]);
    }
}

// Block sums, and what the change list will have to add up to. Grid: ntiles blocks of 256 threads; thread t works on
// the tile's XXH3 block t / 4, bytes 16 * (t % 4) to 16 * (t % 4) + 15 of each stripe.
//   tile_chunk  u32 per tile: number of its chunk
//   sums        16-byte aligned; 8 words per XXH3 block, 64 blocks per tile; written for whole blocks only
//   checks      2 words per tile, zeroed before: the sums of mix_entry(index, new XOR live) and mix_entry(index, live)
//               over the changed words of listed chunks. An odd last byte is a word of one byte.
extern "C" __global__ void gs_digest_sums(const Chunk* chunks, const u32* tile_chunk, u64 ntiles, u64* sums,
                                          u64* checks, const u32* gate)
{
    const u64 tile = blockIdx.x;
    if (tile >= ntiles || (gate && *gate)) return;
    const Chunk& chunk = chunks[tile_chunk[tile]];
    const u32 block = threadIdx.x / 4;
    const u32 pair = threadIdx.x % 4;
    const u32 in_tile = block * BLOCK_NBYTES + pair * 16;
    const u64 at = (tile - chunk.first_tile) * TILE_NBYTES + in_tile;
    const bool whole = (chunk.offset + at) / BLOCK_NBYTES < whole_blocks(chunk.region_nbytes);
    if (!whole && !chunk.listed) return;
    Vector lanes = {0, 0};
    Checks found = {0, 0};
    if (!whole || !is_aligned(chunk)) sum_any(chunk, at, in_tile, lanes, found);
    else if (chunk.delta) sum_aligned<true>(chunk, at, in_tile, lanes, found);
    else sum_aligned<false>(chunk, at, in_tile, lanes, found);
    if (whole) {
        ulonglong2 sum;
        sum.x = lanes.x;
        sum.y = lanes.y;
        *(ulonglong2*)(sums + (tile * TILE_BLOCKS + block) * LANES + pair * 2) = sum;
    }
    if (found.delta) atomicAdd(checks + 2 * tile, found.delta);
    if (found.live) atomicAdd(checks + 2 * tile + 1, found.live);
}

// An accumulator in halves.
struct Halves {
    u32 low, high;
};

// (x ^ x >> 47 ^ key) * PRIME32_1 + sum: ends a block, and adds the next one's sum. The chain waits for this step's
// result alone, so it is cut to wait for one wide multiplication and little else.
__device__ __forceinline__ void fold_block(Halves& x, const Halves& key, u64 sum)
{
    const u32 low = x.low ^ x.high >> 15 ^ key.low;
    const u32 high = (x.high ^ key.high) * PRIME32_1 + (u32)(sum >> 32);
    const u64 product = (u64)low * PRIME32_1 + ((u64)high << 32 | (u32)sum);
    x.low = (u32)product;
    x.high = (u32)(product >> 32);
}

// Folds n > 0 sums, 8 words apart, into an accumulator. The order is the digest's: one thread, the sums loaded ahead.
__device__ __forceinline__ u64 fold_blocks(u64 accumulator, const u64* sum, u64 n, u64 secret)
{
    const Halves key = {(u32)secret, (u32)(secret >> 32)};
    accumulator += *sum;
    Halves x = {(u32)accumulator, (u32)(accumulator >> 32)};
    u64 left = n - 1;
    u64 ahead[CHAIN_AHEAD];
    sum += LANES;
#pragma unroll
    for (u32 i = 0; i < CHAIN_AHEAD; ++i) ahead[i] = i < left ? sum[i * LANES] : 0;
    for (; left >= 2 * CHAIN_AHEAD; left -= CHAIN_AHEAD) {
        sum += CHAIN_AHEAD * LANES;
#pragma unroll
        for (u32 i = 0; i < CHAIN_AHEAD; ++i) {
            fold_block(x, key, ahead[i]);
            ahead[i] = sum[i * LANES];
        }
    }
    sum += CHAIN_AHEAD * LANES;
#pragma unroll
    for (u32 i = 0; i < CHAIN_AHEAD; ++i) {
        if (i < left) fold_block(x, key, ahead[i]);
        if (i + CHAIN_AHEAD < left) ahead[i] = sum[i * LANES];
    }
#pragma unroll
    for (u32 i = 0; i < CHAIN_AHEAD; ++i)
        if (i + CHAIN_AHEAD < left) fold_block(x, key, ahead[i]);
    fold_block(x, key, 0);
    return (u64)x.high << 32 | x.low;
}

// What accumulator `lane` starts from.
__device__ __forceinline__ u64 first_accumulator(u64 lane)
{
    switch (lane) {
    case 0: return PRIME32_3;
    case 1: return PRIME64_1;
    case 2: return PRIME64_2;
    case 3: return PRIME64_3;
    case 4: return PRIME64_4;
    case 5: return PRIME32_2;
    case 6: return PRIME64_5;
    default: return PRIME32_1;
    }
}

// Grid: 8 threads per chunk, one per accumulator.
//   sums    of gs_digest_sums, same batch
//   states  8 words per region; those of a chunk at offset 0 need not be set
extern "C" __global__ void gs_digest_chain(const Chunk* chunks, u64 nchunks, const u64* sums, u64* states,
                                           const u32* gate)
{
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 lane = thread % LANES;
    if (thread / LANES >= nchunks || (gate && *gate)) return;
    const Chunk& chunk = chunks[thread / LANES];
    if (chunk.region_nbytes <= SHORT_NBYTES) return;
    const u64 first = chunk.offset / BLOCK_NBYTES;
    const u64 behind = (chunk.offset + chunk.nbytes) / BLOCK_NBYTES;
    const u64 whole = whole_blocks(chunk.region_nbytes);
    const u64 end = behind < whole ? behind : whole;
    u64* state = states + chunk.region * LANES + lane;
    u64 accumulator = chunk.offset ? *state : first_accumulator(lane);
    if (first < end)
        accumulator = fold_blocks(accumulator, sums + chunk.first_tile * TILE_BLOCKS * LANES + lane, end - first,
                                  SECRET[SCRAMBLE_KEYS + lane]);
    *state = accumulator;
}
