// Records, writes to rings and pages, pair pooling, Engram look-back and rows (deepinfer/ops/cache.py, engram.py).
//
// Every index is checked before the first byte is written: a bad one raises and leaves memory as it was.
#include "gemm.h"

namespace DI_ISA {
namespace {

// ---- packing ----

template <class T>
void pack_fp8_row(const T* in, i64 d, u8* out) {
  for (i64 b = 0; b < d / 32; b++) {
    vi lo, hi;
    out[d + b] = quant_block_fp8(load(in + b * 32), load(in + b * 32 + 16), lo, hi);
    store_u8(out + b * 32, lo);
    store_u8(out + b * 32 + 16, hi);
  }
}

DI_INLINE void pack_nibbles(vi lo, vi hi, u8* out) {  // 32 codes in column order -> 16 bytes, even columns low
  u8 codes[32];
  uint16_t pairs[16];
  store_u8(codes, lo);
  store_u8(codes + 16, hi);
  std::memcpy(pairs, codes, 32);
  for (int i = 0; i < 16; i++) out[i] = u8(pairs[i] | pairs[i] >> 4);
}

template <class T>
void pack_fp4_row(const T* in, i64 d, u8* out) {
  for (i64 b = 0; b < d / 32; b++) {
    vf x = load(in + b * 32), y = load(in + b * 32 + 16);
    float amax = max_lane(max(abs(x), abs(y)));
    u8 s = e8m0_ceil((amax > 6.0f * 0x1p-126f ? amax : 6.0f * 0x1p-126f) / 6.0f);
    vf inv = splat(e8m0_inverse(s));
    out[d / 2 + b] = s;
    pack_nibbles(e2m1_code(x * inv), e2m1_code(y * inv), out + b * 16);
  }
}

template <class T>
void pack_latent_row(const T* in, i64 d, u8* out) {
  for (i64 b = 0; b < d / 32; b++) {
    vi codes[2];
    for (int half = 0; half < 2; half++) {
      vf x = load(in + b * 32 + half * 16);
      float amax = max_lane(abs(x));
      amax = (amax > 6.0f * 0x1p-9f ? amax : 6.0f * 0x1p-9f) / 6.0f;
      int32_t s[16];
      vi code = e4m3_code(splat(amax < 448.0f ? amax : 448.0f));
      store_int(s, code);
      out[d / 2 + b * 2 + half] = u8(s[0]);
      codes[half] = e2m1_code(x / splat(e4m3_value(u8(s[0]))));
    }
    pack_nibbles(codes[0], codes[1], out + b * 16);
  }
}

// Rows of x through `pack` into records of `bytes`, zero padded; float32 (exact numerics) is copied.
template <class Pack>
Tensor pack_rows(Tensor& x, i64 used, i64 bytes, Pack&& pack) {
  i64 d = x.size(-1), m = x.rows(), stride = x.row_stride();
  if (x.is(Type::f32)) {
    Tensor y = Tensor::like(x);
    for (i64 i = 0; i < m; i++)
      std::memcpy(y.data<float>() + i * d, x.data<float>() + i * stride, size_t(d) * sizeof(float));
    return y;
  }
  i64 shape[8];
  std::copy(x.sizes(), x.sizes() + x.dim(), shape);
  shape[x.dim() - 1] = bytes;
  Tensor y = Tensor::empty(shape, x.dim(), Type::u8);
  parallel(m, 0.5 * double(d), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) {
      u8* out = y.data<u8>() + i * bytes;
      pack(x.data<bf16>() + i * stride, d, out);
      std::memset(out + used, 0, size_t(bytes - used));
    }
  });
  return y;
}

void check_pack(const Tensor& x, const char* message) {
  check(is_float(x) && x.dim() >= 1 && x.dim() <= 8 && (x.is(Type::f32) || x.size(-1) % 32 == 0), message);
}

