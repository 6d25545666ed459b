// A linear layer whose weights are packed once and serve any number of input rows, in float32 and bfloat16.
//
// A packed layer is one tensor of bytes: a header of 64-bit integers, then one or more weights with the same inputs, each
// in a form of its own. The header: how many weights there are, K, the digits of inputs that blocks are multiplied with
// (0: floats, see fixed_point.h), and for each weight its form, outputs, and offset in bytes.
// Weights lie in panels of PANEL outputs: [panels, K / STEP, unit]. Zeros fill up. float32 inputs take every form.
// A panel is read front to back. A block of up to ROWS input rows keeps its sums in registers. A few blocks take turns,
// CHUNK bytes each, so that these weights stay in the L1 cache. More blocks go over the panel again, from the L2 cache.
// Each fetches its share of what is next meanwhile: memory and arithmetic overlap. A thread may end within a panel: it
// takes some of the rows there, so that all threads have as much to do with few panels.
// The weights of a mixture's experts are one packed layer. Its input rows come sorted by expert, and each meets the
// weights of its expert alone.
// Every row is summed in the same order, however many rows there are, so its result does not depend on the others.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "blocks.h"
#include "shim.h"

namespace {

using namespace draftless;

constexpr int64_t LINE = 64;  // bytes of a cache line
constexpr int64_t BURST = 4;  // steps between fetches: a branch in each step makes compilers spill sums
constexpr int64_t CHUNK = 6 << 10, FEW = 4;   // bytes of a panel, and the blocks that take turns after each chunk
constexpr int64_t TOTALS = 32;                // inputs that are added up for forms with a minimum
constexpr int64_t READING = 8;                // rows whose products take as long as reading a panel
constexpr int64_t ROUNDED = 2048;             // inputs that a thread brings to fixed point at least

// Calls `block.template operator()<Form>()`. forms: ggml's numbers, and ours from 100 on. Forms in groups and float16
// take float32 inputs.
template <class Number, class Block>
void with_form(int64_t form, const Block& block) {
  constexpr bool is_float = std::is_same_v<Number, float>;
  if (form == 30) return block.template operator()<std::conditional_t<is_float, FromBFloat16, BFloat16>>();
  if constexpr (is_float) switch (form) {
      case 0: return block.template operator()<Float32>();
      case 1: return block.template operator()<FromFloat16>();
      case 2: return block.template operator()<Q4_0>();
      case 3: return block.template operator()<Q4_1>();
      case 6: return block.template operator()<Q5_0>();
      case 7: return block.template operator()<Q5_1>();
      case 8: return block.template operator()<Q8_0>();
      case 12: return block.template operator()<Q4_K>();
      case 13: return block.template operator()<Q5_K>();
      case 14: return block.template operator()<Q6_K>();
      case 100: return block.template operator()<F4_0>();
      case 101: return block.template operator()<F4_1>();
      case 102: return block.template operator()<F8_0>();
      case 103: return block.template operator()<F8_1>();
    }
  STD_TORCH_CHECK(false, "weights of form ", form, " cannot be packed, or not for inputs of this dtype");
}

int64_t round_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }
int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
int64_t units_of(int64_t inputs, int64_t step) { return (inputs + step - 1) / step; }

struct Part {
  int64_t form, outputs, offset;
};

// What the header of a packed layer says.
struct Layout {
  const uint8_t* data;
  int64_t inputs, digits, outputs = 0, panels = 0;
  std::vector<Part> parts;

  explicit Layout(const Tensor& packed) : data(reinterpret_cast<const uint8_t*>(packed.const_data_ptr())) {
    int64_t sizes[3];
    STD_TORCH_CHECK(packed.numel() >= LINE, "not a packed layer");
    std::memcpy(sizes, data, sizeof(sizes));
    inputs = sizes[1], digits = sizes[2];
    parts.resize(sizes[0]);
    std::memcpy(parts.data(), data + sizeof(sizes), sizes[0] * sizeof(Part));
    for (const Part& part : parts) outputs += part.outputs, panels += panels_of(part.outputs);
  }
};

template <class T>
struct Layer {
  using Number = typename T::Number;
  const Number* inputs;
  const float* totals;    // [rows, inputs / TOTALS], for forms with a minimum
  const uint8_t* packed;  // of this weight
  const Number* bias;     // of its outputs
  Number* outputs;        // the first one of this weight
  int64_t rows, all;            // input rows of this weight, and of all experts
  int64_t size, count, stride;  // inputs, outputs of this weight and of a row

