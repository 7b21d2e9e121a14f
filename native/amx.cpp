#include "amx.hpp"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace legato {

namespace {

constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;               // XFEATURE_XTILEDATA

bool processor_has_it() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool has_vnni = c >> 11 & 1;
    const bool has_avx512 =
        (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1) && has_vnni;
    const bool has_amx_bf16 = (d >> 22 & 1) && (d >> 24 & 1);
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return false;
    const bool has_avx512_bf16 = a >> 5 & 1;
    return has_avx512 && has_amx_bf16 && has_avx512_bf16;
}

}  // namespace

bool has_amx() {
    static const bool has_it =
        processor_has_it() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return has_it;
}

}  // namespace legato
