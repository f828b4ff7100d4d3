// What every op of the CPU library needs besides arithmetic: tensor views, boxing, scratch memory, threads.
//
// Belongs here: the border to torch (stable C ABI only) and memory. Does not belong here: vectors and formats (simd.h).
// Everything lives in a namespace per instruction set (DI_ISA): build.py compiles each family once for each of them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#define DI_INLINE inline __attribute__((always_inline))

namespace DI_ISA {

using i64 = int64_t;
using u8 = uint8_t;
using bf16 = uint16_t;  // bits

inline void check(bool ok, const char* message) {
  if (__builtin_expect(!ok, 0)) throw std::runtime_error(message);
}

inline void torch_ok(int32_t code) {
  if (__builtin_expect(code != 0, 0)) throw std::runtime_error("a torch C API call failed in a native op");
}

// ---- tensors ----

enum class Type { f32, bf16, e4m3, u8, i32, i64, boolean, other };

struct TypeCodes {  // torch's numbers for them
  int32_t code[7];
  Type type[64];
  TypeCodes()
      : code{aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float8_e4m3fn(),
             aoti_torch_dtype_uint8(),   aoti_torch_dtype_int32(),    aoti_torch_dtype_int64(),
             aoti_torch_dtype_bool()} {
    std::fill(type, type + 64, Type::other);
    for (int i = 0; i < 7; i++) type[code[i] & 63] = Type(i);
  }
};
// Asked at the first call, not when the library loads: code that a static initialiser runs must suit every CPU.
inline const TypeCodes& types() {
  static const TypeCodes codes;
  return codes;
}

// An owned handle with its metadata read once (torch::stable::Tensor asks through the C ABI every time).
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    if (!handle) return;
    int32_t code = 0;
    i64 dims = 0;
    torch_ok(aoti_torch_get_dtype(handle, &code));
    torch_ok(aoti_torch_get_dim(handle, &dims));
    torch_ok(aoti_torch_get_sizes(handle, &sizes_));
    torch_ok(aoti_torch_get_strides(handle, &strides_));
    torch_ok(aoti_torch_get_data_ptr(handle, &data_));
    dim_ = static_cast<int>(dims);
    if (code >= 0 && code < 64) type_ = types().type[code];
  }
  Tensor(Tensor&& o) noexcept { swap(o); }
  Tensor& operator=(Tensor&& o) noexcept {
    swap(o);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  static Tensor empty(std::initializer_list<i64> sizes, Type type) {
    return empty(sizes.begin(), int(sizes.size()), type);
  }
  static Tensor empty(const i64* sizes, int dim, Type type) {
    i64 strides[8] = {};
    i64 n = 1;
    for (int i = dim - 1; i >= 0; i--) strides[i] = n, n *= std::max<i64>(sizes[i], 1);
    AtenTensorHandle h = nullptr;
    torch_ok(
        aoti_torch_empty_strided(dim, sizes, strides, types().code[int(type)], aoti_torch_device_type_cpu(), 0, &h));
    return Tensor(h);
  }
  static Tensor like(const Tensor& t) { return empty(t.sizes_, t.dim_, t.type_); }

  bool defined() const { return handle_ != nullptr; }
  Type type() const { return type_; }
  bool is(Type t) const { return type_ == t; }
  int dim() const { return dim_; }
  const i64* sizes() const { return sizes_; }
  i64 size(int i) const { return sizes_[i < 0 ? dim_ + i : i]; }
  i64 stride(int i) const { return strides_[i < 0 ? dim_ + i : i]; }
  i64 numel() const {
    i64 n = 1;
    for (int i = 0; i < dim_; i++) n *= sizes_[i];
    return n;
  }
  template <class T>
  T* data() const {
    return static_cast<T*>(data_);
  }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  bool is_contiguous() const {
    i64 n = 1;
    for (int i = dim_ - 1; i >= 0; i--) {
      if (sizes_[i] != 1 && strides_[i] != n) return numel() == 0;
      n *= sizes_[i];
    }
    return true;
  }
  // Replaces a strided tensor by a contiguous copy; for inputs only.
  Tensor& contiguous() {
    if (!is_contiguous()) {
      Tensor copy = like(*this);
      torch_ok(aoti_torch_copy_(copy.handle_, handle_, 0));
      swap(copy);
    }
    return *this;
  }
  // Distance of rows of a [..., K] tensor seen as [rows, K]; copies when there is no single distance.
  i64 row_stride() {
    bool ok = dim_ >= 1 && (size(-1) == 1 || stride(-1) == 1);
    for (int i = 0; ok && i + 2 < dim_; i++) ok = sizes_[i] == 1 || strides_[i] == strides_[i + 1] * sizes_[i + 1];
    if (!ok) contiguous();
    return dim_ > 1 ? strides_[dim_ - 2] : size(-1);
  }
  i64 rows() const {
    i64 n = 1;
    for (int i = 0; i + 1 < dim_; i++) n *= sizes_[i];
    return n;
  }

 private:
  void swap(Tensor& o) noexcept {
    std::swap(handle_, o.handle_), std::swap(data_, o.data_), std::swap(sizes_, o.sizes_);
    std::swap(strides_, o.strides_), std::swap(dim_, o.dim_), std::swap(type_, o.type_);
  }
  AtenTensorHandle handle_ = nullptr;
  void* data_ = nullptr;
  i64 *sizes_ = nullptr, *strides_ = nullptr;
  int dim_ = 0;
  Type type_ = Type::other;
};