  // Adds `length` units, from `unit` on, to the sums of R rows. Meanwhile `lines` of what is next are fetched.
  template <int R>
  void add_block(const uint8_t* weights, int64_t row, int64_t unit, int64_t length, const char* next, int64_t lines,
                 float* kept) const {
    const Number* inputs_of[R];
    for (int r = 0; r < R; ++r) inputs_of[r] = inputs + (row + r) * size;
    int64_t line = 0;
    if constexpr (T::IN_GROUPS) {
      const float* totals_of[R];
      for (int r = 0; r < R; ++r) totals_of[r] = T::HAS_MINIMUM ? totals + (row + r) * (size / TOTALS) : nullptr;
      for (int64_t k = 0; k < length; ++k, weights += T::BYTES) {
        for (; line < lines * (k + 1) / length; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
        T::template add<R>(weights, inputs_of, (unit + k) * T::STEP, totals_of, kept);
      }
    } else {
      Vector sums[R][VECTORS];
      std::memcpy(sums, kept, sizeof(sums));
      for (int r = 0; r < R; ++r) inputs_of[r] += unit * T::STEP;
      for (int64_t k = 0; k < length;) {
        const int64_t until = std::min(k + BURST, length);
        for (; line < lines * until / length; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
        for (; k < until; ++k, weights += T::BYTES)
          T::template step<R>(reinterpret_cast<const typename T::Weight*>(weights), inputs_of, k, sums);
      }
      std::memcpy(kept, sums, sizeof(sums));
    }
  }

  void write_block(int64_t panel, int64_t row, int64_t number, const float* sums) const {
    const int64_t first = panel * PANEL;
    const int columns = (int)std::min<int64_t>(PANEL, count - first);
    for (int64_t r = 0; r < number; ++r, sums += PANEL) {
      Number* into = outputs + (row + r) * stride + first;
      for (int n = 0; n < columns; ++n) into[n] = narrow(sums[n] + (bias ? widen(bias[first + n]) : 0.0f));
    }
  }

  static float widen(Number number) {
    if constexpr (std::is_same_v<Number, float>) return number;
    else return T::widen(number);
  }
  static Number narrow(float number) {
    if constexpr (std::is_same_v<Number, float>) return number;
    else return T::narrow(number);
  }

  // Some rows of a panel, at most FEW blocks. limit: the end of the weights to fetch, if any.
  void run_blocks(int64_t panel, int64_t first, int64_t number, const char* limit) const {
    constexpr int64_t units = std::max<int64_t>(1, CHUNK / T::BYTES);
    const int64_t steps = units_of(size, T::STEP), blocks = (number + ROWS - 1) / ROWS;
    alignas(LINE) float sums[FEW * ROWS * PANEL];
    std::fill(sums, sums + blocks * ROWS * PANEL, 0.0f);
    const uint8_t* weights = packed + panel * steps * T::BYTES;
    for (int64_t unit = 0; unit < steps; unit += units, weights += units * T::BYTES) {
      const int64_t length = std::min(units, steps - unit), bytes = length * T::BYTES;
      const char* next = reinterpret_cast<const char*>(weights + bytes);
      const int64_t lines = limit ? std::min<int64_t>(bytes, limit - next) / LINE : 0;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t row = first + number * block / blocks, block_rows = first + number * (block + 1) / blocks - row;
        const int64_t from = lines * block / blocks, to = lines * (block + 1) / blocks;
        float* kept = sums + block * ROWS * PANEL;
        with_rows(block_rows, [&]<int R>() {
          add_block<R>(weights, row, unit, length, next + from * LINE, to - from, kept);
        });
        if (unit + length == steps) write_block(panel, row, block_rows, kept);
      }
    }
  }

  // The same for the inputs in fixed point: groups [inputs / GROUP, all], from the first row of this weight on.
  template <int D>
  void run_blocks(int64_t panel, int64_t first, int64_t number, const Group<D>* groups) const {
    const int64_t steps = size / T::STEP;
    alignas(LINE) float sums[FEW * ROWS * PANEL];
    std::fill(sums, sums + number * PANEL, 0.0f);
    const uint8_t* weights = packed + panel * steps * T::BYTES;
    for (int64_t unit = 0; unit < steps; ++unit, weights += T::BYTES, groups += T::GROUPS * all)
      T::add(weights, groups + first, all, number, sums);
    write_block(panel, first, number, sums);
  }

  // A share of all panels' rows: number i is row i % rows of panel i / rows. fixed: the inputs in fixed point, if they
  // are to be multiplied so.
  template <class... Fixed>
  void run(int64_t begin, int64_t end, const Fixed*... fixed) const {
    const int64_t bytes = units_of(size, T::STEP) * T::BYTES;
    const char* limit = reinterpret_cast<const char*>(packed + (end + rows - 1) / rows * bytes);
    while (begin < end) {
      const int64_t row = begin % rows, left = std::min(rows - row, end - begin), number = std::min(left, FEW * ROWS);
      if constexpr (sizeof...(fixed) > 0) run_blocks(begin / rows, row, number, fixed...);
      else run_blocks(begin / rows, row, number, number < left ? nullptr : limit);
      begin += number;
    }
  }
};

// The sums of TOTALS inputs each, which minima are multiplied with.
template <class Number>
std::vector<float> add_up(const Number* inputs, int64_t rows, int64_t size) {
  std::vector<float> totals(rows * (size / TOTALS));
  if constexpr (std::is_same_v<Number, float>)
    for (int64_t i = 0; i < (int64_t)totals.size(); ++i) {
      const float* from = inputs + i / (size / TOTALS) * size + i % (size / TOTALS) * TOTALS;
      Vector sums = {};
      for (int k = 0; k < TOTALS; k += WIDTH) sums += *reinterpret_cast<const Vector*>(from + k);
      for (int k = 0; k < WIDTH; ++k) totals[i] += sums[k];
    }
  return totals;
}

// All rows of inputs in fixed point: [size / 32, rows].
template <int D>
std::unique_ptr<Group<D>[]> to_groups(const float* inputs, int64_t rows, int64_t size) {
  std::unique_ptr<Group<D>[]> groups(new Group<D>[rows * (size / 32)]);  // unlike a vector's, not zeroed
  torch::stable::parallel_for(0, rows, (ROUNDED + size - 1) / size, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) to_fixed_point(inputs + row * size, size, groups.get() + row, rows);
  });
  return groups;
}

