// A linear layer whose weights are packed once and serve any number of input rows, in float32 and bfloat16.
//
// Packed weights lie in panels of PANEL outputs: [panels, K, PANEL] in float32, [panels, K / 2, PANEL, 2] in bfloat16.
// A panel is read front to back. A block of up to ROWS input rows keeps its sums in registers. A few blocks take turns,
// CHUNK steps each, so that these weights stay in the L1 cache; many blocks go over the whole panel one after another,
// from the L2 cache. Each fetches its share of what is next meanwhile: memory and arithmetic overlap.
// Every row is summed in the same order, however many rows there are, so its result does not depend on the others.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "vectors.h"

namespace {

using namespace draftless;

constexpr int64_t LINE = 64;  // bytes of a cache line
constexpr int64_t BURST = 4;  // steps between fetches: a branch in each step makes compilers spill sums
constexpr int64_t CHUNK = 64, FEW = 4;  // steps (16 KiB of a panel), and the blocks that take turns after each chunk

template <class T>
struct Layer {
  using Number = typename T::Number;
  const Number *inputs, *packed, *bias;
  Number* outputs;
  int64_t rows, steps, count;  // input rows, steps over the inputs, outputs

  // Adds `length` steps, from `step` on, to the sums of R rows. Meanwhile the bytes from `next` to `end` are fetched.
  template <int R>
  void add_block(const Number* weights, int64_t row, int64_t step, int64_t length, const char* next, const char* end,
                 float* kept) const {
    Vector sums[R][VECTORS];
    std::memcpy(sums, kept, sizeof(sums));
    const Number* inputs_of[R];
    for (int r = 0; r < R; ++r) inputs_of[r] = inputs + ((row + r) * steps + step) * T::STEP;
    const int64_t lines = (end - next) / LINE;
    for (int64_t k = 0, line = 0; k < length;) {
      const int64_t until = std::min(k + BURST, length);
      for (; line < lines * until / length; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
      for (; k < until; ++k, weights += T::STEP * PANEL) T::template step<R>(weights, inputs_of, k, sums);
    }
    std::memcpy(kept, sums, sizeof(sums));
  }

  void write_block(int64_t panel, int64_t row, int64_t size, const float* sums) const {
    const int64_t first = panel * PANEL;
    const int columns = (int)std::min<int64_t>(PANEL, count - first);
    for (int64_t r = 0; r < size; ++r, sums += PANEL) {
      Number* into = outputs + (row + r) * count + first;
      for (int n = 0; n < columns; ++n) into[n] = T::narrow(sums[n] + (bias ? T::widen(bias[first + n]) : 0.0f));
    }
  }

  // One panel. limit: the end of the weights that this thread reads.
  void run_panel(int64_t panel, const char* limit) const {
    const int64_t blocks = (rows + ROWS - 1) / ROWS, chunk = blocks > FEW ? steps : CHUNK;
    alignas(LINE) float sums[FEW * ROWS * PANEL];  // of all blocks, or of the one that has its turn
    const Number* weights = packed + panel * steps * T::STEP * PANEL;
    for (int64_t step = 0; step < steps; step += chunk, weights += chunk * T::STEP * PANEL) {
      const int64_t length = std::min(chunk, steps - step);
      const char* next = reinterpret_cast<const char*>(weights + length * T::STEP * PANEL);
      const int64_t lines = std::min<int64_t>(length * T::STEP * PANEL * sizeof(Number), limit - next) / LINE;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t row = rows * block / blocks, size = rows * (block + 1) / blocks - row;
        const char *from = next + lines * block / blocks * LINE, *to = next + lines * (block + 1) / blocks * LINE;
        float* kept = blocks > FEW ? sums : sums + row * PANEL;
        if (step == 0) std::fill(kept, kept + size * PANEL, 0.0f);
        with_rows(size, [&]<int R>() { add_block<R>(weights, row, step, length, from, to, kept); });
        if (step + length == steps) write_block(panel, row, size, kept);
      }
    }
  }

  void run() const {
    const int64_t panels = (count + PANEL - 1) / PANEL;
    torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      const char* limit = reinterpret_cast<const char*>(packed + end * steps * T::STEP * PANEL);
      for (int64_t panel = begin; panel < end; ++panel) run_panel(panel, limit);
    });
  }
};

using torch::stable::Tensor;

template <class T>
void run(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, Tensor& output, int64_t rows) {
  using Number = typename T::Number;
  Layer<T>{reinterpret_cast<const Number*>(input.const_data_ptr()),
           reinterpret_cast<const Number*>(packed.const_data_ptr()),
           bias ? reinterpret_cast<const Number*>(bias->const_data_ptr()) : nullptr,
           reinterpret_cast<Number*>(output.mutable_data_ptr()), rows, packed.size(1), output.size(output.dim() - 1)}
      .run();
}

// input [..., K], packed as above, bias [N]; K is a multiple of the packed pairs' size.
Tensor linear(Tensor input, Tensor packed, std::optional<Tensor> bias, int64_t outputs) {
  const int64_t inputs = packed.size(1) * (packed.dim() == 4 ? 2 : 1);
  STD_TORCH_CHECK(input.scalar_type() == packed.scalar_type() && input.size(input.dim() - 1) == inputs,
                  "inputs must have the dtype and the ", inputs, " columns of the packed weight");
  input = torch::stable::contiguous(input);
  std::vector<int64_t> shape(input.sizes().begin(), input.sizes().end());
  const int64_t rows = shape.back() ? input.numel() / shape.back() : 0;
  shape.back() = outputs;
  Tensor output = torch::stable::new_empty(input, shape);
  if (input.element_size() == sizeof(float)) {
    run<Float32>(input, packed, bias, output, rows);
  } else {
    run<BFloat16>(input, packed, bias, output, rows);
  }
  return output;
}

int64_t panel_size() { return PANEL; }

}  // namespace

STABLE_TORCH_LIBRARY(draftless, m) {
  m.def("linear(Tensor input, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  m.def("panel_size() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(draftless, CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }
STABLE_TORCH_LIBRARY_IMPL(draftless, CompositeExplicitAutograd, m) { m.impl("panel_size", TORCH_BOX(&panel_size)); }