struct Maybe : Tensor {  // Tensor? of a schema
  using Tensor::Tensor;
};

// int32 vector of `n` elements, made contiguous.
inline const int32_t* indices(Tensor& t, i64 n, const char* message) {
  check(t.is(Type::i32) && t.numel() == n, message);
  return t.contiguous().data<int32_t>();
}

inline bool is_float(const Tensor& t) { return t.is(Type::f32) || t.is(Type::bf16); }

// ---- boxing ----

template <class T>
struct Arg {  // int, float, bool
  static T take(StableIValue v) { return torch::stable::detail::to<T>(v); }
};
template <>
struct Arg<Tensor> {
  static Tensor take(StableIValue v) { return Tensor(torch::stable::detail::to<AtenTensorHandle>(v)); }
};
template <>
struct Arg<Maybe> {
  static Maybe take(StableIValue v) {
    return Maybe(torch::stable::detail::to<std::optional<AtenTensorHandle>>(v).value_or(nullptr));
  }
};

template <class T>
constexpr char letter() {
  if (std::is_same_v<T, Tensor>) return 'T';
  if (std::is_same_v<T, Maybe>) return 'O';
  if (std::is_same_v<T, double>) return 'f';
  return std::is_same_v<T, bool> ? 'b' : 'i';
}

template <auto fn>
struct Box;

template <class R, class... A, R (*fn)(A...)>
struct Box<fn> {
  static constexpr char signature[] = {letter<std::decay_t<A>>()..., 0};

  template <size_t... I>
  static void run(StableIValue* stack, std::index_sequence<I...>) {
    std::tuple<std::decay_t<A>...> args{Arg<std::decay_t<A>>::take(stack[I])...};
    if constexpr (std::is_void_v<R>) {
      fn(std::get<I>(args)...);
    } else if constexpr (std::is_same_v<R, Tensor>) {
      stack[0] = torch::stable::detail::from(fn(std::get<I>(args)...).release());
    } else {
      auto out = fn(std::get<I>(args)...);
      std::apply(
          [&](auto&... t) {
            int i = 0;
            ((stack[i++] = torch::stable::detail::from(t.release())), ...);
          },
          out);
    }
  }
  static void boxed(StableIValue* stack, uint64_t, uint64_t) { run(stack, std::index_sequence_for<A...>{}); }
};

struct Entry {
  const char* name;
  void (*boxed)(StableIValue*, uint64_t, uint64_t);
  const char* signature;  // one letter per argument, compared with the schema before registering
};

extern const Entry linear_ops[], moe_ops[], attention_ops[], indexer_ops[], rowwise_ops[], cache_ops[];

#define DI_OP(name) {#name, Box<&name>::boxed, Box<&name>::signature}
#define DI_OPS_END {nullptr, nullptr, nullptr}

// ---- scratch memory ----

// Grow-only buffers per thread; one purpose per slot, so that two users of an op never share one.
enum Slot { kX, kTile, kPart, kOut, kActs, kDown, kPairs, kKeys, kQuery, kScore, kValues, kIds, kNumSlots };

struct Buffer {
  void* p = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(p); }
};

template <class T>
T* scratch(Slot slot, i64 count) {
  static thread_local Buffer buffers[kNumSlots];
  Buffer& b = buffers[slot];
  size_t bytes = static_cast<size_t>(std::max<i64>(count, 1)) * sizeof(T);
  if (bytes > b.size) {
    std::free(b.p);
    b.size = (bytes + 4095) & ~size_t(4095);
    b.p = std::aligned_alloc(64, b.size);
    if (!b.p) b.size = 0, throw std::bad_alloc();
  }
  return static_cast<T*>(b.p);
}

// ---- threads ----

// Waking the pool costs microseconds on an idle machine, but milliseconds when other processes hold its cores.
constexpr double kMinParallelNs = 100e3;
constexpr double kMinChunkNs = 20e3;

inline i64 num_threads() {
  uint32_t n = 1;
  torch_ok(torch_get_num_threads(&n));
  return n;
}

// f(begin, end) over [0, n) in chunks handed out as threads get free. No result may depend on the chunks.
template <class F>
void parallel(i64 n, double ns_per_item, F&& f) {
  if (n <= 0) return;
  double total = ns_per_item * static_cast<double>(n);
  i64 threads = n == 1 || total < kMinParallelNs ? 1 : std::min(num_threads(), n);
  if (threads <= 1) return f(i64(0), n);
  i64 chunk = std::max<i64>(1, std::min<i64>(i64(kMinChunkNs / ns_per_item), n / (2 * threads)));
  struct Shared {
    std::atomic<i64> next{0};
    i64 n, chunk;
    F* f;
  } s;
  s.n = n, s.chunk = chunk, s.f = &f;
  auto work = [](i64, i64, void* p) {
    auto& s = *static_cast<Shared*>(p);
    for (i64 i; (i = s.next.fetch_add(s.chunk, std::memory_order_relaxed)) < s.n;)
      (*s.f)(i, std::min(i + s.chunk, s.n));
  };
  torch_ok(torch_parallel_for(0, threads, 1, work, &s));
}

}  // namespace DI_ISA
