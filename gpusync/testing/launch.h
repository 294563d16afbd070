// One launcher per kernel, called like cuLaunchKernel: an array of the addresses of the arguments.

// Returns 0, or 1 where the number of arguments is not the kernel's.
template <auto Kernel, class... A, std::size_t... I>
static int gs_run(unsigned int grid, unsigned int block, void** args, unsigned int nargs, void (*)(A...),
                  std::index_sequence<I...>)
{
    static_assert(((sizeof(A) == 8) && ...), "every parameter of a kernel is 8 bytes");
    if (nargs != sizeof...(A)) return 1;
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    [&](A... values) {
        for (unsigned int b = 0; b < grid; ++b) {
            blockIdx = {b, 0, 0};
            for (unsigned int t = 0; t < block; ++t) {
                threadIdx = {t, 0, 0};
                Kernel(values...);
            }
        }
    }(*(A*)args[I]...);
    return 0;
}

template <auto Kernel, class... A>
static int gs_run(unsigned int grid, unsigned int block, void** args, unsigned int nargs, void (*kernel)(A...))
{
    return gs_run<Kernel>(grid, block, args, nargs, kernel, std::index_sequence_for<A...>{});
}

#define GS_LAUNCHER(name)                                                                               \
    extern "C" int gs_launch_##name(unsigned int grid, unsigned int block, void** args, unsigned int n) \
    {                                                                                                   \
        return gs_run<&name>(grid, block, args, n, &name);                                              \
    }
