// Inputs of a layer in fixed point: integers of 16 or 24 bits with a scale for every 32 of them, cut into signed bytes.
//
// CPUs multiply and add four bytes in about the time of one float. So each byte of the inputs, here a digit, is multiplied
// with the weights' numbers and summed in integers, which is exact in any order. 24 bits are as near to the truth as
// float32: a float has 24 bits too, and its sums round where these do not.

#pragma once

#include "vectors.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace draftless {

// What differs between CPUs. `add_products` adds the products of four digits with four weights in each lane, as often as
// `words_held` says for weights of some bits; 0: not at all. TAKES_SIGNED: weights are signed, elsewhere unsigned. SUMS:
// how many sums fit in registers, beside what they are made of. MOST_DIGITS: floats are as fast as more.
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
constexpr int SUMS = 18, MOST_DIGITS = 3;
constexpr bool TAKES_SIGNED = false;
constexpr int words_held(int) { return 8; }
typedef Integers Products;
inline void add_products(Products& sums, Words weights, const int32_t& digits) {  // compilers load the digits apart
  asm("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sums) : "m"(digits), "v"(weights));
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr int SUMS = 12, MOST_DIGITS = 3;
constexpr bool TAKES_SIGNED = false;
constexpr int words_held(int) { return 8; }
typedef Integers Products;
inline void add_products(Products& sums, Words weights, int32_t digits) {
  sums = (Products)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(digits));
}
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr int SUMS = WIDTH == 16 ? 18 : 12, MOST_DIGITS = 2;
constexpr bool TAKES_SIGNED = false;
constexpr int words_held(int bits) { return 32767 / (2 * 128 * ((1 << bits) - 1)); }  // two products in each 16 bits
typedef int16_t Products __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
#if defined(__AVX512BW__)
inline void add_products(Products& sums, Words weights, int32_t digits) {
  const Products found = (Products)_mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(digits));
  asm("vpaddw %1, %0, %0" : "+v"(sums) : "v"(found));  // compilers would add all at the end, from memory
}
inline Integers to_integers(Products sums) { return (Integers)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
#else
inline void add_products(Products& sums, Words weights, int32_t digits) {
  const Products found = (Products)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(digits));
  asm("vpaddw %1, %0, %0" : "+v"(sums) : "v"(found));  // compilers would add all at the end, from memory
}
inline Integers to_integers(Products sums) { return (Integers)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int SUMS = 18, MOST_DIGITS = 3;
constexpr bool TAKES_SIGNED = true;
constexpr int words_held(int) { return 8; }
typedef Integers Products;
inline void add_products(Products& sums, Words weights, int32_t digits) {
  sums = (Products)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(digits)));
}
#else
constexpr int SUMS = 18, MOST_DIGITS = 3;
constexpr bool TAKES_SIGNED = false;
constexpr int words_held(int) { return 0; }
typedef Integers Products;
inline void add_products(Products&, Words, int32_t) {}
#endif
inline Integers to_integers(Integers sums) { return sums; }

// 32 inputs of a row in D digits, the highest first: input = scale * (digit 0 * 256^(D - 1) + ...).
template <int D>
struct Group {
  float scale, totals[3];  // totals: of the first half, the second, and all
  int32_t high, low;       // 128 times the sums of all digits but the third, and of the third
  int32_t digits[D][8];    // four in a word, inputs 0 2 4 6, then 1 3 5 7, then 8 10 12 14, and so on
};

// Eight numbers, in the registers that there are.
typedef float Floats8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Integers8 __attribute__((vector_size(32), aligned(4), may_alias));

inline Integers8 turn_pairs(Integers8 numbers) { return __builtin_shufflevector(numbers, numbers, 1, 0, 3, 2, 5, 4, 7, 6); }
inline Integers8 turn_fours(Integers8 numbers) { return __builtin_shufflevector(numbers, numbers, 2, 3, 0, 1, 6, 7, 4, 5); }

inline Integers8 larger(Integers8 a, Integers8 b) { return a > b ? a : b; }

// Of four numbers each their sum, in all four places.
inline Integers8 add_fours(Integers8 numbers) {
  numbers += turn_fours(numbers);
  return numbers + turn_pairs(numbers);
}

