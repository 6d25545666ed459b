// Products of weights in blocks against sums in double precision, for the instructions that this is compiled for. It needs
// no torch, so that it runs under an emulator. Prints what went wrong; its status is 1 then.

#include <cstdio>
#include <random>
#include <vector>

#include "blocks.h"

using namespace draftless;

constexpr int UNITS = 2, MOST_ROWS = 13;
std::mt19937 draw(0);
bool failed = false;

void expect(bool is_right, const char* form, const char* what, int rows) {
  if (is_right) return;
  std::printf("%s: %s with %d rows\n", form, what, rows);
  failed = true;
}

// The bytes of a block with scales between 1/4 and 4. The first block has the largest numbers that there are.
template <class T>
std::vector<uint8_t> make_block(bool is_first) {
  std::vector<uint8_t> block(T::SOURCE);
  constexpr uint8_t LARGEST = T::LOW == PANEL * T::GROUP ? 127 : 255;  // of signed bytes, of others
  for (uint8_t& byte : block) byte = is_first ? LARGEST : (uint8_t)draw();
  const int number = T::HAS_MINIMUM ? 2 : 1;
  for (int i = 0; i < number; ++i) {
    const bool is_last = T::IS_SUPER && !T::HAS_MINIMUM;
    uint8_t* at = block.data() + (is_last ? T::SOURCE - 2 : i * T::WIDE);
    at[T::WIDE - 1] = (uint8_t)(T::WIDE == 2 ? 0x34 + draw() % 12 : 0x3f), at[T::WIDE - 1] |= (uint8_t)(draw() % 2 << 7);
  }
  return block;
}

template <class T>
void check(const char* form) {
  constexpr int SIZE = UNITS * T::STEP, GROUPS = SIZE / 32;
  std::vector<uint8_t> panel(UNITS * T::BYTES);
  std::vector<float> values(PANEL * SIZE), inputs(MOST_ROWS * SIZE), totals(MOST_ROWS * GROUPS);
  for (int unit = 0; unit < UNITS; ++unit)
    for (int lane = 0; lane < PANEL; ++lane) T::pack(make_block<T>(lane == 0).data(), panel.data() + unit * T::BYTES, lane);
  for (int unit = 0; unit < UNITS; ++unit)
    for (int lane = 0; lane < PANEL; ++lane)
      T::unpack(panel.data() + unit * T::BYTES, lane, values.data() + lane * SIZE + unit * T::STEP);
  for (float& each : inputs) each = std::normal_distribution<float>()(draw);
  inputs[SIZE + 3] = 20.0f;
  for (int k = 0; k < SIZE; ++k) {  // all digits are as large as can be, with either sign; and zeros
    inputs[2 * SIZE + k] = 3.0f, inputs[3 * SIZE + k] = -3.0f, inputs[4 * SIZE + k] = 0.0f;
    inputs[5 * SIZE + k] = k % 32 ? 3.0f * (127 * 256 - 128) / (127 * 256 + 127) : 3.0f;  // low digits of -128
  }
  for (int i = 0; i < MOST_ROWS * GROUPS; ++i)
    for (int k = 0; k < 32; ++k) totals[i] += inputs[i / GROUPS * SIZE + i % GROUPS * 32 + k];

  // rounding: of an input, as a share of the largest of its 32.
  const auto is_close = [&](const std::vector<float>& sums, int rows, double rounding) {
    for (int r = 0; r < rows; ++r)
      for (int lane = 0; lane < PANEL; ++lane) {
        double exact = 0, allowed = 0;
        for (int g = 0; g < GROUPS; ++g) {
          const float* group = inputs.data() + r * SIZE + 32 * g;
          const float largest = std::abs(*std::max_element(
              group, group + 32, [](float one, float other) { return std::abs(one) < std::abs(other); }));
          for (int k = 0; k < 32; ++k) {
            const double value = values[lane * SIZE + 32 * g + k];
            exact += group[k] * value, allowed += std::abs(value) * (1e-6 * std::abs(group[k]) + rounding * largest);
          }
        }
        if (!(std::abs(sums[r * PANEL + lane] - exact) <= allowed)) return false;
      }
    return true;
  };
  std::vector<float> alone(MOST_ROWS * PANEL);
  const auto compare = [&](const std::vector<float>& sums, int rows, const char* what) {
    if (rows == MOST_ROWS) alone = sums;
    expect(!std::memcmp(sums.data(), alone.data(), 4 * rows * PANEL), form, what, rows);
  };

  std::vector<const float*> rows_of, totals_of;
  for (int r = 0; r < MOST_ROWS; ++r) {
    rows_of.push_back(inputs.data() + r * SIZE);
    totals_of.push_back(totals.data() + r * GROUPS);
  }
  const auto in_floats = [&]<int R>() {
    std::vector<float> sums(R * PANEL);
    for (int unit = 0; unit < UNITS; ++unit)
      T::template add<R>(panel.data() + unit * T::BYTES, rows_of.data(), unit * T::STEP, totals_of.data(), sums.data());
    expect(is_close(sums, R, 0), form, "products of floats", R);
  };
  in_floats.template operator()<1>();
  in_floats.template operator()<5>();

  const auto in_fixed_point = [&]<int D>() {
    if constexpr (T::IN_FIXED_POINT)
      for (int rows = MOST_ROWS; rows > 0; --rows) {
        std::vector<Group<D>> groups(rows * GROUPS);
        for (int r = 0; r < rows; ++r) to_fixed_point(rows_of[r], SIZE, groups.data() + r, rows);
        std::vector<float> sums(rows * PANEL);
        for (int unit = 0; unit < UNITS; ++unit)
          T::add(panel.data() + unit * T::BYTES, groups.data() + unit * T::GROUPS * rows, rows, rows, sums.data());
        expect(is_close(sums, rows, D == 3 ? 0 : 0x1p-16), form, D == 3 ? "products of 24 bits" : "of 16 bits", rows);
        compare(sums, rows, D == 3 ? "another result in 24 bits" : "another result in 16 bits");
      }
  };
  in_fixed_point.template operator()<2>();
  in_fixed_point.template operator()<3>();
}

int main() {
  check<Q4_0>("Q4_0"), check<Q4_1>("Q4_1"), check<Q5_0>("Q5_0"), check<Q5_1>("Q5_1"), check<Q8_0>("Q8_0");
  check<Q4_K>("Q4_K"), check<Q5_K>("Q5_K"), check<Q6_K>("Q6_K");
  check<F4_0>("F4_0"), check<F4_1>("F4_1"), check<F8_0>("F8_0"), check<F8_1>("F8_1");
  std::printf("%d lanes; inputs in fixed point of weights with 4 bits: %d, with 8: %d\n", WIDTH, (int)Q4_0::IN_FIXED_POINT,
              (int)Q8_0::IN_FIXED_POINT);
  return failed;
}
