// Launches of the kernels on the CPU: the kernels by name, and a loop over the threads of a grid.
// The kernels have no barriers, so the threads run one after the other, each to its end.
#define KV_HOST_SHIM
#include "kvtide.cu"

namespace {

template <int... I>
struct Indexes {};

template <int N, int... I>
struct IndexesTo : IndexesTo<N - 1, N - 1, I...> {};

template <int... I>
struct IndexesTo<0, I...> {
    typedef Indexes<I...> Type;
};

template <typename... Parameters, int... I>
void call(void (*kernel)(Parameters...), void** parameters, Indexes<I...>) {
    kernel(*(Parameters*)parameters[I]...);
}

// Calls a kernel with parameters as a driver takes them: a pointer to each.
template <typename Type, Type KERNEL>
struct Thunk;

template <typename... Parameters, void (*KERNEL)(Parameters...)>
struct Thunk<void (*)(Parameters...), KERNEL> {
    static void run(void** parameters) {
        call(KERNEL, parameters, typename IndexesTo<sizeof...(Parameters)>::Type());
    }

    static int parameter_bytes(unsigned int index) {
        const int bytes[] = {(int)sizeof(Parameters)...};
        return index < sizeof...(Parameters) ? bytes[index] : -1;
    }
};

struct Named {
    const char* name;
    void (*run)(void**);
    int (*parameter_bytes)(unsigned int);
};

#define KERNEL(name)                                      \
    {                                                     \
        #name, Thunk<decltype(&name), name>::run,         \
            Thunk<decltype(&name), name>::parameter_bytes \
    }

const Named KERNELS[] = {
    KERNEL(kvtide_gather),      KERNEL(kvtide_scatter),    KERNEL(kvtide_sum_stripes),
    KERNEL(kvtide_sum_fold),    KERNEL(kvtide_sum_finish), KERNEL(kvtide_fill),
    KERNEL(kvtide_peaks),       KERNEL(kvtide_scales),     KERNEL(kvtide_to_fp8),
    KERNEL(kvtide_from_fp8),    KERNEL(kvtide_to_int8),    KERNEL(kvtide_from_int8),
};

const Named* find(const char* name, unsigned long bytes) {
    for (const Named& kernel : KERNELS) {
        if (__builtin_strlen(kernel.name) == bytes &&
            __builtin_memcmp(kernel.name, name, bytes) == 0) {
            return &kernel;
        }
    }
    return nullptr;
}

}  // namespace

// Runs the named kernel; `parameters` has a pointer to each parameter. -1: no such kernel.
extern "C" int kvtide_cpu_launch(
    const char* name,
    unsigned long name_bytes,
    const unsigned int* grid,
    const unsigned int* block,
    void** parameters
) {
    const Named* kernel = find(name, name_bytes);
    if (kernel == nullptr) {
        return -1;
    }
    gridDim = Dim3{grid[0], grid[1], grid[2]};
    blockDim = Dim3{block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++) {
        for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++) {
            for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++) {
                for (threadIdx.z = 0; threadIdx.z < block[2]; threadIdx.z++) {
                    for (threadIdx.y = 0; threadIdx.y < block[1]; threadIdx.y++) {
                        for (threadIdx.x = 0; threadIdx.x < block[0]; threadIdx.x++) {
                            kernel->run(parameters);
                        }
                    }
                }
            }
        }
    }
    return 0;
}

// Bytes of a kernel's parameter; -1 behind the last one, and for an unknown kernel.
extern "C" int kvtide_cpu_parameter_bytes(
    const char* name, unsigned long name_bytes, unsigned int index
) {
    const Named* kernel = find(name, name_bytes);
    return kernel == nullptr ? -1 : kernel->parameter_bytes(index);
}
