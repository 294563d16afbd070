// What the device checks about nvCOMP: a status and a size per frame, and that nothing was written behind an output.
//   gs_check_statuses                    sets the gate that stops all that is queued behind a failed decode
//   gs_fill_guards, gs_check_guards      zones of 256 bytes, at any address, that must stay as they were filled

#define FAILED_DECODE 1u  // bit of `bad`

// bad[frame_tensor[i]] |= 1 and *gate = 1 for every frame i < nframes with a status other than 0, or of another size
// than expected. statuses and actual are nvCOMP's outputs (nvcompStatus_t, size_t). Grid: one thread per frame.
extern "C" __global__ void gs_check_statuses(const int* __restrict__ statuses, const u64* __restrict__ actual,
                                             const u64* __restrict__ expected, const u32* __restrict__ frame_tensor,
                                             u64 nframes, u32* bad, u32* gate)
{
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= nframes || (statuses[i] == 0 && actual[i] == expected[i])) return;
    atomicOr(&bad[frame_tensor[i]], FAILED_DECODE);
    if (gate) atomicOr(gate, 1u);
}

// Differs from byte to byte and from zone to zone, so that copies of neighbouring memory show, not only constants.
__device__ __forceinline__ u8 guard_byte(u64 address)
{
    return (u8)(address * 0x9E3779B185EBCA87ull >> 56);
}

// Grid: one block of 256 threads per zone, a thread per byte. zones holds addresses.
extern "C" __global__ void gs_fill_guards(const u64* __restrict__ zones, u64 nzones)
{
    const u64 zone = blockIdx.x;
    if (zone >= nzones) return;
    const u64 address = zones[zone] + threadIdx.x;
    *(u8*)address = guard_byte(address);
}

// *damaged = 1 where a zone is not as gs_fill_guards left it. Grid: as gs_fill_guards.
extern "C" __global__ void gs_check_guards(const u64* __restrict__ zones, u64 nzones, u32* damaged)
{
    const u64 zone = blockIdx.x;
    if (zone >= nzones) return;
    const u64 address = zones[zone] + threadIdx.x;
    if (*(const u8*)address != guard_byte(address)) *damaged = 1;
}
