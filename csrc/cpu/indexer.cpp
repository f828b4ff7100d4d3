// Index scores and top-k selection in one or two levels (deepinfer/ops/indexer.py holds schemas and references).
//
// Scores are exact: an e2m1 code is a small integer over two, so 32 products are summed in integers, then blocks and
// heads in double, as the reference does. The lanes of a vector are 16 keys; a tile of keys is expanded once for a
// group of neighbouring rows of one request.
#include "gemm.h"

namespace DI_ISA {
namespace {

constexpr i64 kKeyTile = 16, kGroupRows = 8;
constexpr int kHeads = 4;                     // side by side, to hide latency
constexpr int kD = V / 2, kDParts = 16 / kD;  // doubles of a register
typedef u8 b16 __attribute__((vector_size(16)));
typedef double nd __attribute__((vector_size(8 * kD)));
struct vd {
  nd p[kDParts];
};

constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // 2 * e2m1

// What all rows of a call share.
struct Scorer {
  const void* q;  // [m, heads, record]
  i64 m, heads, dim;
  bool packed;
  const float* weights;                    // [m, heads]
  const int32_t *slots, *visible, *table;  // table [S, table_width]
  const u8* pool;
  i64 page_bytes, entries, num_pages, table_width;

  const u8* page(i64 slot, i64 entry) const {  // null when out of range
    i64 i = entry / entries;
    int32_t page = i < table_width ? table[slot * table_width + i] : -1;
    return page < 0 || page >= num_pages ? nullptr : pool + page * page_bytes;
  }
};

// A row's query: per head and two dims a pair of int16 codes, per head and block half a scale.
struct Query {
  int32_t* pairs;  // [heads, dim/2]
  double* scales;  // [heads, dim/32]
};
struct Keys {
  vi* pairs;       // [dim/2], lanes = keys
  double* scales;  // [dim/32, 16]
};

DI_INLINE int32_t pair(u8 codes) {
  return int32_t(uint32_t(uint16_t(kTwice[codes & 15])) | uint32_t(kTwice[codes >> 4]) << 16);
}

void expand_query(const Scorer& x, i64 row, Query out) {
  i64 half = x.dim / 2, blocks = x.dim / 32;
  for (i64 h = 0; h < x.heads; h++) {
    const u8* rec = static_cast<const u8*>(x.q) + (row * x.heads + h) * (half + blocks);
    for (i64 i = 0; i < half; i++) out.pairs[h * half + i] = pair(rec[i]);
    for (i64 b = 0; b < blocks; b++) out.scales[h * blocks + b] = 0.5 * double(e8m0(rec[half + b]));
  }
}

DI_INLINE void transpose(b16 (&k)[16]) {  // byte b of k[i] becomes byte i of k[b]
  b16 t[16];
  for (int round = 0; round < 4; round++) {
    for (int i = 0; i < 8; i++) {
      t[2 * i] = __builtin_shufflevector(k[i], k[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t[2 * i + 1] =
          __builtin_shufflevector(k[i], k[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < 16; i++) k[i] = t[i];
  }
}

DI_INLINE vi twice(b16 codes) {  // 2 * e2m1 of 16 nibbles
#if defined(__AVX2__)
  codes = (b16)_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTwice)), (__m128i)codes);
#else
  for (int i = 0; i < 16; i++) codes[i] = u8(kTwice[codes[i]]);
#endif
  return load_i8(&codes);
}

// The sum of two int16 products per lane.
DI_INLINE ni pair_product(ni a, int32_t b) {
#if defined(__AVX512F__)
  return (ni)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(b));
#elif defined(__AVX2__)
  return (ni)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(b));
#else
  return (a << 16 >> 16) * int32_t(int16_t(b)) + (a >> 16) * (b >> 16);
#endif
}
DI_INLINE vi add_pairs(vi acc, vi a, int32_t b) {
  DI_PARTS(acc.p[i] += pair_product(a.p[i], b));
  return acc;
}

DI_INLINE nd to_double(vi a, int part) {
#if defined(__AVX512F__)
  return (nd)_mm512_cvtepi32_pd(part ? _mm512_extracti64x4_epi64((__m512i)a.p[0], 1)
                                     : _mm512_castsi512_si256((__m512i)a.p[0]));
#elif defined(__AVX2__)
  __m256i r = (__m256i)a.p[part / 2];
  return (nd)_mm256_cvtepi32_pd(part % 2 ? _mm256_extracti128_si256(r, 1) : _mm256_castsi256_si128(r));
#else
  nd r;
  for (int l = 0; l < kD; l++) r[l] = a.p[part / 2][part % 2 * kD + l];
  return r;
#endif
}

// Keys first..first+n-1, or those of `ids`; lanes at or beyond n repeat the last one. False when a page is out of
// range.
bool expand_keys(const Scorer& x, i64 slot, const int32_t* ids, i64 first, i64 n, Keys out) {
  const u8 *codes[kKeyTile], *scales[kKeyTile];
  i64 half = x.dim / 2, blocks = x.dim / 32;
  for (i64 i = 0; i < kKeyTile; i++) {
    i64 c = std::min(i, n - 1), entry = ids ? ids[c] : first + c, at = entry % x.entries;
    const u8* page = x.page(slot, entry);
    if (!page) return false;
    codes[i] = page + at * half;
    scales[i] = page + x.entries * half + at * blocks;
  }
  for (i64 b = 0; b < blocks; b++) {
    b16 k[16];
    for (i64 i = 0; i < kKeyTile; i++) {
      std::memcpy(&k[i], codes[i] + b * 16, 16);
      out.scales[b * 16 + i] = 0.5 * double(e8m0(scales[i][b]));
    }
    transpose(k);
    for (i64 j = 0; j < 16; j++)
      out.pairs[b * 16 + j] = (twice(k[j] & 15) & isplat(0xffff)) | shl(twice(k[j] >> 4), 16);
  }
  return true;
}

// sum_h w_h relu(sum_b dot_hb * scale_hb) for 16 keys.
void score_tile(const Scorer& x, const float* weights, Query q, Keys keys, float* out) {
  i64 half = x.dim / 2, blocks = x.dim / 32;
  vd score = {};
  for (i64 h0 = 0; h0 < x.heads; h0 += kHeads) {
    vd dot[kHeads] = {};
    i64 head[kHeads];
    for (int h = 0; h < kHeads; h++) head[h] = std::min(h0 + h, x.heads - 1);
    for (i64 b = 0; b < blocks; b++) {
      vi acc[kHeads];
      for (int h = 0; h < kHeads; h++) acc[h] = isplat(0);
      for (i64 d = b * 16; d < b * 16 + 16; d++)
        for (int h = 0; h < kHeads; h++) acc[h] = add_pairs(acc[h], keys.pairs[d], q.pairs[head[h] * half + d]);
      for (int h = 0; h < kHeads; h++)
        for (int i = 0; i < kDParts; i++) {
          nd ks;
          __builtin_memcpy(&ks, keys.scales + b * 16 + i * kD, sizeof(ks));
          dot[h].p[i] += to_double(acc[h], i) * (ks * q.scales[head[h] * blocks + b]);
        }
    }
    for (int h = 0; h < kHeads && h0 + h < x.heads; h++)
      for (int i = 0; i < kDParts; i++)
        score.p[i] += (dot[h].p[i] > nd{} ? dot[h].p[i] : nd{}) * double(weights[h0 + h]);
  }
  double all[16];
  __builtin_memcpy(all, &score, sizeof(all));
  for (int i = 0; i < 16; i++) out[i] = float(all[i]);
}

// Exact numerics: float32 queries and keys, one key at a time.
bool score_plain(const Scorer& x, i64 row, const int32_t* ids, i64 n, float* out) {
  const float* q = static_cast<const float*>(x.q) + row * x.heads * x.dim;
  for (i64 j = 0; j < n; j++) {
    i64 entry = ids ? ids[j] : j;
    const u8* page = x.page(x.slots[row], entry);
    if (!page) return false;
    const float* key = reinterpret_cast<const float*>(page) + entry % x.entries * x.dim;
    double score = 0;
    for (i64 h = 0; h < x.heads; h++) {
      double dot = 0;
      for (i64 d = 0; d < x.dim; d++) dot += double(q[h * x.dim + d]) * double(key[d]);
      score += double(x.weights[row * x.heads + h]) * (dot > 0 ? dot : 0.0);
    }
    out[j] = float(score);
  }
  return true;
}

// Rows [r0, r1) of one slot over n entries (`ids`, or 0..n-1) -> out [r1 - r0, n rounded up to 16].
bool score_rows(const Scorer& x, i64 r0, i64 r1, const int32_t* ids, i64 n, float* out) {
  i64 ld = round_up(n, kKeyTile), pairs = x.heads * x.dim / 2, blocks = x.dim / 32, scales = x.heads * blocks;
  if (!x.packed) {
    bool ok = true;
    for (i64 r = r0; r < r1; r++) ok = ok && score_plain(x, r, ids, n, out + (r - r0) * ld);
    return ok;
  }
  double* memory = scratch<double>(kPart, kGroupRows * scales + blocks * 16);
  Query first{scratch<int32_t>(kQuery, kGroupRows * pairs), memory};
  Keys keys{scratch<vi>(kTile, x.dim / 2), memory + kGroupRows * scales};
  auto query = [&](i64 r) { return Query{first.pairs + (r - r0) * pairs, first.scales + (r - r0) * scales}; };
  for (i64 r = r0; r < r1; r++) expand_query(x, r, query(r));
  for (i64 j = 0; j < n; j += kKeyTile) {
    if (!expand_keys(x, x.slots[r0], ids ? ids + j : nullptr, j, std::min(kKeyTile, n - j), keys)) return false;
    for (i64 r = r0; r < r1; r++) score_tile(x, x.weights + r * x.heads, query(r), keys, out + (r - r0) * ld + j);
  }
  return true;
}

// The k best of n: score descending, position ascending. Writes their ids (or positions) in ascending order, then -1.
//
// The k-th largest score is found by bisection on its bits: at most 32 vectorised counts, which beats std::nth_element
// four times at a hundred entries and ten times at ten thousand.
void top(const float* scores, i64 n, const int32_t* ids, i64 k, int32_t* out) {
  i64 count = 0;
  if (n <= k) {
    for (; count < n; count++) out[count] = ids ? ids[count] : int32_t(count);
  } else if (k > 0) {
    i64 np = round_up(n, 16);
    int32_t* keys = scratch<int32_t>(kIds, np);  // ordered like the scores; -0 ties with 0
    for (i64 j = 0; j < np; j++) {
      int32_t u = j < n ? int32_t(float_to_bits(scores[j] + 0.0f)) : -1;
      keys[j] = u ^ ((u >> 31) & 0x7fffffff);  // the padding becomes the smallest of all
    }
    auto above = [&](int32_t bound) {  // number of keys > bound
      vi c = isplat(0);
      for (i64 j = 0; j < np; j += 16) c = c - (load_int(keys + j) > isplat(bound));
      return isum(c);
    };
    uint32_t last = 0;  // largest bound with at least k keys at or above it, shifted by 2^31
    i64 found = n;
    for (uint32_t bit = 1u << 31; bit && found > k; bit >>= 1) {
      i64 c = above(int32_t((last + bit - 1) ^ 0x80000000u));
      if (c >= k) last += bit, found = c;
    }
    int32_t bound = int32_t(last ^ 0x80000000u);
    i64 ties = k - (found > k ? above(bound) : k);  // entries at the bound that still fit
    for (i64 j = 0; count < k; j++) {
      if (keys[j] < bound || (keys[j] == bound && found > k && ties-- <= 0)) continue;
      out[count++] = ids ? ids[j] : int32_t(j);
    }
  }
  while (count < k) out[count++] = -1;
}

// use(row, scores, n) for every row; scores are null (and were not computed) where no row of a group sees more than
// `free`.
template <class Use>
void for_rows(const Scorer& x, i64 free, Use&& use) {
  i64 *starts = scratch<i64>(kActs, x.m + 1), groups = 0;
  double work = 0;
  for (i64 r = 0; r < x.m; r++) {
    i64 last = groups ? starts[groups - 1] : 0;
    if (r == 0 || r - last >= kGroupRows || x.slots[r] != x.slots[last]) starts[groups++] = r;
    if (x.visible[r] > free) work += double(x.visible[r]);
  }
  starts[groups] = x.m;
  std::atomic<bool> bad{false};
  double ns = 100 + work * double(x.heads * x.dim) * (x.packed ? 0.01 : 1.0) / double(std::max<i64>(groups, 1));
  parallel(groups, ns, [&](i64 begin, i64 end) {
    for (i64 g = begin; g < end; g++) {
      i64 r0 = starts[g], r1 = starts[g + 1], n = 0;
      for (i64 r = r0; r < r1; r++) n = std::max<i64>(n, x.visible[r]);
      i64 ld = round_up(n, kKeyTile);
      float* scores = n > free ? scratch<float>(kScore, (r1 - r0) * ld) : nullptr;
      if (scores && !score_rows(x, r0, r1, nullptr, n, scores)) return bad.store(true);
      for (i64 r = r0; r < r1; r++) use(r, scores ? scores + (r - r0) * ld : nullptr, std::max<i64>(x.visible[r], 0));
    }
  });
  check(!bad, "index_topk: a page index is out of range");
}

Scorer scorer(Tensor& q, Tensor& weights, Tensor& pool, Tensor& table, Tensor& slots, Tensor& visible, i64 ratio,
              i64 page_size, i64 k) {
  Scorer x{};
  check(q.dim() == 3 && (q.is(Type::u8) || q.is(Type::f32)),
        "index_topk: q must be uint8 records or float32 [M, heads, D]");
  x.packed = q.is(Type::u8);
  x.m = q.size(0), x.heads = q.size(1), x.dim = x.packed ? q.size(2) * 32 / 17 : q.size(2);
  check(ratio > 0 && page_size >= ratio && k >= 0 && x.heads > 0,
        "index_topk: ratio and heads must be positive, page_size at least ratio");
  x.entries = page_size / ratio;
  check(pool.is(q.type()) && pool.dim() == (x.packed ? 2 : 3),
        "index_topk: pool must be uint8 [P, bytes], or float32 [P, entries, D] for a float32 q");
  if (x.packed) {
    check(x.dim % 32 == 0 && pool.size(1) == x.entries * q.size(2),
          "index_topk: a page must hold page_size/ratio records of the query's size");
    if (pool.stride(1) != 1) pool.contiguous();
  } else {
    check(pool.size(1) == x.entries && pool.size(2) == x.dim,
          "index_topk: a page must hold page_size/ratio keys of the query's size");
    pool.contiguous();
  }
  check(weights.is(Type::f32) && weights.numel() == x.m * x.heads, "index_topk: weights must be float32 [M, heads]");
  check(table.is(Type::i32) && table.dim() == 2, "index_topk: page_table must be int32 [S, pages]");
  x.q = q.contiguous().data<u8>(), x.weights = weights.contiguous().data<float>(),
  x.table = table.contiguous().data<int32_t>();
  x.slots = indices(slots, x.m, "index_topk: slots must be int32 [M]");
  x.visible = indices(visible, x.m, "index_topk: visible must be int32 [M]");
  x.pool = pool.data<u8>(), x.page_bytes = pool.stride(0) * (x.packed ? 1 : 4), x.num_pages = pool.size(0),
  x.table_width = table.size(1);
  for (i64 r = 0; r < x.m; r++)
    check(0 <= x.slots[r] && x.slots[r] < table.size(0), "index_topk: a slot is out of range");
  return x;
}

Tensor index_topk(Tensor& q, Tensor& weights, Tensor& pool, Tensor& page_table, Tensor& slots, Tensor& visible,
                  i64 ratio, i64 page_size, i64 k) {
  Scorer x = scorer(q, weights, pool, page_table, slots, visible, ratio, page_size, k);
  Tensor out = Tensor::empty({x.m, k}, Type::i32);
  for_rows(x, k, [&](i64 r, const float* scores, i64 n) { top(scores, n, nullptr, k, out.data<int32_t>() + r * k); });
  return out;
}

std::tuple<Tensor, Tensor> index_topk_publish(Tensor& q, Tensor& weights, Tensor& pool, Tensor& page_table,
                                              Tensor& slots, Tensor& visible, i64 ratio, i64 page_size, i64 k,
                                              i64 num_blocks, i64 block) {
  Scorer x = scorer(q, weights, pool, page_table, slots, visible, ratio, page_size, k);
  check(block > 0 && num_blocks >= 0, "index_topk_publish: block must be positive");
  Tensor out = Tensor::empty({x.m, k}, Type::i32), blocks = Tensor::empty({x.m, num_blocks}, Type::i32);
  for_rows(x, std::min(k, num_blocks * block), [&](i64 r, const float* scores, i64 n) {
    top(scores, n, nullptr, k, out.data<int32_t>() + r * k);
    i64 count = (n + block - 1) / block;
    float* best = scratch<float>(kValues, count);
    if (count > num_blocks) {
      for (i64 b = 0; b < count; b++)
        best[b] = *std::max_element(scores + b * block, scores + std::min(n, (b + 1) * block));
      best[(n - 1) / block] = __builtin_inff();  // the newest entry's block stays
    }
    top(best, count, nullptr, num_blocks, blocks.data<int32_t>() + r * num_blocks);
  });
  return {std::move(out), std::move(blocks)};
}

// Ascending visible entries of a row's candidate blocks; returns their number.
i64 candidates(const int32_t* blocks, i64 num_blocks, i64 block, i64 n, u8* keep, int32_t* ids) {
  i64 count = (n + block - 1) / block, found = 0;
  std::memset(keep, 0, size_t(count));
  for (i64 i = 0; i < num_blocks; i++)
    if (0 <= blocks[i] && blocks[i] < count) keep[blocks[i]] = 1;
  for (i64 b = 0; b < count; b++)
    for (i64 e = b * block; keep[b] && e < std::min(n, (b + 1) * block); e++) ids[found++] = int32_t(e);
  return found;
}

Tensor index_topk_blocks(Tensor& q, Tensor& weights, Tensor& pool, Tensor& page_table, Tensor& slots, Tensor& visible,
                         i64 ratio, i64 page_size, i64 k, Tensor& blocks, i64 block) {
  Scorer x = scorer(q, weights, pool, page_table, slots, visible, ratio, page_size, k);
  check(blocks.dim() == 2 && blocks.size(0) == x.m && block > 0,
        "index_topk_blocks: blocks must be int32 [M, num_blocks]");
  i64 num_blocks = blocks.size(1), most = 0;
  const int32_t* candidate =
      indices(blocks, x.m * num_blocks, "index_topk_blocks: blocks must be int32 [M, num_blocks]");
  for (i64 r = 0; r < x.m; r++) most = std::max<i64>(most, std::min<i64>(x.visible[r], num_blocks * block));
  Tensor out = Tensor::empty({x.m, k}, Type::i32);
  std::atomic<bool> bad{false};
  double ns = 100 + (most > k ? double(most * x.heads * x.dim) * (x.packed ? 0.01 : 1.0) : double(most));
  parallel(x.m, ns, [&](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) {
      i64 n = std::max<i64>(x.visible[r], 0);
      int32_t* ids = scratch<int32_t>(kPairs, std::min(n, num_blocks * block) + 1);
      n = candidates(candidate + r * num_blocks, num_blocks, block, n, scratch<u8>(kValues, n / block + 1), ids);
      float* scores = scratch<float>(kScore, round_up(n, kKeyTile));
      if (n > k && !score_rows(x, r, r + 1, ids, n, scores)) return bad.store(true);
      top(scores, n, ids, k, out.data<int32_t>() + r * k);
    }
  });
  check(!bad, "index_topk_blocks: a page index is out of range");
  return out;
}

}  // namespace

const Entry indexer_ops[] = {DI_OP(index_topk), DI_OP(index_topk_publish), DI_OP(index_topk_blocks), DI_OPS_END};

}  // namespace DI_ISA