// 32 inputs as the bytes of words have them: of each word (see `Group`) the first, the second, ... input.
inline void place_inputs(const float* inputs, Floats8 (&placed)[4]) {
  const Floats8* from = reinterpret_cast<const Floats8*>(inputs);
  Floats8 even[2], odd[2];
  for (int i = 0; i < 2; ++i) {
    even[i] = __builtin_shufflevector(from[2 * i], from[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13);
    odd[i] = __builtin_shufflevector(from[2 * i], from[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  placed[0] = __builtin_shufflevector(even[0], even[1], 0, 1, 2, 3, 8, 9, 10, 11);
  placed[1] = __builtin_shufflevector(odd[0], odd[1], 0, 1, 2, 3, 8, 9, 10, 11);
  placed[2] = __builtin_shufflevector(even[0], even[1], 4, 5, 6, 7, 12, 13, 14, 15);
  placed[3] = __builtin_shufflevector(odd[0], odd[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// A row of inputs in groups, which are `stride` apart. Where an input is infinite or NaN, all products are NaN.
template <int D>
void to_fixed_point(const float* inputs, int64_t size, Group<D>* into, int64_t stride) {
  // What the digits can hold, less one in 24 bits: the largest input times the inverse scale may round up.
  constexpr float LARGEST = D == 2 ? 127 * 256 + 127 : 127 * 65536 + 127 * 256 + 126;
  for (int64_t k = 0; k < size; k += 32, into += stride) {
    Floats8 placed[4];
    place_inputs(inputs + k, placed);
    Integers8 bits = {};  // of absolute values: as integers they are in the same order, and NaN comes last
    for (const Floats8& each : placed) bits = larger(bits, (Integers8)each & 0x7fffffff);
    bits = larger(bits, turn_fours(bits)), bits = larger(bits, turn_pairs(bits));
    const int32_t most_bits = std::max(bits[0], bits[4]);
    float most;
    std::memcpy(&most, &most_bits, 4);
    const bool is_finite = most_bits < 0x7f800000, is_zero = most < 0x1p-100f;  // its inverse may be infinite
    into->scale = is_finite ? (is_zero ? 0.0f : most / LARGEST) : __builtin_nanf("");
    const float inverse = is_finite && !is_zero ? LARGEST / most : 0.0f;
    Integers8 left[4], sums = {}, high = {};
    for (int i = 0; i < 4; ++i) {  // to the nearest integer
      const Floats8 scaled = is_finite ? placed[i] * inverse : Floats8{};
      const Floats8 half = (Floats8)(((Integers8)scaled & (int32_t)0x80000000) | 0x3f000000);  // 0.5 with its sign
      sums += left[i] = __builtin_convertvector(scaled + half, Integers8);
    }
    for (int d = D - 1; d >= 0; --d) {
      Integers8 words = {};
      for (int i = 0; i < 4; ++i) {
        words |= (left[i] & 255) << (8 * i);
        left[i] = (left[i] + 128) >> 8;  // less this digit, which is signed
        if (d == 2) high += left[i];
      }
      *reinterpret_cast<Integers8*>(into->digits[d]) = words;
    }
    sums = add_fours(sums), high = add_fours(high);
    const int32_t total = sums[0] + sums[4], high_total = high[0] + high[4];
    into->high = 128 * (D == 3 ? high_total : total), into->low = D == 3 ? 128 * (total - 256 * high_total) : 0;
    for (int half = 0; half < 2; ++half) into->totals[half] = into->scale * (float)sums[4 * half];
    into->totals[2] = into->totals[0] + into->totals[1];
  }
}

// Adds the products of R rows' inputs and the weights of WIDTH outputs, scale * weights + minimum, to the rows' sums,
// which are PANEL apart. HELD: see `words_held`. part: the inputs that these are, as in `Group::totals`. IS_SHIFTED: 128
// was added to the weights; it is taken away in integers, because it may be much larger than they are.
template <int D, int R, int WORDS, int HELD, bool HAS_MINIMUM, bool IS_SHIFTED>
inline void add_rows(const Words (&weights)[WORDS], Vector scale, Vector minimum, const Group<D>* groups, int part,
                     float* kept) {
  Integers sums[R][D];
#pragma GCC unroll 8
  for (int first = 0; first < WORDS; first += HELD) {
    Products products[R][D];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)  // one by one: compilers clear an array in memory
#pragma GCC unroll 3
      for (int d = 0; d < D; ++d) products[r][d] = Products{};
#pragma GCC unroll 8
    for (int i = first; i < first + HELD; ++i)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
        for (int d = 0; d < D; ++d) add_products(products[r][d], weights[i], groups[r].digits[d][part % 2 * WORDS + i]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int d = 0; d < D; ++d) {
        const Integers found = to_integers(products[r][d]);
        sums[r][d] = first ? sums[r][d] + found : found;
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    Integers high = (sums[r][0] << 8) + sums[r][1];
    if constexpr (IS_SHIFTED) high -= groups[r].high;
    if constexpr (IS_SHIFTED && D == 3) sums[r][2] -= groups[r].low;
    Vector value = __builtin_convertvector(high, Vector);
    if constexpr (D == 3) value = value * 256.0f + __builtin_convertvector(sums[r][2], Vector);
    Vector& into = *reinterpret_cast<Vector*>(kept + r * PANEL);
    into += groups[r].scale * scale * value;
    if constexpr (HAS_MINIMUM) into += groups[r].totals[part] * minimum;
  }
}

}  // namespace draftless
