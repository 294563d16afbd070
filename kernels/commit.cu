// Commit: all lists of an update in one launch each, so that the pause does not grow with their number.
//   gs_live_sums, gs_compare_live   whether the live words under the lists are what was digested
//   gs_store                        the only kernel that stores to live memory
// tile_list[t] = number of the list that tile t of the launch belongs to; a list's tiles follow each other.

struct List {             // of one batch
    const Chunk* chunks;
    const u32* tile_chunk;
    const u32* firsts;
    const u16* index;
    const u16* value;
    const u64* checks;    // two per tile: the sums that the digest pass took of values and of live words
    u64 first_tile;       // number of the batch's first tile in the launch
};

// Region position of a tile's first byte.
__device__ __forceinline__ u64 tile_position(const Chunk& chunk, u64 tile)
{
    return chunk.offset + (tile - chunk.first_tile) * TILE_NBYTES;
}

// Whether the word at region position q is two bytes; the byte behind an odd region is not ours to touch.
__device__ __forceinline__ bool is_wide(const Chunk& chunk, u64 q)
{
    return chunk.unit == 2 && q + 1 < chunk.region_nbytes;
}

// sums[tile] += mix_entry(index, live word) over the tile's entries. sums is zeroed before. Grid: one block per tile.
extern "C" __global__ void gs_live_sums(const List* __restrict__ lists, const u32* __restrict__ tile_list, u64 ntiles,
                                        u64* __restrict__ sums)
{
    if (blockIdx.x >= ntiles) return;
    const List list = lists[tile_list[blockIdx.x]];
    const u64 tile = blockIdx.x - list.first_tile;
    const u64 end = list.firsts[tile + 1];
    u64 entry = (u64)list.firsts[tile] + threadIdx.x;
    if (entry >= end) return;
    const Chunk chunk = list.chunks[list.tile_chunk[tile]];
    const u64 begin = tile_position(chunk, tile);
    u64 sum = 0;
    for (; entry < end; entry += blockDim.x) {
        const u64 number = list.index[entry];
        const u64 q = begin + number * chunk.unit;
        const u8* live = live_at(chunk, q);
        sum += mix_entry(number, is_wide(chunk, q) ? *(const u16*)live : *live);
    }
    if (sum) atomicAdd(&sums[blockIdx.x], sum);
}

// *differs = 1 where a tile's sum is not the one that the digest pass took. Grid: one thread per tile.
extern "C" __global__ void gs_compare_live(const List* __restrict__ lists, const u32* __restrict__ tile_list,
                                           u64 ntiles, const u64* __restrict__ sums, u32* __restrict__ differs)
{
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= ntiles) return;
    const List list = lists[tile_list[i]];
    if (sums[i] != list.checks[2 * (i - list.first_tile) + 1]) *differs = 1;
}

// live word ^= value for every entry; once more takes it back. Grid: one block per tile.
extern "C" __global__ void gs_store(const List* __restrict__ lists, const u32* __restrict__ tile_list, u64 ntiles)
{
    if (blockIdx.x >= ntiles) return;
    const List list = lists[tile_list[blockIdx.x]];
    const u64 tile = blockIdx.x - list.first_tile;
    const u64 end = list.firsts[tile + 1];
    u64 entry = (u64)list.firsts[tile] + threadIdx.x;
    if (entry >= end) return;
    const Chunk chunk = list.chunks[list.tile_chunk[tile]];
    const u64 begin = tile_position(chunk, tile);
    for (; entry < end; entry += blockDim.x) {
        const u64 q = begin + list.index[entry] * chunk.unit;
        u8* live = live_at(chunk, q);
        if (is_wide(chunk, q)) *(u16*)live ^= list.value[entry];
        else *live ^= (u8)list.value[entry];
    }
}
