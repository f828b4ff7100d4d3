// The op tables of one instruction set behind one C function, so that register.cpp needs no namespace of it.
#include "common.h"

#define DI_JOIN2(a, b) a##b
#define DI_JOIN(a, b) DI_JOIN2(a, b)

extern "C" const void* DI_JOIN(deepinfer_find_, DI_ISA)(const char* name) {
  using namespace DI_ISA;
  for (const Entry* family : {linear_ops, moe_ops, attention_ops, indexer_ops, rowwise_ops, cache_ops})
    for (const Entry* e = family; e->name; e++)
      if (std::strcmp(e->name, name) == 0) return e;
  return nullptr;
}
