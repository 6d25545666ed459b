// Attention of a tree's nodes to the KV cache, in float32 and bfloat16. Queries of a group share their keys and values.
//
// The slots are cut into parts of PART slots, so that all threads have work even with one row and few heads. A panel of
// a part's keys is transposed in the L1 cache, then the group's queries, TOGETHER at most, go over it in blocks of rows,
// as in the linear op. Every part has its own softmax; the parts are weighted and added at the end (Dao et al.,
// "Flash-Decoding", 2023). A query's result depends neither on the other queries nor on slots that it does not see. What
// no query of a block sees is left out: texts are shorter than the longest one, and tokens of a prompt see none after
// them. No bit changes by that.
//
// In a flat pass the nodes of all rows lie one after the other in a single row, [1, T]; `set_counts` tells how many each
// row of the KV cache has.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "shim.h"
#include "vectors.h"

namespace {

using namespace draftless;

typedef int32_t Lanes __attribute__((vector_size(4 * WIDTH)));

constexpr int64_t PART = 256, LINE = 64, BURST = 4;  // slots; bytes of a cache line; products between fetches
constexpr int64_t TOGETHER = 24 * ROWS;  // queries that a panel of keys is transposed for
constexpr int64_t KEPT = 1 << 18;  // numbers that a thread keeps room for: to free large pieces of memory takes long
static_assert(PART % PANEL == 0);
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float HIDDEN = -1e38f;  // a mask's number for what is not seen is lower, in both formats

int64_t round_up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline Vector load(const uint16_t* from) {  // bfloat16
  typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
  return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16u);
}

// What is needed next, from memory to the L2 cache: a few lines with each step of what is computed meanwhile.
struct Fetch {
  const char* next;
  int64_t left, each;  // lines

  template <class Number>
  Fetch(const Number* from, int64_t count, int64_t steps)
      : next((const char*)from), left(count * (int64_t)sizeof(Number) / LINE) {
    each = left / std::max<int64_t>(steps, 1) + 1;
  }

  void step() {
    for (int64_t i = std::min(each, left); i > 0; --i, --left, next += LINE) __builtin_prefetch(next, 0, 2);
  }
};

// Exchanges the upper right and the lower left quadrant of blocks of 2 * HALF x 2 * HALF numbers.
template <int HALF, int... LANES>
inline void exchange(Vector& upper, Vector& lower, std::integer_sequence<int, LANES...>) {
  const Vector a = upper, b = lower;
#if defined(__clang__)
  upper = __builtin_shufflevector(a, b, (LANES & HALF ? LANES - HALF + WIDTH : LANES)...);
  lower = __builtin_shufflevector(a, b, (LANES & HALF ? LANES + WIDTH : LANES + HALF)...);
#else
  upper = __builtin_shuffle(a, b, Lanes{(LANES & HALF ? LANES - HALF + WIDTH : LANES)...});
  lower = __builtin_shuffle(a, b, Lanes{(LANES & HALF ? LANES + WIDTH : LANES + HALF)...});
#endif
}

template <int HALF = WIDTH / 2>
inline void transpose(Vector (&block)[WIDTH]) {
  for (int i = 0; i < WIDTH; ++i)
    if (!(i & HALF)) exchange<HALF>(block[i], block[i + HALF], std::make_integer_sequence<int, WIDTH>());
  if constexpr (HALF > 1) transpose<HALF / 2>(block);
}

thread_local std::vector<int64_t> counts, firsts;  // of a flat pass: each row's nodes, and its first node among all

int64_t set_counts(std::optional<Tensor> given) {
  counts.clear();
  firsts.clear();
  int64_t total = 0;
  for (int64_t row = 0; given && row < given->numel(); ++row) {
    firsts.push_back(total);
    counts.push_back(reinterpret_cast<const int64_t*>(given->const_data_ptr())[row]);
    total += counts.back();
  }
  return total;
}

