// How decoded bytes become a chunk's delta, oldest layer first. One launch holds at most one layer of a chunk.
//   gs_layers                              dense: xor deltas, and whole tensors
//   gs_payload_check, gs_payload_apply     overwrite and xor_sparse payloads, judged in full before any is applied
// Live memory is only read.

#define LAYER_SET 0   // delta = source: the oldest xor layer
#define LAYER_XOR 1   // delta ^= source
#define LAYER_FULL 2  // delta = source ^ live: source holds new bytes

#define TILE_THREADS 256u                   // of a block of gs_layers
#define TILE_VECTORS (u32)(TILE_NBYTES / 16)

struct Layer {
    const u8* source;
    u64 source_begin;   // tensor byte at source[0]
    u64 chunk;          // number of the chunk that it is for, whole
    u64 mode;
    u64 tensor_begin;   // tensor byte of region position 0
    u64 tensor_stride;  // tensor bytes from one run's begin to the next one's
    u64 first_tile;     // number of the chunk's first tile in this launch
};

// Stores the first nbytes of v, of 16, to an address that is a multiple of 16.
__device__ __forceinline__ void store_vector(u8* address, const Vector& v, u64 nbytes)
{
    if (nbytes == 16) {
        ulonglong2 w;
        w.x = v.x;
        w.y = v.y;
        *(ulonglong2*)address = w;
        return;
    }
    for (u64 i = 0; i < nbytes; ++i) address[i] = (u8)((i < 8 ? v.x >> 8 * i : v.y >> 8 * (i - 8)) & 0xFF);
}

// Whether a region's runs follow each other in the tensor without a gap.
__device__ __forceinline__ bool is_one_run(const Chunk& chunk, u64 tensor_stride)
{
    return chunk.run_nbytes == chunk.region_nbytes || chunk.run_nbytes == tensor_stride;
}

// Up to 16 bytes of a layer for region position q on, which may span runs.
__device__ __forceinline__ Vector load_layer(const Layer& layer, const Chunk& chunk, u64 q, u64 nbytes)
{
    const u8* first = layer.source + (layer.tensor_begin - layer.source_begin);
    if (is_one_run(chunk, layer.tensor_stride)) return load_vector(first + q, nbytes);
    u64 column = q % chunk.run_nbytes;
    const u8* run = first + q / chunk.run_nbytes * layer.tensor_stride;
    if (column + nbytes <= chunk.run_nbytes) return load_vector(run + column, nbytes);
    Vector v;
    v.x = v.y = 0;
    for (u64 i = 0; i < nbytes; ++i) {
        const u64 byte = run[column];
        if (i < 8) v.x |= byte << (8 * i);
        else v.y |= byte << (8 * (i - 8));
        if (++column == chunk.run_nbytes) {
            column = 0;
            run += layer.tensor_stride;
        }
    }
    return v;
}

// A whole tile: target = a, or a ^ b. b may be target. Four loads of each are under way before the first store.
__device__ __forceinline__ void set_tile(ulonglong2* target, const ulonglong2* a, const ulonglong2* b)
{
    for (u32 i = threadIdx.x; i < TILE_VECTORS; i += 4 * TILE_THREADS) {
        ulonglong2 v[4];  // stays in registers: every index is known when it is compiled
#pragma unroll
        for (u32 j = 0; j < 4; ++j) v[j] = a[i + j * TILE_THREADS];
        if (b) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const ulonglong2 w = b[i + j * TILE_THREADS];
                v[j].x ^= w.x;
                v[j].y ^= w.y;
            }
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) target[i + j * TILE_THREADS] = v[j];
    }
}