// A weight and its rows of the input: from the first one on. done: outputs of earlier weights; column: its first one.
struct Task {
  Part part;
  int64_t first, rows, done, column;

  int64_t work() const { return panels_of(part.outputs) * (READING + rows); }
};

// What there is to compute. ends: after the last input row of each expert, whose weights follow each other.
std::vector<Task> list_tasks(const Layout& layout, const std::vector<int64_t>& ends) {
  const size_t each = layout.parts.size() / ends.size();
  STD_TORCH_CHECK(each * ends.size() == layout.parts.size(), "experts must have the same number of weights");
  const int64_t outputs = layout.outputs / (int64_t)ends.size();
  std::vector<Task> tasks;
  int64_t done = 0;
  for (size_t i = 0; i < layout.parts.size(); done += layout.parts[i++].outputs) {
    const int64_t first = i < each ? 0 : ends[i / each - 1], rows = ends[i / each] - first;
    STD_TORCH_CHECK(rows >= 0, "input rows must be sorted by expert");
    if (rows && outputs) tasks.push_back({layout.parts[i], first, rows, done, done % outputs});
  }
  return tasks;
}

template <class Number, int D>
void run(const Tensor& input, const Layout& layout, const std::optional<Tensor>& bias, const std::vector<int64_t>& ends,
         Tensor& output) {
  const Number* inputs = reinterpret_cast<const Number*>(input.const_data_ptr());
  const Number* biases = bias ? reinterpret_cast<const Number*>(bias->const_data_ptr()) : nullptr;
  Number* outputs = reinterpret_cast<Number*>(output.mutable_data_ptr());
  const int64_t rows = ends.back(), size = layout.inputs, stride = layout.outputs / (int64_t)ends.size();
  const std::vector<Task> tasks = list_tasks(layout, ends);
  std::vector<float> totals;
  std::unique_ptr<Group<D>[]> groups;
  int64_t work = 0;
  for (const Task& task : tasks)
    with_form<Number>(task.part.form, [&]<class T>() {
      work += task.work();
      if constexpr (T::IN_FIXED_POINT && D > 0) {
        if (!groups) groups = to_groups<D>(inputs, rows, size);
      } else if (T::HAS_MINIMUM && totals.empty()) {
        totals = add_up(inputs, rows, size);
      }
    });
  torch::stable::parallel_for(0, work, 1, [&](int64_t first, int64_t last) {
    int64_t before = 0;  // work of earlier weights
    for (const Task& task : tasks) {
      const int64_t begin = std::max(first, before) - before, end = std::min(last, before + task.work()) - before;
      if (begin < end)
        with_form<Number>(task.part.form, [&]<class T>() {
          const Number* its_bias = biases ? biases + task.done : nullptr;
          const float* its_totals = totals.empty() ? nullptr : totals.data() + task.first * (size / TOTALS);
          const Layer<T> layer{inputs + task.first * size, its_totals, layout.data + task.part.offset, its_bias,
                               outputs + task.first * stride + task.column, task.rows, rows, size, task.part.outputs,
                               stride};
          const int64_t from = begin * task.rows / (READING + task.rows), to = end * task.rows / (READING + task.rows);
          if constexpr (T::IN_FIXED_POINT && D > 0) layer.run(from, to, groups.get() + task.first);
          else layer.run(from, to);
        });
      before += task.work();
    }
  });
}