template <class T>
struct Attention {
  using Number = typename T::Number;
  const Number *queries, *keys, *values, *masks;
  int64_t batch, heads, groups, nodes, slots, key_size, value_size;  // heads: of keys and values; nodes: of the longest
  int64_t query_row, query_head, query_node, key_row, key_head, value_row, value_head, mask_row;  // strides
  float scale;
  bool flat;
  const int64_t *counts_of, *firsts_of;  // of a flat pass; other threads have none

  int64_t live(int64_t row) const { return flat ? counts_of[row] : nodes; }

  int64_t rows() const { return groups * nodes; }  // queries that share keys and values
  int64_t parts() const { return (slots + PART - 1) / PART; }
  int64_t value_width() const { return round_up(value_size, PANEL); }
  int64_t partial_width() const { return value_width() + 2; }  // a row's sums of a part, its maximum and its total

  // Queries that are multiplied together, and the slots of a part that they see: none before the panel at `begin`.
  struct Block {
    int64_t first, size, begin, end;
  };

  struct Scratch {  // of a thread, which keeps it
    void fit(const Attention& each) {
      query.resize(std::max<size_t>(query.size(), TOGETHER * each.key_size));
      key.resize(std::max<size_t>(key.size(), PANEL * each.key_size));
      value.resize(std::max<size_t>(value.size(), PART * each.value_width()));
      scores.resize(PART * TOGETHER);
    }
    std::vector<float> query, key, value, scores;
    std::vector<Block> blocks;
  };

  // A part of the slots, for one row of the batch and one head.
  struct Part {
    int64_t row, head, count;
    const Number *mask, *keys, *values;  // from its first slot on
  };

  Part find_part(int64_t number) const {
    const int64_t row = number % (batch * heads) / heads, head = number % heads;
    const int64_t begin = number / (batch * heads) * PART;
    const Number* mask = masks + (flat ? firsts_of[row] * slots : row * mask_row) + begin;
    return {row, head, std::min(PART, slots - begin), mask, keys + row * key_row + head * key_head + begin * key_size,
            values + row * value_row + head * value_head + begin * value_size};
  }

  // Writes at most PANEL keys, [slots, key_size], to a panel [key_size, PANEL].
  void transpose_panel(const Number* from, int64_t count, Fetch& fetch, float* into) const {
    for (int64_t s = 0; s < count; s += WIDTH)
      for (int64_t d = 0; d < key_size; d += WIDTH, fetch.step())
        transpose_block(from + s * key_size + d, count - s, key_size - d, into + d * PANEL + s);
  }

  // The same for a block of at most WIDTH x WIDTH numbers.
  void transpose_block(const Number* from, int64_t slots_left, int64_t sizes_left, float* into) const {
    if (slots_left < WIDTH || sizes_left < WIDTH) {
      for (int64_t d = 0; d < std::min<int64_t>(WIDTH, sizes_left); ++d)
        for (int64_t s = 0; s < std::min<int64_t>(WIDTH, slots_left); ++s)
          into[d * PANEL + s] = T::widen(from[s * key_size + d]);
      return;
    }
    Vector block[WIDTH];
#pragma GCC unroll 16
    for (int s = 0; s < WIDTH; ++s) block[s] = load(from + s * key_size);
    transpose(block);
#pragma GCC unroll 16
    for (int d = 0; d < WIDTH; ++d) *reinterpret_cast<Vector*>(into + d * PANEL) = block[d];
  }

  // Narrows the slots from `first` to `last` of a mask's row to those that are seen, if others are to be seen as well.
  static void find_seen(const Number* mask, int64_t count, int64_t& first, int64_t& last) {
    int64_t s = 0, e = count;
    while (s < first && T::widen(mask[s]) < HIDDEN) ++s;
    while (e > last && T::widen(mask[e - 1]) < HIDDEN) --e;
    if (s < first) first = s;
    if (e > last) last = e;
  }

  // What a query finds in slots that it does not see.
  void write_nothing(float* partial) const {
    std::fill(partial, partial + value_width(), 0.0f);
    partial[value_width()] = LOWEST;
    partial[value_width() + 1] = 0;
  }

