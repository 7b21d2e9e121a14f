// The Python module legato._processor: the sets of kernels that this processor can run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <string>
#include <vector>

namespace nb = nanobind;

namespace {

#ifdef __x86_64__

constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;               // XFEATURE_XTILEDATA

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bf16");
}

// Linux lets a process use tiles only after it has asked for permission.
bool has_amx() {
    unsigned a, b, c, d;
    if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool has_tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);  // of bf16 and int8
    return has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

std::vector<std::string> instructions() {
    std::vector<std::string> found;
    if (has_amx()) found.push_back("amx");
    if (has_avx512()) found.push_back("avx512");
    if (has_avx2()) found.push_back("avx2");
    return found;
}

#else

std::vector<std::string> instructions() { return {"plain"}; }

#endif

}  // namespace

NB_MODULE(_processor, m) {
    m.def("instructions", &instructions, "The names of the sets that run here, fastest first.");
}
