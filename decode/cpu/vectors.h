// The register block that the linear and the attention op share: a few rows of inputs against a panel of columns.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace draftless {

#if defined(__AVX512F__)
constexpr int WIDTH = 16, VECTORS = 4;  // 24 of 32 registers hold sums
#elif defined(__AVX2__)
constexpr int WIDTH = 8, VECTORS = 2;  // 12 of 16
#else
constexpr int WIDTH = 4, VECTORS = 4;  // 24 of 32 on Arm
#endif
constexpr int ROWS = 6, PANEL = WIDTH * VECTORS;

// GCC and Clang map these to the widest registers at hand. They may lie at any address.
typedef float Vector __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t Pairs __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

struct Float32 {
  using Number = float;
  using Weight = float;
  static constexpr int STEP = 1;  // input numbers of a step

  // Adds the products of one input number of each row with a panel's numbers.
  template <int R>
  static inline void step(const float* panel, const float* const* inputs, int64_t k, Vector (&sums)[R][VECTORS]) {
    for (int v = 0; v < VECTORS; ++v) {
      const Vector weight = reinterpret_cast<const Vector*>(panel)[v];
      for (int r = 0; r < R; ++r) sums[r][v] += inputs[r][k] * weight;
    }
  }
  static float widen(float number) { return number; }
  static float narrow(float number) { return number; }
};

struct BFloat16 {
  using Number = uint16_t;
  using Weight = uint16_t;
  static constexpr int STEP = 2;  // a pair: one 32-bit lane holds two inputs of one column

  template <int R>
  static inline void step(const uint16_t* panel, const uint16_t* const* inputs, int64_t k,
                          Vector (&sums)[R][VECTORS]) {
    uint32_t pairs[R];
    for (int r = 0; r < R; ++r) std::memcpy(&pairs[r], inputs[r] + 2 * k, 4);
    const Pairs* weights = reinterpret_cast<const Pairs*>(panel);
#if defined(__AVX512BF16__)
    for (int r = 0; r < R; ++r) {  // row by row: the pairs of all rows at once need too many registers
      const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)pairs[r]);
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = (Vector)_mm512_dpbf16_ps((__m512)sums[r][v], pair, (__m512bh)weights[v]);
    }
#else
    for (int v = 0; v < VECTORS; ++v) {
      const Vector even = (Vector)(weights[v] << 16), odd = (Vector)(weights[v] & 0xffff0000u);
      for (int r = 0; r < R; ++r) {
        sums[r][v] += widen((uint16_t)pairs[r]) * even;
        sums[r][v] += widen((uint16_t)(pairs[r] >> 16)) * odd;
      }
    }
#endif
  }
  static float widen(uint16_t number) {
    const uint32_t bits = (uint32_t)number << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  }
  static uint16_t narrow(float number) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    if (number != number) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

// float32 numbers and weights that bfloat16 holds exactly: the same bits as `Float32` from half the memory.
struct HalvedFloat32 : Float32 {
  using Weight = uint16_t;
  static constexpr int STEP = 2;

  template <int R>
  static inline void step(const uint16_t* panel, const float* const* inputs, int64_t k, Vector (&sums)[R][VECTORS]) {
    const Pairs* weights = reinterpret_cast<const Pairs*>(panel);
    for (int odd = 0; odd < 2; ++odd)  // one after the other: the inputs of both at once need too many registers
      for (int v = 0; v < VECTORS; ++v) {
        const Vector weight = (Vector)(odd ? weights[v] & 0xffff0000u : weights[v] << 16);
        for (int r = 0; r < R; ++r) sums[r][v] += inputs[r][2 * k + odd] * weight;
      }
  }
};

// Calls `block.template operator()<R>()` for a number of rows R that is only known when it runs, from 1 to ROWS.
template <int R = ROWS, class Block>
inline void with_rows(int64_t rows, const Block& block) {
  if (rows == R) return block.template operator()<R>();
  if constexpr (R > 1) with_rows<R - 1>(rows, block);
}

}  // namespace draftless