Tensor pack_window(Tensor& kv) {
  check_pack(kv, "pack_window: kv must be bf16 [..., D] with D % 32 == 0, or float32");
  i64 d = kv.size(-1), used = d + d / 32;
  return pack_rows(kv, used, round_up(used, 16), [](auto... v) { pack_fp8_row(v...); });
}
Tensor pack_latent(Tensor& kv) {
  check_pack(kv, "pack_latent: kv must be bf16 [..., D] with D % 32 == 0, or float32");
  i64 d = kv.size(-1), used = d / 2 + d / 16;
  return pack_rows(kv, used, round_up(used, 16), [](auto... v) { pack_latent_row(v...); });
}
Tensor pack_index(Tensor& x) {
  check_pack(x, "pack_index: x must be bf16 [..., D] with D % 32 == 0, or float32");
  i64 d = x.size(-1), used = d / 2 + d / 32;
  return pack_rows(x, used, used, [](auto... v) { pack_fp4_row(v...); });
}

// ---- writing ----

i64 item_size(const Tensor& t) { return t.is(Type::u8) ? 1 : t.is(Type::f32) || t.is(Type::i32) ? 4 : 0; }

void ring_write(Tensor& ring, Tensor& rec, Tensor& slots, Tensor& positions, Tensor& run_last) {
  i64 item = item_size(ring), t = rec.size(0);
  check(item && ring.dim() == 3 && rec.dim() == 2 && rec.type() == ring.type() && ring.size(2) == rec.size(1) &&
            ring.stride(2) == 1,
        "ring_write: ring [S, R, W] and rec [T, W] must be uint8, int32 or float32 of one width, rows of the "
        "ring contiguous");
  const char* message = "ring_write: slots, positions and run_last must be int32 [T]";
  const int32_t *slot = indices(slots, t, message), *pos = indices(positions, t, message),
                *last = indices(run_last, t, message);
  for (i64 i = 0; i < t; i++)
    check(0 <= slot[i] && slot[i] < ring.size(0) && pos[i] >= 0, "ring_write: a slot or position is out of range");
  i64 size = ring.size(1), bytes = rec.size(1) * item, stride = rec.row_stride() * item;
  for (i64 i = 0; i < t; i++)
    if (pos[i] > last[i] - size)
      std::memcpy(ring.data<u8>() + (slot[i] * ring.stride(0) + pos[i] % size * ring.stride(1)) * item,
                  rec.data<u8>() + i * stride, size_t(bytes));
}

// put(page, entry, row) for the rows that complete a group of `ratio` tokens.
template <class Put>
void for_pages(Tensor& pool, i64 rows, Tensor& page_table, Tensor& slots, Tensor& positions, i64 ratio, i64 page_size,
               Put&& put) {
  check(ratio > 0 && page_size >= ratio && page_table.is(Type::i32) && page_table.dim() == 2,
        "page_write: page_table must be int32 [S, pages], ratio positive");
  const char* message = "page_write: slots and positions must be int32 [T]";
  const int32_t *slot = indices(slots, rows, message), *pos = indices(positions, rows, message),
                *table = page_table.contiguous().data<int32_t>();
  i64 width = page_table.size(1);
  for (bool write : {false, true})
    for (i64 i = 0; i < rows; i++) {
      if ((i64(pos[i]) + 1) % ratio) continue;
      i64 at = pos[i] / page_size;
      if (write) {
        put(table[slot[i] * width + at], pos[i] % page_size / ratio, i);
      } else {
        check(0 <= slot[i] && slot[i] < page_table.size(0) && 0 <= pos[i] && at < width,
              "page_write: a slot or position is out of range");
        int32_t page = table[slot[i] * width + at];
        check(0 <= page && page < pool.size(0), "page_write: a page is out of range");
      }
    }
}

void page_write(Tensor& pool, Tensor& rec, Tensor& page_table, Tensor& slots, Tensor& positions, i64 ratio,
                i64 page_size) {
  i64 item = item_size(pool);
  check(item && pool.dim() == 3 && rec.dim() == 2 && rec.type() == pool.type() && pool.size(2) == rec.size(1) &&
            pool.stride(2) == 1 && ratio > 0 && pool.size(1) == page_size / ratio,
        "page_write: pool [P, page_size/ratio, W] and rec [T, W] must be uint8 or float32 of one width, "
        "entries contiguous");
  i64 stride = rec.row_stride() * item, bytes = rec.size(1) * item;
  for_pages(pool, rec.size(0), page_table, slots, positions, ratio, page_size, [&](i64 page, i64 entry, i64 row) {
    std::memcpy(pool.data<u8>() + (page * pool.stride(0) + entry * pool.stride(1)) * item,
                rec.data<u8>() + row * stride, size_t(bytes));
  });
}

