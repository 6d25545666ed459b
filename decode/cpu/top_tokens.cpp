// The most likely tokens by rows of logits in float32: one pass for the largest logit of each block, one over the few
// blocks that can hold a token of the best. torch's own functions take several times as long for a row.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "shim.h"
#include "vectors.h"

namespace {

using namespace draftless;

constexpr int64_t BLOCK = 256;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// The largest number of a block, and whether one is NaN, which counts for none.
float find_largest(const float* numbers, int64_t size, bool& has_nan) {
  Vector best = {};
  best += LOWEST;
  Integers nans = {};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    const Vector next = *reinterpret_cast<const Vector*>(numbers + i);
    best = next > best ? next : best;
    nans |= next != next;
  }
  float largest = LOWEST;
  for (int lane = 0; lane < WIDTH; ++lane) largest = std::max(largest, best[lane]), has_nan |= nans[lane] != 0;
  for (; i < size; ++i) largest = std::max(largest, numbers[i]), has_nan |= numbers[i] != numbers[i];
  return largest;
}

float add_exponentials(const float* numbers, int64_t size, float largest) {
  float lanes[WIDTH] = {};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH)
    for (int lane = 0; lane < WIDTH; ++lane) lanes[lane] += exp_negative(numbers[i + lane] - largest);
  for (; i < size; ++i) lanes[0] += exp_negative(numbers[i] - largest);
  float total = 0;
  for (int lane = 0; lane < WIDTH; ++lane) total += lanes[lane];
  return total;
}

void find_top(const float* row, int64_t size, int64_t count, bool normalized, int64_t* ids, float* values) {
  static thread_local std::vector<float> bests;
  bests.resize((size + BLOCK - 1) / BLOCK);
  bool has_nan = false;
  for (int64_t block = 0; block < (int64_t)bests.size(); ++block)
    bests[block] = find_largest(row + block * BLOCK, std::min(BLOCK, size - block * BLOCK), has_nan);
  if (has_nan) {
    for (int64_t i = 0; i < count; ++i) ids[i] = i, values[i] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  int64_t found = 0;
  for (int64_t block = 0; block < (int64_t)bests.size(); ++block) {
    if (found == count && bests[block] <= values[count - 1]) continue;
    for (int64_t i = block * BLOCK; i < std::min(size, (block + 1) * BLOCK); ++i) {
      if (found == count && row[i] <= values[count - 1]) continue;
      found = std::min(found + 1, count);
      int64_t place = found - 1;
      for (; place > 0 && values[place - 1] < row[i]; --place)
        ids[place] = ids[place - 1], values[place] = values[place - 1];
      ids[place] = i, values[place] = row[i];
    }
  }
  if (!normalized) return;
  const float largest = values[0], total = std::log(add_exponentials(row, size, largest));
  for (int64_t i = 0; i < count; ++i) values[i] = std::min(values[i] - largest - total, 0.0f);
}

// logits [..., V] in float32. Returns the ids of the `count` largest ones, the largest first and of equals the first,
// and these logits, or their log-probabilities: [..., count] each. Of a row with a NaN, all values are NaN.
std::vector<Tensor> top_tokens(Tensor logits, int64_t count, bool normalized) {
  STD_TORCH_CHECK(logits.scalar_type() == torch::headeronly::ScalarType::Float, "logits must be in float32");
  const int64_t size = logits.dim() ? logits.size(logits.dim() - 1) : 0;
  STD_TORCH_CHECK(count >= 1 && count <= size, "the best ", count, " of ", size, " logits");
  logits = torch::stable::contiguous(logits);
  std::vector<int64_t> shape(logits.sizes().begin(), logits.sizes().end());
  shape.back() = count;
  Tensor values = make_empty(logits, shape);
  Tensor ids = torch::stable::new_empty(logits, shape, torch::headeronly::ScalarType::Long);
  const float* rows = reinterpret_cast<const float*>(logits.const_data_ptr());
  int64_t* its_ids = reinterpret_cast<int64_t*>(ids.mutable_data_ptr());
  float* its_values = reinterpret_cast<float*>(values.mutable_data_ptr());
  torch::stable::parallel_for(0, logits.numel() / size, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      find_top(rows + i * size, size, count, normalized, its_ids + i * count, its_values + i * count);
  });
  return {ids, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(draftless, m) {
  m.def("top_tokens(Tensor logits, int count, bool normalized) -> Tensor[]");
}
STABLE_TORCH_LIBRARY_IMPL(draftless, CPU, m) { m.impl("top_tokens", TORCH_BOX(&top_tokens)); }