// The whole tile at chunk position `at`, if layer, live bytes where they are needed, and delta are aligned alike.
__device__ __forceinline__ bool set_aligned_tile(const Layer& layer, const Chunk& chunk, u8* delta, u64 at)
{
    const u64 q = chunk.offset + at;
    if (bytes_left(chunk, at, TILE_NBYTES) < TILE_NBYTES || !is_one_run(chunk, layer.tensor_stride)) return false;
    const u8* a = layer.source + (layer.tensor_begin - layer.source_begin) + q;
    const u8* b = 0;
    if (layer.mode == LAYER_XOR) b = delta + at;
    if (layer.mode == LAYER_FULL) {
        if (chunk.run_nbytes != chunk.region_nbytes) return false;
        b = chunk.live + q;
    }
    if (((u64)a | (u64)b) & 15) return false;
    set_tile((ulonglong2*)(delta + at), (const ulonglong2*)a, (const ulonglong2*)b);
    return true;
}

// delta[q - offset] from tensor byte tensor_begin + q / run_nbytes * tensor_stride + q % run_nbytes, for the chunk's
// region positions q. source holds all of those bytes, at any alignment; no other byte of it is read.
// Grid: one block of 256 threads per tile; tile_layer[t] = number of the layer of tile t of the launch.
extern "C" __global__ void gs_layers(const Layer* __restrict__ layers, const u32* __restrict__ tile_layer, u64 ntiles,
                                     Chunk* chunks, const u32* gate)
{
    if (gate && *gate) return;
    const u64 tile = blockIdx.x;
    if (tile >= ntiles) return;
    const Layer layer = layers[tile_layer[tile]];
    const Chunk chunk = chunks[layer.chunk];
    u8* delta = (u8*)chunk.delta;
    const u64 begin = (tile - layer.first_tile) * TILE_NBYTES;
    if (set_aligned_tile(layer, chunk, delta, begin)) return;
    for (u32 i = threadIdx.x; i < TILE_VECTORS; i += TILE_THREADS) {
        const u64 at = begin + 16 * i;
        const u64 left = bytes_left(chunk, at, 16);
        if (!left) return;
        Vector v = load_layer(layer, chunk, chunk.offset + at, left);
        if (layer.mode != LAYER_SET) {
            const Vector w = layer.mode == LAYER_XOR ? load_vector(delta + at, left)
                                                     : load_live(chunk, chunk.offset + at, left);
            v.x ^= w.x;
            v.y ^= w.y;
        }
        store_vector(delta + at, v, left);
    }
}

#define OVERWRITE 1          // u32 count, u32 positions, new bytes
#define XOR_SPARSE 2         // u64 count, u64 positions that increase, new XOR old bytes
#define ITEM_ENTRIES 4096ull
#define REFUSED_PAYLOAD 2u   // bit of `bad`

// A decoded payload, and the chunk that it is for. Count, positions and bytes follow each other without a gap.
struct Payload {
    const u8* data;      // 8-byte aligned
    u64 nbytes;
    u64 form;
    u64 tensor_nbytes;
    u32* bitmap;         // overwrite: a bit per byte of the tensor, zeroed before the check
    u64 tensor;          // its number in `bad`
    u64 chunk;
    u64 tensor_begin;    // as a Layer's
    u64 tensor_stride;
    u64 first_item;      // number in this launch of the first of its items: 4096 entries each, at least one item
};

// Bytes of its count, and of each position.
__device__ __forceinline__ u64 position_nbytes(const Payload& payload)
{
    return payload.form == OVERWRITE ? 4 : 8;
}

// Number of entries that the payload's size has room for: nothing is read beyond them, whatever its count says.
__device__ __forceinline__ u64 entry_room(const Payload& payload)
{
    const u64 width = position_nbytes(payload);
    return payload.nbytes < width ? 0 : (payload.nbytes - width) / (width + 1);
}

// The i-th position; -1 is the count, which is as wide.
__device__ __forceinline__ u64 payload_number(const Payload& payload, u64 i)
{
    return payload.form == OVERWRITE ? ((const u32*)payload.data)[i + 1] : ((const u64*)payload.data)[i + 1];
}