// input [..., K], bias [N]. ends [E], if the layer holds the weights of E experts: where their rows of the input [S, K]
// end. Each row then has N / E outputs.
Tensor linear(Tensor input, Tensor packed, std::optional<Tensor> bias, int64_t outputs, std::optional<Tensor> ends) {
  const Layout layout(packed);
  const bool is_float = input.scalar_type() == torch::headeronly::ScalarType::Float;
  STD_TORCH_CHECK(is_float || input.scalar_type() == torch::headeronly::ScalarType::BFloat16,
                  "inputs must be in float32 or bfloat16");
  const int64_t experts = ends ? ends->numel() : 1;
  STD_TORCH_CHECK(input.dim() && input.size(input.dim() - 1) == layout.inputs && experts * outputs == layout.outputs,
                  "inputs must have the ", layout.inputs, " columns of the packed weight, and outputs its ",
                  layout.outputs);
  std::vector<int64_t> last_rows{layout.inputs ? input.numel() / layout.inputs : 0};
  if (ends) {
    const Tensor numbers = torch::stable::contiguous(*ends);
    const int64_t* first = reinterpret_cast<const int64_t*>(numbers.const_data_ptr());
    STD_TORCH_CHECK(first[experts - 1] == last_rows[0], "each input row must have an expert");
    last_rows.assign(first, first + experts);
  }
  input = make_contiguous(input);
  std::vector<int64_t> shape(input.sizes().begin(), input.sizes().end());
  shape.back() = outputs;
  Tensor output = make_empty(input, shape);
  if (is_float && layout.digits == 2) run<float, 2>(input, layout, bias, last_rows, output);
  else if (is_float && layout.digits == 3) run<float, MOST_DIGITS == 3 ? 3 : 0>(input, layout, bias, last_rows, output);
  else (is_float ? run<float, 0> : run<uint16_t, 0>)(input, layout, bias, last_rows, output);
  return output;
}