  // following: the part that this thread is likely to take next, if any.
  void run_part(const Part& part, const Part* following, Scratch& scratch, float* partial) const {
    const int64_t all = groups * live(part.row);  // queries, group by group
    for (int64_t begin = 0; begin < all; begin += TOGETHER) {
      const int64_t end = std::min(begin + TOGETHER, all);
      run_queries(part, begin, end - begin, end < all ? nullptr : following, scratch, partial + begin * partial_width());
    }
  }

  // `number` of its queries, from `start` on.
  void run_queries(const Part& part, int64_t start, int64_t number, const Part* following, Scratch& scratch,
                   float* partial) const {
    const int64_t row = part.row, used = live(row);  // nodes
    int64_t first = part.count, last = 0;            // the slots that any of them sees
    scratch.blocks.clear();
    for (int64_t query = 0; query < number; query += ROWS) {
      Block block{query, std::min<int64_t>(ROWS, number - query), part.count, 0};
      for (int64_t each = query; each < query + block.size; ++each)
        find_seen(part.mask + (start + each) % used * slots, part.count, block.begin, block.end);
      if (block.end == 0) {
        for (int64_t each = query; each < query + block.size; ++each) write_nothing(partial + each * partial_width());
        continue;
      }
      block.begin = block.begin / PANEL * PANEL;
      first = std::min(first, block.begin), last = std::max(last, block.end);
      scratch.blocks.push_back(block);
    }
    if (last == 0) return;

    float *query = scratch.query.data(), *key = scratch.key.data(), *scores = scratch.scores.data();
    const Number* first_query = queries + (flat ? firsts_of[row] * query_node : row * query_row);
    for (int64_t each = 0; each < number; ++each) {
      const int64_t head = part.head * groups + (start + each) / used, node = (start + each) % used;
      const Number* asked = first_query + head * query_head + node * query_node;
      for (int64_t d = 0; d < key_size; ++d) query[each * key_size + d] = T::widen(asked[d]) * scale;
    }
    const int64_t blocks = scratch.blocks.size(), panels = (last - first + PANEL - 1) / PANEL;
    const int64_t bursts = blocks * (key_size / BURST), tiles = PANEL / WIDTH * (key_size / WIDTH);
    Fetch fetch(part.values + first * value_size, (last - first) * value_size, panels * (bursts + tiles));
    for (int64_t panel = first; panel < last; panel += PANEL) {
      transpose_panel(part.keys + panel * key_size, std::min<int64_t>(PANEL, last - panel), fetch, key);
      for (const Block& block : scratch.blocks)
        if (block.begin <= panel && panel < block.end)
          with_rows(block.size, [&]<int R>() {
            const float* inputs[R];
            for (int r = 0; r < R; ++r) inputs[r] = query + (block.first + r) * key_size;
            multiply<R>(inputs, key, PANEL, 0, key_size, fetch, scores + block.first * PART + panel, PART);
          });
    }
    const float* value = scratch.value.data();
    if constexpr (T::STEP == 1) value = part.values;
    if (T::STEP != 1 || value_width() != value_size) {
      float* into = scratch.value.data();
      for (int64_t s = first; s < last; ++s)
        for (int64_t d = 0; d < value_size; ++d) into[s * value_width() + d] = T::widen(part.values[s * value_size + d]);
      value = into;
    }
    const int64_t steps = blocks * (value_width() / PANEL) * ((last - first + BURST - 1) / BURST);
    fetch = Fetch(following ? following->keys : nullptr, following ? following->count * key_size : 0, steps);
    for (const Block& block : scratch.blocks)
      with_rows(block.size, [&]<int R>() {
        const Number* masks_of[R];
        for (int r = 0; r < R; ++r) masks_of[r] = part.mask + (start + block.first + r) % used * slots;
        add_values<R>(masks_of, block.begin, block.end, scores + block.first * PART, value, fetch,
                      partial + block.first * partial_width());
      });
  }