void index_page_write(Tensor& pool, Tensor& rec, Tensor& page_table, Tensor& slots, Tensor& positions, i64 ratio,
                      i64 page_size) {
  if (pool.is(Type::f32)) return page_write(pool, rec, page_table, slots, positions, ratio, page_size);
  check(pool.is(Type::u8) && pool.dim() == 2 && rec.is(Type::u8) && rec.dim() == 2 && ratio > 0 &&
            pool.size(1) == page_size / ratio * rec.size(1) && pool.stride(1) == 1,
        "index_page_write: pool must be uint8 [P, page_size/ratio * W] for rec uint8 [T, W]");
  i64 stride = rec.row_stride(), dim = rec.size(1) * 32 / 17, codes = dim / 2, scales = dim / 32,
      entries = page_size / ratio;
  for_pages(pool, rec.size(0), page_table, slots, positions, ratio, page_size, [&](i64 page, i64 entry, i64 row) {
    u8* out = pool.data<u8>() + page * pool.stride(0);
    const u8* in = rec.data<u8>() + row * stride;
    std::memcpy(out + entry * codes, in, size_t(codes));
    std::memcpy(out + entries * codes + entry * scales, in + codes, size_t(scales));
  });
}

Tensor pair_pool(Tensor& kv_gate, Tensor& open_pair, Tensor& slots, Tensor& positions, Tensor& run_start,
                 bool out_f32) {
  check(kv_gate.is(Type::f32) && kv_gate.dim() == 2 && kv_gate.size(1) % 2 == 0 && open_pair.is(Type::f32) &&
            open_pair.dim() == 3 && open_pair.size(2) == kv_gate.size(1),
        "pair_pool: kv_gate must be float32 [T, 2D] and open_pair float32 [S, ring, 2D]");
  i64 t = kv_gate.size(0), d = kv_gate.size(1) / 2, size = open_pair.size(1), stride = kv_gate.row_stride();
  const char* message = "pair_pool: slots, positions and run_start must be int32 [T]";
  const int32_t *slot = indices(slots, t, message), *pos = indices(positions, t, message),
                *start = indices(run_start, t, message);
  for (i64 i = 0; i < t; i++) check(0 <= slot[i] && slot[i] < open_pair.size(0), "pair_pool: a slot is out of range");
  open_pair.contiguous();
  Tensor y = Tensor::empty({t, d}, out_f32 ? Type::f32 : Type::bf16);
  auto run = [&](auto* out) {
    parallel(t, 0.4 * double(d), [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++) {
        const float* own = kv_gate.data<float>() + i * stride;
        const float* ring = open_pair.data<float>() + slot[i] * size * 2 * d;
        const float* prev = i > start[i] ? own - stride : ring + (pos[i] + size - 1) % size * 2 * d;
        bool closed = pos[i] % 2 == 1;
        columns(d, [&](i64 j, auto n) {
          vf v = splat(0.0f);
          if (closed) {
            vf w = sigmoid(load_n(own + d + j, n) - load_n(prev + d + j, n));
            v = load_n(prev + j, n) * (splat(1.0f) - w) + load_n(own + j, n) * w;
          }
          store_n(out + i * d + j, v, n);
        });
      }
    });
  };
  if (out_f32) run(y.data<float>());
  else run(y.data<bf16>());
  return y;
}

// ---- Engram ----

Tensor engram_lookback(Tensor& ids, Tensor& positions, Tensor& slots, Tensor& run_start, Tensor& is_image,
                       Tensor& token_map, Tensor& history, i64 pad_id, i64 n) {
  i64 t = ids.numel();
  const char* message = "engram_lookback: ids, positions, slots and run_start must be int32 [T]";
  const int32_t *id = indices(ids, t, message), *pos = indices(positions, t, message),
                *slot = indices(slots, t, message);
  const int32_t* start = indices(run_start, t, message);
  check(is_image.is(Type::boolean) && is_image.numel() == t && token_map.is(Type::i32) && token_map.dim() == 1 &&
            history.is(Type::i32) && history.dim() == 2,
        "engram_lookback: is_image must be bool [T], token_map int32 [vocab], history int32 [S, ring]");
  const bool* image = is_image.contiguous().data<bool>();
  const int32_t *map = token_map.contiguous().data<int32_t>(), *past = history.contiguous().data<int32_t>();
  i64 size = history.size(1), vocab = token_map.size(0);
  Tensor y = Tensor::empty({t, n}, Type::i32);
  for (i64 i = 0; i < t; i++) {
    check(0 <= slot[i] && slot[i] < history.size(0), "engram_lookback: a slot is out of range");
    bool broken = false;
    for (i64 s = 0; s < n; s++) {
      i64 token = -1;
      if (i - s >= start[i]) token = i >= s && !image[i - s] ? id[i - s] : -1;
      else if (pos[i] >= s) token = past[slot[i] * size + (pos[i] - s) % size];
      broken = broken || pos[i] < s || token < 0;
      token = broken ? pad_id : token;
      check(token < vocab, "engram_lookback: a token id is not below the vocabulary size");
      y.data<int32_t>()[i * n + s] = map[token];
    }
  }
  return y;
}