// weights [N, bytes of a row], with the same inputs; forms: ggml's numbers; orders: row i of a weight is its row
// orders[i], or none. digits: 2, 3, or 0, as which all count for forms that this CPU multiplies with floats only.
Tensor pack(std::vector<Tensor> weights, std::vector<int64_t> forms, std::vector<Tensor> orders, int64_t inputs,
            int64_t digits) {
  STD_TORCH_CHECK(digits == 0 || digits == 2 || digits == 3, digits, " digits; there are 0, 2 and 3");
  std::vector<int64_t> header{(int64_t)weights.size(), inputs, 0};
  int64_t size = round_up(8 * (3 + 3 * weights.size()), LINE);
  for (size_t i = 0; i < weights.size(); ++i)
    with_form<float>(forms[i], [&]<class T>() {
      if (T::IN_FIXED_POINT) header[2] = digits;
      STD_TORCH_CHECK(!T::IN_GROUPS || inputs % T::STEP == 0, "a row must be of whole blocks");
      const int64_t outputs = weights[i].size(0);
      header.insert(header.end(), {forms[i], outputs, size});
      size += round_up(panels_of(outputs) * units_of(inputs, T::STEP) * T::BYTES, LINE);
    });
  Tensor packed = torch::stable::new_zeros(weights[0], {size}, torch::headeronly::ScalarType::Byte);
  uint8_t* data = reinterpret_cast<uint8_t*>(packed.mutable_data_ptr());
  std::memcpy(data, header.data(), 8 * header.size());
  for (size_t i = 0; i < weights.size(); ++i)
    with_form<float>(forms[i], [&]<class T>() {
      const Tensor rows = torch::stable::contiguous(weights[i]), order = torch::stable::contiguous(orders[i]);
      const int64_t outputs = rows.size(0), steps = units_of(inputs, T::STEP), bytes = rows.size(1);
      const uint8_t* source = reinterpret_cast<const uint8_t*>(rows.const_data_ptr());
      const int64_t* places = order.numel() ? reinterpret_cast<const int64_t*>(order.const_data_ptr()) : nullptr;
      uint8_t* into = data + header[3 + 3 * i + 2];
      torch::stable::parallel_for(0, panels_of(outputs), 1, [&](int64_t first, int64_t last) {
        for (int64_t n = first * PANEL; n < std::min(last * PANEL, outputs); ++n) {
          const uint8_t* row = source + (places ? places[n] : n) * bytes;
          uint8_t* panel = into + n / PANEL * steps * T::BYTES;
          for (int64_t k = 0; k < steps; ++k) {
            uint8_t last_unit[T::SOURCE] = {};  // may be cut off
            const int64_t left = std::min<int64_t>(T::SOURCE, bytes - k * T::SOURCE);
            if (left < T::SOURCE) std::memcpy(last_unit, row + k * T::SOURCE, left);
            T::pack(left < T::SOURCE ? last_unit : row + k * T::SOURCE, panel + k * T::BYTES, (int)(n % PANEL));
          }
        }
      });
    });
  return packed;
}

// The rows of a packed layer, in float32: [N, K], or [..., K] for these rows.
Tensor unpack(Tensor packed, Tensor rows) {
  const Layout layout(packed);
  rows = torch::stable::contiguous(rows);
  const int64_t* numbers = reinterpret_cast<const int64_t*>(rows.const_data_ptr());
  for (int64_t i = 0; i < rows.numel(); ++i)
    STD_TORCH_CHECK(numbers[i] >= 0 && numbers[i] < layout.outputs, "row ", numbers[i], " of ", layout.outputs);
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end());
  shape.push_back(layout.inputs);
  Tensor output = torch::stable::new_empty(packed, shape, torch::headeronly::ScalarType::Float);
  float* outputs = reinterpret_cast<float*>(output.mutable_data_ptr());
  torch::stable::parallel_for(0, rows.numel(), 16, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      int64_t row = numbers[i];
      const Part* part = layout.parts.data();
      for (; row >= part->outputs; ++part) row -= part->outputs;
      with_form<float>(part->form, [&]<class T>() {
        const int64_t steps = units_of(layout.inputs, T::STEP);
        const uint8_t* panel = layout.data + part->offset + row / PANEL * steps * T::BYTES;
        for (int64_t k = 0; k < steps; ++k) {
          float values[T::STEP];
          T::unpack(panel + k * T::BYTES, (int)(row % PANEL), values);
          const int64_t left = std::min<int64_t>(T::STEP, layout.inputs - k * T::STEP);
          std::memcpy(outputs + i * layout.inputs + k * T::STEP, values, 4 * left);
        }
      });
    }
  });
  return output;
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle input, AtenTensorHandle packed,
                                                          AtenTensorHandle* bias, int64_t outputs,
                                                          AtenTensorHandle* ends, AtenTensorHandle* result) {
  return answer(result, [&] {
    return linear(borrow(input), borrow(packed), bias ? std::optional(borrow(*bias)) : std::nullopt, outputs,
                  ends ? std::optional(borrow(*ends)) : std::nullopt);
  });
}

STABLE_TORCH_LIBRARY(draftless, m) {
  m.def("packed_linear(Tensor input, Tensor packed, Tensor? bias, int outputs, Tensor? ends=None) -> Tensor");
  m.def("pack(Tensor[] weights, int[] forms, Tensor[] orders, int inputs, int digits) -> Tensor");
  m.def("unpack(Tensor packed, Tensor rows) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(draftless, CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&linear));
  m.impl("pack", TORCH_BOX(&pack));
  m.impl("unpack", TORCH_BOX(&unpack));
}