  // R rows of inputs times a panel, whose row k is for input k: the inputs from `begin` to `end`. stride: of its rows.
  template <int R>
  static void multiply(const float* const* inputs, const float* panel, int64_t stride, int64_t begin, int64_t end,
                       Fetch& fetch, float* into, int64_t into_stride) {
    Vector sums[R][VECTORS] = {};
    for (int64_t k = begin; k < end; fetch.step())
      for (const int64_t until = std::min(k + BURST, end); k < until; ++k)
        Float32::step<R>(panel + k * stride, inputs, k, sums);
    for (int r = 0; r < R; ++r) std::memcpy(into + r * into_stride, sums[r], sizeof(sums[r]));
  }

  // The softmax of a block's scores, and the sums of values with these weights.
  template <int R>
  void add_values(const Number* const* masks_of, int64_t begin, int64_t end, float* scores, const float* value,
                  Fetch& fetch, float* partial) const {
    const int64_t width = round_up(end, PANEL);
    const float* inputs[R];
    float largest[R], totals[R] = {};
    for (int r = 0; r < R; ++r) {
      float* row = scores + r * PART;
      for (int64_t s = begin; s < end; ++s) row[s] += T::widen(masks_of[r][s]);
      std::fill(row + end, row + width, LOWEST);
      Vector most = Vector{} + LOWEST;
      for (int64_t s = begin; s < width; s += WIDTH) most = most < load(row + s) ? load(row + s) : most;
      largest[r] = most[0];
      for (int lane = 1; lane < WIDTH; ++lane) largest[r] = std::max(largest[r], most[lane]);
      for (int64_t s = begin; s < width; ++s) row[s] = exp_negative(row[s] - largest[r]);
      inputs[r] = row;
    }
    for (int64_t s = begin; s < end; ++s)  // in the order of slots: unseen ones in between change no bit of a total
      for (int r = 0; r < R; ++r) totals[r] += inputs[r][s];
    for (int r = 0; r < R; ++r) {
      float* result = partial + r * partial_width() + value_width();
      result[0] = largest[r];
      result[1] = totals[r];
    }
    for (int64_t panel = 0; panel < value_width(); panel += PANEL)
      multiply<R>(inputs, value + panel, value_width(), begin, end, fetch, partial + panel, partial_width());
  }

  // Adds the parts of one query, in place of the first one. partials: of its row and head.
  void merge(int64_t row, int64_t head, int64_t query, float* partials, Number* outputs) const {
    const int64_t step = rows() * partial_width(), node = query % nodes, used = live(row);
    if (node >= used) return;
    const int64_t place = flat ? firsts_of[row] + node : row * nodes + node;
    Number* into = outputs + (place * heads * groups + head * groups + query / nodes) * value_size;
    float* sums = partials + (query / nodes * used + node) * partial_width();
    float largest = LOWEST, total = 0;
    for (int64_t c = 0; c < parts(); ++c) largest = std::max(largest, sums[c * step + value_width()]);
    for (int64_t c = 0; c < parts(); ++c) {
      const float* part = sums + c * step;
      const float weight = std::exp(part[value_width()] - largest);
      total += weight * part[value_width() + 1];
      for (int64_t d = 0; d < value_size; ++d) sums[d] = (c ? sums[d] : 0.0f) + weight * part[d];
    }
    for (int64_t d = 0; d < value_size; ++d) into[d] = T::narrow(total == 0 ? 0.0f : sums[d] / total);  // NaN stays NaN
  }

  void run(Number* outputs) const {
    const int64_t pairs = batch * heads, step = rows() * partial_width();
    const int64_t size = pairs * parts() * step;
    static thread_local std::vector<float> kept(KEPT);
    const std::unique_ptr<float[]> own(size > KEPT ? new float[size] : nullptr);
    float* partials = own ? own.get() : kept.data();
    std::atomic<int64_t> next = 0;  // threads take one part after the other: the last ones are short, and come last
    const int64_t all = pairs * parts();
    torch::stable::parallel_for(0, all, 1, [&](int64_t begin, int64_t end) {
      static thread_local Scratch scratch;
      scratch.fit(*this);
      const int64_t threads = (all + end - begin - 1) / (end - begin);
      for (int64_t i = next++; i < all; i = next++) {
        const Part following = find_part(std::min(i + threads, all - 1));
        const bool is_likely = i + threads < all && live(following.row) && T::widen(*following.mask) >= HIDDEN;
        float* partial = partials + (i % pairs * parts() + i / pairs) * step;
        run_part(find_part(i), is_likely ? &following : nullptr, scratch, partial);
      }
    });
    torch::stable::parallel_for(0, pairs * rows(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const int64_t pair = index / rows();
        merge(pair / heads, pair % heads, index % rows(), partials + pair * parts() * step, outputs);
      }
    });
  }
};

