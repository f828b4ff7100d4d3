// Picks the instruction set and registers ops on request. Compiled without any -m flag: it runs on every CPU.
//
// On x86-64 two complete copies of the kernels (AVX-512, AVX2 with FMA) sit in one library and this file chooses at
// load. The alternative, -march=native with a recorded feature list, halves the compile time, but an image or a home
// directory built on one machine and used on another would lose its kernels. A CPU with neither set runs the
// references. Nothing registers by itself: torch holds one kernel per op, and the op registry in Python decides which.
#include "common.h"

using DI_ISA::Entry;
using torch::stable::detail::StableLibrary;

namespace {

using Find = const void* (*)(const char*);

#if defined(__x86_64__)
extern "C" const void* deepinfer_find_avx512(const char*);
extern "C" const void* deepinfer_find_avx2(const char*);

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
extern "C" const void* deepinfer_find_generic(const char*);
#endif

struct Isa {
  const char* name;
  Find find;
};

const Isa* available() {  // best first, ends with a null name
#if defined(__x86_64__)
  static const Isa both[] = {{"avx512", deepinfer_find_avx512}, {"avx2", deepinfer_find_avx2}, {nullptr, nullptr}};
  return has_avx512() ? both : has_avx2() ? both + 1 : both + 2;
#else
  static const Isa one[] = {{"generic", deepinfer_find_generic}, {nullptr, nullptr}};
  return one;
#endif
}

const Isa* chosen = nullptr;

const Entry* find(const char* op) {
  if (!chosen) chosen = available();
  return chosen->find ? static_cast<const Entry*>(chosen->find(op)) : nullptr;
}

}  // namespace

// Build stamp, read from the file by build.py; `used` keeps it.
__attribute__((used)) static const char deepinfer_stamp[] = "DEEPINFER_STAMP=" DI_STAMP;

#define DI_EXPORT extern "C" __attribute__((visibility("default")))

// Name of the instruction set in use, or null when this CPU has none that the library was built for.
DI_EXPORT const char* deepinfer_isa() {
  if (!chosen) chosen = available();
  return chosen->name;
}

// Takes another set before anything is registered (tests compare the sets); 0 when this CPU has it.
DI_EXPORT int deepinfer_use(const char* isa) {
  for (const Isa* i = available(); i->name; i++)
    if (std::strcmp(i->name, isa) == 0) return chosen = i, 0;
  return 1;
}

// One letter per argument of the op as compiled, or null for an unknown op: a stale library is caught before it is
// called.
DI_EXPORT const char* deepinfer_signature(const char* op) {
  const Entry* e = find(op);
  return e ? e->signature : nullptr;
}

// Registers the kernel of `op` for the CPU key of namespace di: 0 when done, 1 unknown op, 2 refused by torch.
DI_EXPORT int deepinfer_register(const char* op) {
  const Entry* e = find(op);
  if (!e) return 1;
  try {
    // Never deleted: that would take the kernel away again.
    auto* lib = new StableLibrary(StableLibrary::Kind::IMPL, "di", "CPU", __FILE__, __LINE__);
    lib->impl(e->name, e->boxed);
  } catch (const std::exception&) {
    return 2;
  }
  return 0;
}
