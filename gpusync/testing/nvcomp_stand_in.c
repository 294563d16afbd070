/* A stand-in for libnvcomp's batched zstd decoder, for machines without a GPU: the symbols, argument lists and by-value
 * options of nvcomp/zstd.h 6.0 (of 5.3 with -DSTAND_IN_MAJOR=5), where every device pointer is a host pointer, the work
 * is done before the call returns, and libzstd decodes. Build with `gcc -shared -fPIC` (C and C++ alike) and, before
 * glibc 2.34, `-ldl`. libzstd is opened at load time, so that no headers are needed.
 *
 * What the real libraries do, observed on host calls to 6.0.0.12 and 5.3.0.16 without a driver, and mimicked:
 *   - temp size = 3 * total + 3468 * max(2 * n, total / 65536), for n below 2^30; a chunk of 2^31 and more: 18
 *   - alignments 1, 1 and 8; backends 0 and 2 are accepted, others 10; reserved option bytes are not looked at
 *   - DecompressAsync judges in this order: backend (10), null pointers (10; temp only where temp_bytes is not 0;
 *     statuses from 6.0 on), addresses of pointer arrays, sizes and temp off by 8, statuses off by 4 (17),
 *     n of 2^31 and more (21)
 * What their header documents, and is mimicked: a short output capacity gives that chunk status 12.
 *
 * What is assumption, chosen so that a careless caller fails here:
 *   - a chunk is exactly one zstd frame: another magic (skippable frames too), a truncated frame, and bytes after the
 *     frame give status 12. The real decoder may read past a truncated frame and may ignore what follows a whole one.
 *   - corrupt content gives status 12. The header says undefined behaviour.
 *   - a frame's checksum is not verified
 *   - a chunk that failed has an actual size of 0, and its output may be partly written
 *   - a chunk whose capacity or compressed size is over 2^31 - 1 gives status 18
 *   - temp_bytes below the temp size for the capacities' sum, or missing sizes of the inputs: 10. The real libraries
 *     do not look at either on the host.
 *   - scratch is written all over (one byte in 4096, and the last)
 *   - status 11 where libzstd.so.1 cannot be opened
 *
 * stand_in_fault, which tests set, makes it misbehave on the last chunk of every batch. */

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef STAND_IN_MAJOR
#define STAND_IN_MAJOR 6
#endif

#ifdef __cplusplus
#define EXPORT extern "C" __attribute__((visibility("default")))
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum {
    SUCCESS = 0,
    INVALID_VALUE = 10,
    NOT_SUPPORTED = 11,
    CANNOT_DECOMPRESS = 12,
    MISALIGNED = 17,
    CHUNK_TOO_LARGE = 18,
    BATCH_TOO_LARGE = 21,
    CUDA_ERROR = 1000
};

enum {
    FAULT_NONE = 0,
    FAULT_AFTER_OUTPUT = 1,   /* one byte after the output's capacity is changed */
    FAULT_BEFORE_OUTPUT = 2,  /* one byte before the output is changed */
    FAULT_AFTER_TEMP = 3,     /* one byte after the scratch is changed */
    FAULT_WRONG_BYTE = 4,     /* one decoded byte is wrong, the status says success */
    FAULT_WRONG_SIZE = 5,     /* the actual size is one too large */
    FAULT_STATUS = 6,         /* status 12 for a frame that was decoded */
    FAULT_CALL = 7            /* the call itself returns 1000, and nothing is decoded */
};

#define MAX_CHUNK_NBYTES ((1ull << 31) - 1)
#define ZSTD_MAGIC 0xFD2FB528u
#define ZSTD_IGNORE_CHECKSUM 1002 /* ZSTD_d_forceIgnoreChecksum */

typedef struct {
    int backend;
    char reserved[60];
} Options;

typedef struct {
    size_t input, output, temp;
} Alignments;

typedef struct {
    uint32_t version, cudart_version;
} Properties;

EXPORT int stand_in_fault;
int stand_in_fault = FAULT_NONE;

static struct {
    void* (*create)(void);
    size_t (*destroy)(void*);
    size_t (*set)(void*, int, int);
    size_t (*decompress)(void*, void*, size_t, const void*, size_t);
    size_t (*frame_nbytes)(const void*, size_t);
    unsigned (*is_error)(size_t);
} zstd;

static int find(void* library, const char* name, void* slot)
{
    void* found = dlsym(library, name);
    memcpy(slot, &found, sizeof found);
    return found != NULL;
}

__attribute__((constructor)) static void open_zstd(void)
{
    void* library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library || !find(library, "ZSTD_freeDCtx", &zstd.destroy) ||
        !find(library, "ZSTD_DCtx_setParameter", &zstd.set) ||
        !find(library, "ZSTD_decompressDCtx", &zstd.decompress) ||
        !find(library, "ZSTD_findFrameCompressedSize", &zstd.frame_nbytes) ||
        !find(library, "ZSTD_isError", &zstd.is_error) || !find(library, "ZSTD_createDCtx", &zstd.create))
        zstd.create = NULL;
}

static int is_backend(const Options* options) { return options->backend == 0 || options->backend == 2; }

static size_t temp_nbytes(size_t n, size_t total)
{
    const size_t blocks = total / 65536 > 2 * n ? total / 65536 : 2 * n;
    return 3 * total + 3468 * blocks;
}

