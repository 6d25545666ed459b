// Inputs of a layer in fixed point: integers of 16 or 24 bits with a scale for every 32 of them, cut into signed bytes.
//
// AVX512-VNNI multiplies and adds four bytes in the time of one float. So each byte of the inputs, here a digit, is
// multiplied with the weights' unsigned numbers and summed in integers, which is exact in any order. 24 bits are as near
// to the truth as float32: a float has 24 bits too, and its sums round where these do not.

#pragma once

#include "vectors.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define DRAFTLESS_FIXED_POINT 1
#else
#define DRAFTLESS_FIXED_POINT 0
#endif

namespace draftless {

// 32 inputs of a row in D digits, the highest first: input = scale * (digit 0 * 256^(D - 1) + ...).
template <int D>
struct Group {
  float scale, totals[3];  // totals: of the first half, the second, and all
  int32_t high, low;       // 128 times the sums of all digits but the third, and of the third
  int32_t digits[D][8];    // four in a word, inputs 0 2 4 6, then 1 3 5 7, then 8 10 12 14, and so on
};

#if DRAFTLESS_FIXED_POINT
// A row of inputs in groups, which are `stride` apart. Where an input is infinite or NaN, all products are NaN.
template <int D>
void to_fixed_point(const float* inputs, int64_t size, Group<D>* into, int64_t stride) {
  // What the digits can hold, less one in 24 bits: the largest input times the inverse scale may round up.
  constexpr float LARGEST = D == 2 ? 127 * 256 + 127 : 127 * 65536 + 127 * 256 + 126;
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  for (int64_t k = 0; k < size; k += 32, into += stride) {
    const __m512 halves[2] = {_mm512_loadu_ps(inputs + k), _mm512_loadu_ps(inputs + k + 16)};
    // As integers, absolute values are in the same order, and NaN comes last.
    const __m512i bits = _mm512_max_epi32((__m512i)_mm512_abs_ps(halves[0]), (__m512i)_mm512_abs_ps(halves[1]));
    const int32_t most_bits = _mm512_reduce_max_epi32(bits);
    float most;
    std::memcpy(&most, &most_bits, 4);
    const bool is_finite = most_bits < 0x7f800000, is_zero = most < 0x1p-100f;  // its inverse may be infinite
    into->scale = is_finite ? (is_zero ? 0.0f : most / LARGEST) : __builtin_nanf("");
    const __m512 inverse = _mm512_set1_ps(is_finite && !is_zero ? LARGEST / most : 0.0f);
    int32_t total = 0, high = 0;
    for (int half = 0; half < 2; ++half) {
      __m512i left = _mm512_cvtps_epi32(_mm512_mul_ps(halves[half], inverse));
      const int32_t sum = _mm512_reduce_add_epi32(left);
      into->totals[half] = into->scale * (float)sum, total += sum;
      for (int d = D - 1; d >= 0; --d) {
        const __m128i digit = _mm512_cvtepi32_epi8(left);
        _mm_storeu_si128((__m128i*)into->digits[d] + half, _mm_shuffle_epi8(digit, order));
        left = _mm512_srai_epi32(_mm512_sub_epi32(left, _mm512_cvtepi8_epi32(digit)), 8);
        if (d == 2) high += _mm512_reduce_add_epi32(left);
      }
    }
    into->high = 128 * (D == 3 ? high : total), into->low = D == 3 ? 128 * (total - 256 * high) : 0;
    into->totals[2] = into->totals[0] + into->totals[1];
  }
}

// Adds the products of four digits with four unsigned bytes in each lane. Compilers would load the digits apart.
inline void add_products(__m512i& sums, __m512i weights, const int32_t& digits) {
  asm("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sums) : "m"(digits), "v"(weights));
}

// Adds the products of R rows' inputs and the weights of WIDTH outputs, scale * weights + minimum, to the rows' sums,
// which are PANEL apart. part: the inputs that these are, as in `Group::totals`. IS_SIGNED: 128 was added to the weights;
// it is taken away in integers, because it may be much larger than they are.
template <int D, int R, int INPUTS, bool HAS_MINIMUM, bool IS_SIGNED>
inline void add_rows(const __m512i (&weights)[INPUTS / 4], Vector scale, Vector minimum, const Group<D>* groups,
                     int part, float* kept) {
  __m512i sums[R][D];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)  // one by one: compilers clear an array in memory
#pragma GCC unroll 3
    for (int d = 0; d < D; ++d) sums[r][d] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < INPUTS / 4; ++i)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int d = 0; d < D; ++d) add_products(sums[r][d], weights[i], groups[r].digits[d][part % 2 * INPUTS / 4 + i]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sums[r][0], 8), sums[r][1]);
    if constexpr (IS_SIGNED) high = _mm512_sub_epi32(high, _mm512_set1_epi32(groups[r].high));
    if constexpr (IS_SIGNED && D == 3) sums[r][2] = _mm512_sub_epi32(sums[r][2], _mm512_set1_epi32(groups[r].low));
    Vector value = (Vector)_mm512_cvtepi32_ps(high);
    if constexpr (D == 3) value = value * 256.0f + (Vector)_mm512_cvtepi32_ps(sums[r][2]);
    Vector& into = *reinterpret_cast<Vector*>(kept + r * PANEL);
    into += groups[r].scale * scale * value;
    if constexpr (HAS_MINIMUM) into += groups[r].totals[part] * minimum;
  }
}

#endif

}  // namespace draftless