template <class T>
Attention<T> describe(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, double scale) {
  using Number = typename T::Number;
  const auto data = [](const Tensor& tensor) { return reinterpret_cast<const Number*>(tensor.const_data_ptr()); };
  const bool flat = !counts.empty() && query.size(0) == 1 && (int64_t)counts.size() == key.size(0) &&
                    firsts.back() + counts.back() == query.size(2);
  return {
      .queries = data(query),
      .keys = data(key),
      .values = data(value),
      .masks = data(mask),
      .batch = key.size(0),
      .heads = key.size(1),
      .groups = query.size(1) / key.size(1),
      .nodes = flat ? *std::max_element(counts.begin(), counts.end()) : query.size(2),
      .slots = key.size(2),
      .key_size = key.size(3),
      .value_size = value.size(3),
      .query_row = query.stride(0),
      .query_head = query.stride(1),
      .query_node = query.stride(2),
      .key_row = key.stride(0),
      .key_head = key.stride(1),
      .value_row = value.stride(0),
      .value_head = value.stride(1),
      .mask_row = mask.size(0) == 1 ? 0 : mask.stride(0),
      .scale = (float)scale,
      .flat = flat,
      .counts_of = counts.data(),
      .firsts_of = firsts.data(),
  };
}

template <class T>
void run(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, double scale,
         Tensor& output) {
  const auto outputs = reinterpret_cast<typename T::Number*>(output.mutable_data_ptr());
  describe<T>(query, key, value, mask, scale).run(outputs);
}

// query [B, groups * H, N, D], key [B, H, S, D] and value [B, H, S, E] whose slots are contiguous, mask [B, 1, N, S] to
// add to the scores. Returns [B, N, groups * H, E]. In a flat pass query, mask and result have one row of all nodes.
Tensor attention(Tensor query, Tensor key, Tensor value, Tensor mask, double scale) {
  if (query.stride(3) != 1) query = torch::stable::contiguous(query);
  mask = make_contiguous(mask);
  STD_TORCH_CHECK(mask.size(3) == key.size(2), "the mask must be for all ", key.size(2), " slots");
  const auto slots_are_contiguous = [](const Tensor& tensor) {
    return tensor.stride(3) == 1 && tensor.stride(2) == tensor.size(3);
  };
  if (!slots_are_contiguous(key)) key = torch::stable::contiguous(key);
  if (!slots_are_contiguous(value)) value = torch::stable::contiguous(value);
  const std::vector<int64_t> shape{query.size(0), query.size(2), query.size(1), value.size(3)};
  Tensor output = make_empty(query, shape);
  (query.element_size() == sizeof(float) ? run<Float32> : run<BFloat16>)(query, key, value, mask, scale, output);
  return output;
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle query, AtenTensorHandle key,
                                                        AtenTensorHandle value, AtenTensorHandle mask, double scale,
                                                        AtenTensorHandle* result) {
  return answer(result, [&] { return attention(borrow(query), borrow(key), borrow(value), borrow(mask), scale); });
}

STABLE_TORCH_LIBRARY_FRAGMENT(draftless, m) {
  m.def("tree_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
  m.def("set_counts(Tensor? counts) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(draftless, CPU, m) { m.impl("tree_attention", TORCH_BOX(&attention)); }
STABLE_TORCH_LIBRARY_IMPL(draftless, CompositeExplicitAutograd, m) { m.impl("set_counts", TORCH_BOX(&set_counts)); }