static int temp_size(size_t n, size_t max_chunk, const Options* options, size_t* temp, size_t total)
{
    if (!is_backend(options) || !temp) return INVALID_VALUE;
    if (max_chunk > MAX_CHUNK_NBYTES) return CHUNK_TOO_LARGE;
    *temp = temp_nbytes(n, total);
    return SUCCESS;
}

EXPORT int nvcompGetProperties(Properties* properties)
{
    if (!properties) return INVALID_VALUE;
    properties->version = STAND_IN_MAJOR == 5 ? 5300 : 6000;
    properties->cudart_version = 0;
    return SUCCESS;
}

EXPORT int nvcompBatchedZstdDecompressGetRequiredAlignments(Options options, Alignments* alignments)
{
    if (!is_backend(&options) || !alignments) return INVALID_VALUE;
    alignments->input = 1;
    alignments->output = 1;
    alignments->temp = 8;
    return SUCCESS;
}

#if STAND_IN_MAJOR == 5
EXPORT int nvcompBatchedZstdDecompressGetTempSizeAsync(size_t n, size_t max_chunk, Options options, size_t* temp,
                                                       size_t total)
{
    return temp_size(n, max_chunk, &options, temp, total);
}
#else
EXPORT int nvcompBatchedZstdDecompressGetTempSize(size_t n, size_t max_chunk, Options options, size_t* temp,
                                                  size_t total, void* stream)
{
    (void)stream;
    return temp_size(n, max_chunk, &options, temp, total);
}
#endif

/* Decodes one chunk; returns its status and sets its actual size. */
static int decode(void* context, const void* in, size_t in_nbytes, void* out, size_t capacity, size_t* actual)
{
    uint32_t magic;
    size_t nbytes;
    *actual = 0;
    if (in_nbytes > MAX_CHUNK_NBYTES || capacity > MAX_CHUNK_NBYTES) return CHUNK_TOO_LARGE;
    if (in_nbytes < sizeof magic) return CANNOT_DECOMPRESS;
    memcpy(&magic, in, sizeof magic);
    if (magic != ZSTD_MAGIC || zstd.frame_nbytes(in, in_nbytes) != in_nbytes) return CANNOT_DECOMPRESS;
    nbytes = zstd.decompress(context, out, capacity, in, in_nbytes);
    if (zstd.is_error(nbytes)) return CANNOT_DECOMPRESS;
    *actual = nbytes;
    return SUCCESS;
}

static void misbehave(unsigned char* out, size_t capacity, size_t* actual, int* status, unsigned char* after_temp)
{
    if (stand_in_fault == FAULT_AFTER_OUTPUT) out[capacity] ^= 1;
    if (stand_in_fault == FAULT_BEFORE_OUTPUT) out[-1] ^= 1;
    if (stand_in_fault == FAULT_AFTER_TEMP) *after_temp ^= 1;
    if (stand_in_fault == FAULT_WRONG_BYTE && *actual) out[*actual - 1] ^= 1;
    if (stand_in_fault == FAULT_WRONG_SIZE) *actual += 1;
    if (stand_in_fault == FAULT_STATUS && status) *status = CANNOT_DECOMPRESS;
}

EXPORT int nvcompBatchedZstdDecompressAsync(const void* const* in, const size_t* in_nbytes, const size_t* capacities,
                                            size_t* actual, size_t n, void* temp, size_t temp_bytes, void* const* out,
                                            Options options, int* statuses, void* stream)
{
    const uintptr_t by_8 =
        (uintptr_t)in | (uintptr_t)capacities | (uintptr_t)actual | (uintptr_t)temp | (uintptr_t)out;
    unsigned char* const scratch = (unsigned char*)temp;
    size_t total = 0, i;
    void* context;
    (void)stream;
    if (!is_backend(&options) || !in || !capacities || !actual || !out) return INVALID_VALUE;
    if ((!temp && temp_bytes) || (STAND_IN_MAJOR > 5 && !statuses)) return INVALID_VALUE;
    if (by_8 & 7 || (uintptr_t)statuses & 3) return MISALIGNED;
    if (n >> 31) return BATCH_TOO_LARGE;
    if (!in_nbytes) return INVALID_VALUE;
    for (i = 0; i < n; ++i) total += capacities[i];
    if (temp_bytes < temp_nbytes(n, total)) return INVALID_VALUE;
    if (!zstd.create) return NOT_SUPPORTED;
    if (stand_in_fault == FAULT_CALL) return CUDA_ERROR;

    for (i = 0; i < temp_bytes; i += 4096) scratch[i] = 0xA5;
    if (temp_bytes) scratch[temp_bytes - 1] = 0xA5;
    context = zstd.create();
    if (!context || zstd.is_error(zstd.set(context, ZSTD_IGNORE_CHECKSUM, 1))) return NOT_SUPPORTED;
    for (i = 0; i < n; ++i) {
        const int status = decode(context, in[i], in_nbytes[i], out[i], capacities[i], &actual[i]);
        if (statuses) statuses[i] = status;
    }
    if (n && stand_in_fault != FAULT_NONE)
        misbehave((unsigned char*)out[n - 1], capacities[n - 1], &actual[n - 1],
                  statuses ? &statuses[n - 1] : NULL, scratch + temp_bytes);
    zstd.destroy(context);
    return SUCCESS;
}
