// The end of XXH3-128 (xxh3.cu): what is behind a region's last whole block and the final mix; or all of a short one.

struct Digest {
    u64 low, high;
};

// 8 bytes of the secret from any byte on.
__device__ __forceinline__ u64 secret_at(u64 byte)
{
    const u64 word = SECRET[byte / 8];
    const u64 shift = byte % 8 * 8;
    return shift ? word >> shift | SECRET[byte / 8 + 1] << (64 - shift) : word;
}

// Up to 16 new bytes from region position q, which the chunk holds, on; zeros behind them. A call: many places need it,
// none often, and inlined it would make this kernel the longest of all.
__device__ __noinline__ Vector load_new(const Chunk& chunk, u64 q, u64 nbytes)
{
    Vector v = load_live(chunk, q, nbytes);
    if (chunk.delta) {
        const Vector delta = load_vector(chunk.delta + (q - chunk.offset), nbytes);
        v.x ^= delta.x;
        v.y ^= delta.y;
    }
    return v;
}

__device__ __forceinline__ u64 multiply_and_fold(u64 a, u64 b)
{
    return a * b ^ __umul64hi(a, b);
}

__device__ __forceinline__ u64 avalanche(u64 h)
{
    h ^= h >> 37;
    h *= PRIME_MX1;
    return h ^ h >> 32;
}

// XXH64's, of 3 bytes and less.
__device__ __forceinline__ u64 avalanche_xxh64(u64 h)
{
    h ^= h >> 33;
    h *= PRIME64_2;
    h ^= h >> 29;
    h *= PRIME64_3;
    return h ^ h >> 32;
}

__device__ __forceinline__ u32 swap32(u32 v)
{
    v = v << 16 | v >> 16;
    return (v & 0x00FF00FF) << 8 | (v >> 8 & 0x00FF00FF);
}

__device__ __forceinline__ Digest digest_1_to_3(const Chunk& chunk, u64 n)
{
    const u64 bytes = load_new(chunk, 0, n).x;
    const u32 first = bytes & 0xFF;
    const u32 middle = bytes >> n / 2 * 8 & 0xFF;
    const u32 last = bytes >> (n - 1) * 8 & 0xFF;
    const u32 low = first << 16 | middle << 24 | last | (u32)n << 8;
    const u32 swapped = swap32(low);
    const u32 high = swapped << 13 | swapped >> 19;
    const u64 key_low = (u32)SECRET[0] ^ SECRET[0] >> 32;
    const u64 key_high = (u32)SECRET[1] ^ SECRET[1] >> 32;
    return {avalanche_xxh64(low ^ key_low), avalanche_xxh64(high ^ key_high)};
}

__device__ __forceinline__ Digest digest_4_to_8(const Chunk& chunk, u64 n)
{
    const u64 bytes = load_new(chunk, 0, n).x;
    const u64 last = bytes >> (n - 4) * 8;
    const u64 keyed = ((u32)bytes | last << 32) ^ SECRET[2] ^ SECRET[3];
    const u64 factor = PRIME64_1 + (n << 2);
    u64 low = keyed * factor;
    const u64 high = __umul64hi(keyed, factor) + (low << 1);
    low ^= high >> 3;
    low ^= low >> 35;
    low *= PRIME_MX2;
    low ^= low >> 28;
    return {low, avalanche(high)};
}

__device__ __forceinline__ Digest digest_9_to_16(const Chunk& chunk, u64 n)
{
    const u64 first = load_new(chunk, 0, 8).x;
    const u64 last = load_new(chunk, n - 8, 8).x;
    const u64 mixed = first ^ last ^ SECRET[4] ^ SECRET[5];
    const u64 keyed = last ^ SECRET[6] ^ SECRET[7];
    u64 low = mixed * PRIME64_1 + ((n - 1) << 54);
    const u64 high = __umul64hi(mixed, PRIME64_1) + keyed + (keyed & 0xFFFFFFFF) * (PRIME32_2 - 1);
    low ^= (u64)swap32((u32)high) << 32 | swap32((u32)(high >> 32));
    return {avalanche(low * PRIME64_2), avalanche(__umul64hi(low, PRIME64_2) + high * PRIME64_2)};
}