Tensor engram_rows(Tensor& tokens, Tensor& multipliers, Tensor& primes, Tensor& offsets) {
  check(tokens.is(Type::i32) && tokens.dim() == 2 && tokens.size(1) > 1 && multipliers.is(Type::i64) &&
            multipliers.numel() == tokens.size(1),
        "engram_rows: tokens must be int32 [T, n] and multipliers int64 [n], n > 1");
  i64 t = tokens.size(0), n = tokens.size(1), cols = primes.numel(), heads = cols / (n - 1);
  check(primes.is(Type::i64) && offsets.is(Type::i64) && offsets.numel() == cols && cols % (n - 1) == 0,
        "engram_rows: primes and offsets must be int64 [(n-1)*heads]");
  const int32_t* tok = tokens.contiguous().data<int32_t>();
  const i64 *mult = multipliers.contiguous().data<i64>(), *p = primes.contiguous().data<i64>(),
            *o = offsets.contiguous().data<i64>();
  Tensor y = Tensor::empty({t, cols}, Type::i64);
  for (i64 i = 0; i < t; i++) {
    i64 running = tok[i * n] * mult[0], *out = y.data<i64>() + i * cols;
    for (i64 s = 1; s < n; s++) {
      running ^= tok[i * n + s] * mult[s];
      for (i64 c = (s - 1) * heads; c < s * heads; c++) {
        i64 rest = running % p[c];
        out[c] = (rest < 0 ? rest + p[c] : rest) + o[c];  // Python's sign
      }
    }
  }
  return y;
}

Tensor engram_gather(Tensor& rows, Tensor& table, Tensor& scale, bool out_f32) {
  check(rows.is(Type::i64) && rows.dim() == 2 && table.is(Type::e4m3) && table.dim() == 2 && scale.is(Type::u8) &&
            scale.dim() == 2 && table.size(1) % 32 == 0 && scale.size(1) == table.size(1) / 32 &&
            scale.size(0) == table.size(0),
        "engram_gather: rows must be int64 [T, cols], table e4m3 [N, d], scale uint8 [N, d/32]");
  i64 count = rows.numel(), d = table.size(1), ldt = table.row_stride(), lds = scale.row_stride();
  const i64* row = rows.contiguous().data<i64>();
  for (i64 i = 0; i < count; i++)
    check(0 <= row[i] && row[i] < table.size(0), "engram_gather: a row is outside the table");
  Tensor y = Tensor::empty({rows.size(0), rows.size(1) * d}, out_f32 ? Type::f32 : Type::bf16);
  parallel(count, 100 + 0.1 * double(d), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++)
      for (i64 b = 0; b < d / 32; b++) {
        const u8* in = table.data<u8>() + row[i] * ldt + b * 32;
        float s = e8m0(scale.data<u8>()[row[i] * lds + b]);
        for (int half = 0; half < 32; half += 16) {
          if (out_f32) store(y.data<float>() + i * d + b * 32 + half, e4m3(in + half, s));
          else store(y.data<bf16>() + i * d + b * 32 + half, e4m3(in + half, s));
        }
      }
  });
  return y;
}

}  // namespace

const Entry cache_ops[] = {DI_OP(pack_window), DI_OP(pack_latent),      DI_OP(pack_index), DI_OP(ring_write),
                           DI_OP(page_write),  DI_OP(index_page_write), DI_OP(pair_pool),  DI_OP(engram_lookback),
                           DI_OP(engram_rows), DI_OP(engram_gather),    DI_OPS_END};

}  // namespace DI_ISA
