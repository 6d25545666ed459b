// The register block that the linear and the attention op share: a few rows of inputs against a panel of columns.
//
// A form of weights is a struct. Its numbers lie in units: STEP inputs of PANEL columns, in BYTES bytes.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__) || defined(__AVX2__)
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
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline float widen_half(uint16_t half) {  // the float32 number of a float16's bits
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits = (rest << 13) + 0x38000000u;
  if (rest >= 0x7c00) bits += 0x38000000u;  // infinite, or NaN
  float number;
  if (rest < 0x400) {
    number = (float)rest * 0x1p-24f;  // subnormal
    std::memcpy(&bits, &number, 4);
  }
  bits |= sign;
  std::memcpy(&number, &bits, 4);
  return number;
}

inline Vector load_halves(const uint8_t* from) {  // float16 numbers
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__) && defined(__AVX2__)
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Vector numbers;
  for (int i = 0; i < WIDTH; ++i) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, 2);
    numbers[i] = widen_half(half);
  }
  return numbers;
#endif
}

// exp(x) for x <= 0, to about 2 units in the last place, in a form that compilers vectorise.
inline float exp_negative(float x) {
  x = std::max(x, -87.0f);
  const float whole = std::nearbyint(x * 1.44269504f);
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // Cody and Waite's split of ln 2
  float power = 1.9875691500e-4f;  // the polynomial of Cephes' expf
  power = power * rest + 1.3981999507e-3f;
  power = power * rest + 8.3334519073e-3f;
  power = power * rest + 4.1665795894e-2f;
  power = power * rest + 1.6666665459e-1f;
  power = power * rest + 5.0000001201e-1f;
  power = power * rest * rest + rest + 1.0f;
  const int32_t bits = ((int32_t)whole + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return x <= -87.0f ? 0.0f : power * scale;
}

template <class Byte>  // int8_t or uint8_t
inline Vector load_bytes(const uint8_t* from) {
  constexpr bool is_signed = std::is_signed_v<Byte>;
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
  return (Vector)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)from);
  return (Vector)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  Vector numbers;
  for (int i = 0; i < WIDTH; ++i) numbers[i] = is_signed ? (float)(int8_t)from[i] : (float)from[i];
  return numbers;
#endif
}

inline Vector to_floats(Words numbers) {  // numbers below 2^31
  return __builtin_convertvector((Integers)numbers, Vector);
}

// The lowest 4 bits of each lane as a number, plus OFFSET; with `fifth`, its lowest bit above them.
template <int OFFSET>
inline Vector look_up(Words bits) {
#if defined(__AVX512F__)
  const Vector offset = Vector{} + (float)OFFSET, table = offset + Vector{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (Vector)_mm512_permutexvar_ps((__m512i)bits, (__m512)table);
#else
  return to_floats(bits & 15u) + (float)OFFSET;
#endif
}

template <int OFFSET>
inline Vector look_up(Words bits, Words fifth) {
#if defined(__AVX512F__)
  const Vector offset = Vector{} + (float)OFFSET, low = offset + Vector{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i index = _mm512_ternarylogic_epi32((__m512i)bits, (__m512i)(fifth << 4u), _mm512_set1_epi32(16), 0xd8);
  return (Vector)_mm512_permutex2var_ps((__m512)low, index, (__m512)(low + 16.0f));
#else
  return to_floats((bits & 15u) | (fifth & 1u) << 4) + (float)OFFSET;
#endif
}

// Numbers that lie one by one.
template <class N, class W, int S>
struct Plain {
  using Number = N;  // of inputs and outputs
  using Weight = W;
  static constexpr bool IN_GROUPS = false, IN_FIXED_POINT = false, HAS_MINIMUM = false;
  static constexpr int STEP = S;
  static constexpr int64_t BYTES = STEP * PANEL * sizeof(Weight), SOURCE = STEP * sizeof(Weight);

  // Puts STEP numbers in a lane of a unit.
  static void pack(const uint8_t* numbers, uint8_t* unit, int lane) {
    std::memcpy(unit + lane * SOURCE, numbers, SOURCE);
  }
};

struct Float32 : Plain<float, float, 1> {

  // Adds the products of one input number of each row with a panel's numbers.
  template <int R>
  static inline void step(const float* panel, const float* const* inputs, int64_t k, Vector (&sums)[R][VECTORS]) {
    for (int v = 0; v < VECTORS; ++v) {
      const Vector weight = reinterpret_cast<const Vector*>(panel)[v];
      for (int r = 0; r < R; ++r) sums[r][v] += inputs[r][k] * weight;
    }
  }
  static void unpack(const uint8_t* unit, int lane, float* into) { std::memcpy(into, unit + 4 * lane, 4); }
  static float widen(float number) { return number; }
  static float narrow(float number) { return number; }
};

struct BFloat16 : Plain<uint16_t, uint16_t, 2> {  // a pair: one 32-bit lane holds two inputs of one column

  template <int R>
  static inline void step(const uint16_t* panel, const uint16_t* const* inputs, int64_t k,
                          Vector (&sums)[R][VECTORS]) {
    uint32_t pairs[R];
    for (int r = 0; r < R; ++r) std::memcpy(&pairs[r], inputs[r] + 2 * k, 4);
    const Words* weights = reinterpret_cast<const Words*>(panel);
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
  static void unpack(const uint8_t* unit, int lane, float* into) {
    uint16_t pair[2];
    std::memcpy(pair, unit + 4 * lane, 4);
    for (int i = 0; i < 2; ++i) into[i] = widen(pair[i]);
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
struct FromBFloat16 : BFloat16 {
  using Number = float;

  template <int R>
  static inline void step(const uint16_t* panel, const float* const* inputs, int64_t k, Vector (&sums)[R][VECTORS]) {
    const Words* weights = reinterpret_cast<const Words*>(panel);
    for (int odd = 0; odd < 2; ++odd)  // one after the other: the inputs of both at once need too many registers
      for (int v = 0; v < VECTORS; ++v) {
        const Vector weight = (Vector)(odd ? weights[v] & 0xffff0000u : weights[v] << 16);
        for (int r = 0; r < R; ++r) sums[r][v] += inputs[r][2 * k + odd] * weight;
      }
  }
  static float widen(float number) { return number; }
  static float narrow(float number) { return number; }
  using BFloat16::unpack;
};

// float32 numbers and weights in float16.
struct FromFloat16 : Plain<float, uint16_t, 1> {
  template <int R>
  static inline void step(const uint16_t* panel, const float* const* inputs, int64_t k, Vector (&sums)[R][VECTORS]) {
    for (int v = 0; v < VECTORS; ++v) {
      const Vector weight = load_halves(reinterpret_cast<const uint8_t*>(panel + WIDTH * v));
      for (int r = 0; r < R; ++r) sums[r][v] += inputs[r][k] * weight;
    }
  }
  static void unpack(const uint8_t* unit, int lane, float* into) {
    uint16_t half;
    std::memcpy(&half, unit + 2 * lane, 2);
    *into = widen_half(half);
  }
  static float widen(float number) { return number; }
  static float narrow(float number) { return number; }
};

// Calls `block.template operator()<R>()` for a number of rows R that is only known when it runs, from 1 to ROWS.
template <int R = ROWS, class Block>
inline void with_rows(int64_t rows, const Block& block) {
  if (rows == R) return block.template operator()<R>();
  if constexpr (R > 1) with_rows<R - 1>(rows, block);
}

}  // namespace draftless
