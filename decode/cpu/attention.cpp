// Attention of a tree's nodes to the KV cache, in float32 and bfloat16. Queries of a group share their keys and values.
//
// The slots are cut into parts of PART slots, so that all threads have work even with one row and few heads. A part's
// keys are transposed once, then all queries of the group go over them in blocks of rows, as in the linear op. Every
// part has its own softmax; the parts are weighted and added at the end (Dao et al., "Flash-Decoding", 2023). A query's
// result depends neither on the other queries nor on slots that it does not see. What no query of a block sees is left
// out: texts are shorter than the longest one, and tokens of a prompt see none after them. No bit changes by that.
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

constexpr int64_t PART = 256, LINE = 64;  // slots; bytes of a cache line
static_assert(PART % PANEL == 0);
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float HIDDEN = -1e38f;  // a mask's number for what is not seen is lower, in both formats

int64_t round_up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }

template <class T>
inline Vector load(const typename T::Number* from) {
  float numbers[WIDTH];
  for (int lane = 0; lane < WIDTH; ++lane) numbers[lane] = T::widen(from[lane]);
  Vector result;
  std::memcpy(&result, numbers, sizeof(result));
  return result;
}

template <class Number>
inline void prefetch(const Number* from, int64_t count) {
  for (int64_t i = 0; i < count; i += LINE / (int64_t)sizeof(Number)) __builtin_prefetch(from + i, 0, 2);
}

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
  int64_t key_row, key_head, value_row, value_head, mask_row;        // strides
  float scale;
  bool flat;
  int64_t nodes_in_row;  // of the queries: those of all rows in a flat pass
  const int64_t *counts_of, *firsts_of;  // of a flat pass; other threads have none

  int64_t live(int64_t row) const { return flat ? counts_of[row] : nodes; }

  int64_t rows() const { return groups * nodes; }  // queries that share keys and values
  int64_t parts() const { return (slots + PART - 1) / PART; }
  int64_t value_width() const { return round_up(value_size, PANEL); }
  int64_t partial_width() const { return value_width() + 2; }  // a row's sums of a part, its maximum and its total

  struct Scratch {  // of a thread, which keeps it: to free large pieces of memory takes long
    void fit(const Attention& each) {
      query.resize(std::max<size_t>(query.size(), each.rows() * each.key_size));
      key.resize(std::max<size_t>(key.size(), PART * each.key_size));
      value.resize(std::max<size_t>(value.size(), PART * each.value_width()));
      scores.resize(PART * ROWS);
    }
    std::vector<float> query, key, value, scores;
  };

  // Writes a block of keys, [slots, key_size], of at most WIDTH x WIDTH numbers to a panel [key_size, PANEL].
  void transpose_block(const Number* from, int64_t slots_left, int64_t sizes_left, float* into) const {
    if (slots_left < WIDTH || sizes_left < WIDTH) {
      for (int64_t d = 0; d < std::min<int64_t>(WIDTH, sizes_left); ++d)
        for (int64_t s = 0; s < std::min<int64_t>(WIDTH, slots_left); ++s)
          into[d * PANEL + s] = T::widen(from[s * key_size + d]);
      return;
    }
    Vector block[WIDTH];
    for (int s = 0; s < WIDTH; ++s) block[s] = load<T>(from + s * key_size);
    transpose(block);
    for (int d = 0; d < WIDTH; ++d) std::memcpy(into + d * PANEL, &block[d], sizeof(Vector));
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

  // The queries of one row of the batch and one head over one part of the slots.
  void run_part(int64_t row, int64_t head, int64_t begin, Scratch& scratch, float* partial) const {
    float *query = scratch.query.data(), *key = scratch.key.data(), *value = scratch.value.data();
    const int64_t used = live(row);  // nodes; those of each group lie together
    const Number* mask = masks + (flat ? firsts_of[row] * slots : row * mask_row) + begin;
    const int64_t part = std::min(PART, slots - begin);
    int64_t unseen = part, count = 0;  // slots before the first and up to the last one that is seen
    for (int64_t node = 0; node < used; ++node) find_seen(mask + node * slots, part, unseen, count);
    if (count == 0) {
      for (int64_t each = 0; each < groups * used; ++each) write_nothing(partial + each * partial_width());
      return;
    }
    const Number* from = keys + row * key_row + head * key_head + begin * key_size;
    const Number* other = values + row * value_row + head * value_head + begin * value_size;
    for (int64_t s = 0; s < count; s += WIDTH) {  // panels of keys [key_size, PANEL]
      prefetch(from + (s + WIDTH) * key_size, std::min<int64_t>(WIDTH, count - s - WIDTH) * key_size);
      prefetch(other + s * value_size, std::min<int64_t>(WIDTH, count - s) * value_size);
      for (int64_t d = 0; d < key_size; d += WIDTH)
        transpose_block(from + s * key_size + d, count - s, key_size - d,
                        key + s / PANEL * PANEL * key_size + d * PANEL + s % PANEL);
    }
    const float* value_panel;
    from = values + row * value_row + head * value_head + begin * value_size;
    if constexpr (T::STEP == 1) value_panel = from;
    if (T::STEP != 1 || value_width() != value_size) {
      for (int64_t s = 0; s < count; ++s)
        for (int64_t d = 0; d < value_size; ++d) value[s * value_width() + d] = T::widen(from[s * value_size + d]);
      value_panel = value;
    }
    const int64_t place = flat ? head * groups * nodes_in_row + firsts_of[row] : (row * heads + head) * rows();
    const Number* asked = queries + place * key_size;
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t i = 0; i < used * key_size; ++i)
        query[group * used * key_size + i] = T::widen(asked[group * nodes_in_row * key_size + i]) * scale;
    for (int64_t first = 0; first < groups * used; first += ROWS) {
      const int64_t size = std::min<int64_t>(ROWS, groups * used - first);
      with_rows(size, [&]<int R>() {
        run_block<R>(first, used, count, query, key, value_panel, mask, scratch.scores.data(), partial);
      });
    }
  }

  template <int R>
  void run_block(int64_t first, int64_t used, int64_t count, const float* query, const float* key, const float* value,
                 const Number* mask, float* scores, float* partial) const {
    int64_t unseen = count, end = 0;
    for (int r = 0; r < R; ++r) find_seen(mask + (first + r) % used * slots, count, unseen, end);
    if (end == 0) {
      for (int r = 0; r < R; ++r) write_nothing(partial + (first + r) * partial_width());
      return;
    }
    const int64_t begin = unseen / PANEL * PANEL, width = round_up(end, PANEL);
    const float* inputs[R];
    for (int r = 0; r < R; ++r) inputs[r] = query + (first + r) * key_size;
    for (int64_t panel = begin; panel < width; panel += PANEL) {
      Vector sums[R][VECTORS] = {};
      for (int64_t d = 0; d < key_size; ++d) Float32::step<R>(key + panel * key_size + d * PANEL, inputs, d, sums);
      for (int r = 0; r < R; ++r) std::memcpy(scores + r * width + panel, sums[r], sizeof(sums[r]));
    }
    float largest[R], totals[R] = {};
    for (int r = 0; r < R; ++r) {
      float* row = scores + r * width;
      const Number* seen = mask + (first + r) % used * slots;
      for (int64_t s = begin; s < end; ++s) row[s] += T::widen(seen[s]);
      std::fill(row + end, row + width, LOWEST);
      float lanes[WIDTH];  // compilers find the maximum of vectors only lane by lane
      std::fill(lanes, lanes + WIDTH, LOWEST);
      for (int64_t s = begin; s < width; s += WIDTH)
        for (int lane = 0; lane < WIDTH; ++lane) lanes[lane] = std::max(lanes[lane], row[s + lane]);
      largest[r] = *std::max_element(lanes, lanes + WIDTH);
      for (int64_t s = begin; s < width; ++s) row[s] = exp_negative(row[s] - largest[r]);
      inputs[r] = row;
    }
    for (int64_t s = begin; s < end; ++s)  // in the order of slots: unseen ones in between change no bit of a total
      for (int r = 0; r < R; ++r) totals[r] += inputs[r][s];
    for (int r = 0; r < R; ++r) {
      float* result = partial + (first + r) * partial_width() + value_width();
      result[0] = largest[r];
      result[1] = totals[r];
    }
    for (int64_t panel = 0; panel < value_width(); panel += PANEL) {
      Vector sums[R][VECTORS] = {};
      for (int64_t s = begin; s < end; ++s) Float32::step<R>(value + s * value_width() + panel, inputs, s, sums);
      for (int r = 0; r < R; ++r)
        std::memcpy(partial + (first + r) * partial_width() + panel, sums[r], sizeof(sums[r]));
    }
  }

  // Adds the parts of one query. partials: of its row and head.
  void merge(int64_t row, int64_t head, int64_t query, const float* partials, Number* outputs) const {
    const int64_t step = rows() * partial_width(), node = query % nodes, used = live(row);
    if (node >= used) return;
    const int64_t place = flat ? firsts_of[row] + node : row * nodes + node;
    Number* into = outputs + (place * heads * groups + head * groups + query / nodes) * value_size;
    const float* first = partials + (query / nodes * used + node) * partial_width();
    float largest = LOWEST, total = 0;
    for (int64_t c = 0; c < parts(); ++c) largest = std::max(largest, first[c * step + value_width()]);
    std::vector<float> sums(value_size);
    for (int64_t c = 0; c < parts(); ++c) {
      const float* part = first + c * step;
      const float weight = std::exp(part[value_width()] - largest);
      total += weight * part[value_width() + 1];
      for (int64_t d = 0; d < value_size; ++d) sums[d] += weight * part[d];
    }
    for (int64_t d = 0; d < value_size; ++d) into[d] = T::narrow(total == 0 ? 0.0f : sums[d] / total);  // NaN stays NaN
  }

  void run(Number* outputs) const {
    const int64_t pairs = batch * heads, step = rows() * partial_width();
    std::unique_ptr<float[]> partials(new float[pairs * parts() * step]);
    std::atomic<int64_t> next = 0;  // threads take one part after the other: the last ones are short, and come last
    torch::stable::parallel_for(0, pairs * parts(), 1, [&](int64_t, int64_t) {
      static thread_local Scratch scratch;
      scratch.fit(*this);
      for (int64_t i = next++; i < pairs * parts(); i = next++) {
        const int64_t pair = i % pairs, part = i / pairs;
        run_part(pair / heads, pair % heads, part * PART, scratch, partials.get() + (pair * parts() + part) * step);
      }
    });
    torch::stable::parallel_for(0, pairs * rows(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const int64_t pair = index / rows();
        merge(pair / heads, pair % heads, index % rows(), partials.get() + pair * parts() * step, outputs);
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
      .key_row = key.stride(0),
      .key_head = key.stride(1),
      .value_row = value.stride(0),
      .value_head = value.stride(1),
      .mask_row = mask.size(0) == 1 ? 0 : mask.stride(0),
      .scale = (float)scale,
      .flat = flat,
      .nodes_in_row = query.size(2),
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
  query = torch::stable::contiguous(query);
  mask = torch::stable::contiguous(mask);
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