__device__ __forceinline__ bool is_of_its_size(const Payload& payload, u64 room)
{
    const u64 width = position_nbytes(payload);
    return payload.nbytes == width + room * (width + 1) && payload_number(payload, ~0ull) == room;
}

// Whether entry i may be applied. Marks its byte in an overwrite's bitmap.
__device__ __forceinline__ bool is_valid_entry(const Payload& payload, u64 i)
{
    const u64 position = payload_number(payload, i);
    if (position >= payload.tensor_nbytes) return false;
    if (payload.form == XOR_SPARSE) return i == 0 || payload_number(payload, i - 1) < position;
    const u32 bit = 1u << (position & 31);
    return !(atomicOr(&payload.bitmap[position >> 5], bit) & bit);
}

// bad[tensor] |= 2 and *gate = 1 for a payload whose count and size disagree, or with a position that is outside of
// the tensor, comes twice, or (xor_sparse) does not increase. One refusal may hide others of the launch.
// Grid: one block per item; item_payload[i] = number of the payload of item i.
extern "C" __global__ void gs_payload_check(const Payload* __restrict__ payloads, const u32* __restrict__ item_payload,
                                            u64 nitems, u32* bad, u32* gate)
{
    if (gate && *gate) return;
    const u64 item = blockIdx.x;
    if (item >= nitems) return;
    const Payload payload = payloads[item_payload[item]];
    const u64 room = entry_room(payload);
    bool refused = !is_of_its_size(payload, room);
    const u64 begin = (item - payload.first_item) * ITEM_ENTRIES;
    const u64 end = begin + ITEM_ENTRIES < room ? begin + ITEM_ENTRIES : room;
    for (u64 i = begin + threadIdx.x; i < end && !refused; i += blockDim.x) refused = !is_valid_entry(payload, i);
    if (!refused) return;
    atomicOr(&bad[payload.tensor], REFUSED_PAYLOAD);
    if (gate) atomicOr(gate, 1u);
}

// Chunk position of a tensor byte; the chunk's nbytes or more if it holds no such byte.
__device__ __forceinline__ u64 chunk_position(const Chunk& chunk, u64 tensor_begin, u64 tensor_stride, u64 position)
{
    if (position < tensor_begin) return chunk.nbytes;
    u64 q = position - tensor_begin;
    if (!is_one_run(chunk, tensor_stride)) {
        const u64 column = q % tensor_stride;
        if (column >= chunk.run_nbytes) return chunk.nbytes;
        q = q / tensor_stride * chunk.run_nbytes + column;
    }
    return q - chunk.offset;  // before the chunk: wraps round to more than any nbytes
}

// delta ^= byte (xor_sparse), or delta = byte ^ live (overwrite), for the entries that fall into the chunk; their
// positions are unique, so no two threads meet. Only behind a check that refused nothing. Grid: one block per item.
extern "C" __global__ void gs_payload_apply(const Payload* __restrict__ payloads, const u32* __restrict__ item_payload,
                                            u64 nitems, Chunk* chunks, const u32* gate)
{
    if (gate && *gate) return;
    const u64 item = blockIdx.x;
    if (item >= nitems) return;
    const Payload payload = payloads[item_payload[item]];
    const Chunk chunk = chunks[payload.chunk];
    u8* delta = (u8*)chunk.delta;
    const u64 room = entry_room(payload);
    const u8* bytes = payload.data + (room + 1) * position_nbytes(payload);
    const u64 begin = (item - payload.first_item) * ITEM_ENTRIES;
    const u64 end = begin + ITEM_ENTRIES < room ? begin + ITEM_ENTRIES : room;
    for (u64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const u64 position = payload_number(payload, i);
        const u64 at = chunk_position(chunk, payload.tensor_begin, payload.tensor_stride, position);
        if (at >= chunk.nbytes) continue;
        const u8 old = payload.form == OVERWRITE ? *live_at(chunk, chunk.offset + at) : delta[at];
        delta[at] = bytes[i] ^ old;
    }
}