// Mixes 16 bytes from `first` on and 16 from `second` on, with 32 bytes of the secret.
__device__ __forceinline__ void mix_pair(Digest& mixed, const Chunk& chunk, u64 first, u64 second, u64 secret)
{
    const Vector a = load_new(chunk, first, 16);
    const Vector b = load_new(chunk, second, 16);
    mixed.low += multiply_and_fold(a.x ^ secret_at(secret), a.y ^ secret_at(secret + 8));
    mixed.low ^= b.x + b.y;
    mixed.high += multiply_and_fold(b.x ^ secret_at(secret + 16), b.y ^ secret_at(secret + 24));
    mixed.high ^= a.x + a.y;
}

__device__ __forceinline__ Digest digest_17_to_240(const Chunk& chunk, u64 n)
{
    Digest mixed = {n * PRIME64_1, 0};
    if (n <= 128) {
#pragma unroll 1
        for (u64 i = (n + 31) / 32; i-- > 0;) mix_pair(mixed, chunk, 16 * i, n - 16 * (i + 1), 32 * i);
    } else {
#pragma unroll 1
        for (u64 i = 0; i < n / 32; ++i) {
            if (i == 4) mixed = {avalanche(mixed.low), avalanche(mixed.high)};
            mix_pair(mixed, chunk, 32 * i, 32 * i + 16, i < 4 ? 32 * i : 32 * (i - 4) + 3);
        }
        if (n / 32 == 4) mixed = {avalanche(mixed.low), avalanche(mixed.high)};
        mix_pair(mixed, chunk, n - 16, n - 32, 136 - 17 - 16);
    }
    const u64 high = mixed.low * PRIME64_1 + mixed.high * PRIME64_4 + n * PRIME64_2;
    return {avalanche(mixed.low + mixed.high), 0 - avalanche(high)};
}

// Adds the stripe from region position q on; its first key is the secret from byte `secret` on.
__device__ __forceinline__ void add_stripe(Vector* lanes, const Chunk& chunk, u64 q, u64 secret)
{
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        accumulate(lanes[i], load_new(chunk, q + 16 * i, 16), secret_at(secret + 16 * i),
                   secret_at(secret + 16 * i + 8));
}

__device__ __forceinline__ u64 merge(const Vector* lanes, u64 secret, u64 start)
{
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        start += multiply_and_fold(lanes[i].x ^ secret_at(secret + 16 * i), lanes[i].y ^ secret_at(secret + 16 * i + 8));
    return avalanche(start);
}

__device__ __forceinline__ Digest digest_long(const Chunk& chunk, u64 n, const u64* state)
{
    Vector lanes[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) lanes[i] = {state[2 * i], state[2 * i + 1]};
    u64 q = whole_blocks(n) * BLOCK_NBYTES;
    const u64 stripes = (n - 1 - q) / STRIPE_NBYTES;
#pragma unroll 1
    for (u64 i = 0; i <= stripes; ++i, q += STRIPE_NBYTES) {
        const bool last = i == stripes;  // ends where the region does, and so overlaps what was added before
        add_stripe(lanes, chunk, last ? n - STRIPE_NBYTES : q, last ? 192 - 64 - 7 : 8 * i);
    }
    return {merge(lanes, 11, n * PRIME64_1), merge(lanes, 192 - 64 - 11, ~(n * PRIME64_2))};
}

// Grid: a thread per chunk; those that end their region write its digest. Such a chunk is at least 64 bytes long or
// holds the region from its start.
//   states   of gs_digest_chain
//   digests  2 words per region, its number's row: the low and the high half of XXH3-128
extern "C" __global__ void gs_digest_finish(const Chunk* chunks, u64 nchunks, const u64* states, u64* digests,
                                            const u32* gate)
{
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= nchunks || (gate && *gate)) return;
    const Chunk& chunk = chunks[thread];
    const u64 n = chunk.region_nbytes;
    if (chunk.offset + chunk.nbytes != n) return;
    Digest digest;
    if (n > SHORT_NBYTES) digest = digest_long(chunk, n, states + chunk.region * LANES);
    else if (n > 16) digest = digest_17_to_240(chunk, n);
    else if (n > 8) digest = digest_9_to_16(chunk, n);
    else if (n > 3) digest = digest_4_to_8(chunk, n);
    else if (n > 0) digest = digest_1_to_3(chunk, n);
    else digest = {avalanche_xxh64(SECRET[8] ^ SECRET[9]), avalanche_xxh64(SECRET[10] ^ SECRET[11])};
    digests[chunk.region * 2] = digest.low;
    digests[chunk.region * 2 + 1] = digest.high;
}
