// Weights in blocks, as GGUF files store them: a few bits for each input, and a scale for every 16 or 32 inputs.
//
// The block formats and their names are ggml's, but for those with float32 scales, which quantized checkpoints of
// transformers have: the scale, the minimum if any, and the numbers in the order of Q4_0 and Q8_0. What a block holds
// lies in panels here, so that a lane has an output: a word of 4 bits for 8 inputs, further bits in words of their own,
// 8 bits as bytes. `word_of` and `byte_of` tell where: after a mask, words are operands of products of bytes. The values
// are exactly the file's: scale * q + minimum. A layer sums q * input over a group first, so it rounds less than a product
// with each value.

#pragma once

#include "fixed_point.h"
#include "vectors.h"

namespace draftless {

enum class Scale {
  HALF,       // a group of 32 has a float16 scale
  HALF_MIN,   // and a float16 minimum
  FLOAT,      // a group of 32 has a float32 scale
  FLOAT_MIN,  // and a float32 minimum
  SUPER_MIN,  // 8 groups of 32 share a float16 scale and minimum; each has a factor of 6 bits for both
  SUPER       // 8 groups share a float16 scale; each half group has a factor of 8 bits
};

// BITS of a number; BIAS: what is subtracted from it.
template <int BITS, Scale SCALE, int BIAS>
struct Blocks {
  using Number = float;
  static constexpr bool IN_GROUPS = true;
  static constexpr bool IS_SUPER = SCALE == Scale::SUPER_MIN || SCALE == Scale::SUPER;
  static constexpr bool IS_FLOAT = SCALE == Scale::FLOAT || SCALE == Scale::FLOAT_MIN;
  static constexpr bool HAS_MINIMUM =
      SCALE == Scale::HALF_MIN || SCALE == Scale::FLOAT_MIN || SCALE == Scale::SUPER_MIN;
  static constexpr int GROUP = 32, GROUPS = IS_SUPER ? 8 : 1, STEP = GROUP * GROUPS;
  static constexpr int FOLD = SCALE == Scale::SUPER ? 16 : 32;  // inputs that share a scale
  static constexpr int HELD = std::min(words_held(BITS), FOLD / 4);
  static constexpr bool IN_FIXED_POINT = HELD > 0;  // if inputs are
  static constexpr int64_t AHEAD = 6 << 10;  // bytes from what is multiplied to what is fetched
  // The parts of a unit, in bytes: scales of its groups, then each group's factors and numbers.
  static constexpr int64_t WIDE = IS_FLOAT ? 4 : 2;  // bytes of a scale
  static constexpr int64_t HEAD = PANEL * (HAS_MINIMUM ? 2 : 1) * WIDE, FACTORS = IS_SUPER ? PANEL * 2 : 0;
  static constexpr int64_t LOW = BITS == 8 ? PANEL * GROUP : PANEL * 16;
  static constexpr int64_t HIGH = BITS == 8 ? 0 : PANEL * 4 * (BITS - 4), EACH = FACTORS + LOW + HIGH;
  static constexpr int64_t BYTES = HEAD + GROUPS * EACH;
  static constexpr int64_t SOURCE =  // bytes of a file's block
      IS_SUPER ? GROUPS * GROUP * BITS / 8 + (SCALE == Scale::SUPER ? 18 : 16) : GROUP * BITS / 8 + HEAD / PANEL;

  // The operand of four inputs, and its byte, that input k of a group is in: 0 2 4 6, then 1 3 5 7, then 8 10 12 14, ...
  static constexpr int word_of(int k) { return 2 * (k / 8) + k % 2; }
  static constexpr int byte_of(int k) { return k % 8 / 2; }
  // Where its bits beyond 4 begin in their word: one word for 32 inputs with a fifth bit, or for 16 with two more.
  static constexpr int high_of(int k) { return 8 * byte_of(k) + (BITS == 5 ? word_of(k) : 2 * (word_of(k) % 4)); }

  static Vector scale_of(const uint8_t* unit, const uint8_t* group, int fold, int v) {
    const Vector scale = load_scales(unit + WIDE * WIDTH * v);
    if constexpr (SCALE == Scale::SUPER) return scale * load_bytes<int8_t>(group + PANEL * fold + WIDTH * v);
    if constexpr (IS_SUPER) return scale * load_bytes<uint8_t>(group + WIDTH * v);
    return scale;
  }
  static Vector minimum_of(const uint8_t* unit, const uint8_t* group, int v) {
    const Vector minimum = load_scales(unit + WIDE * (PANEL + WIDTH * v));
    if constexpr (IS_SUPER) return -minimum * load_bytes<uint8_t>(group + PANEL + WIDTH * v);
    return minimum;
  }

  // The numbers of input `k` of a group, less BIAS. low: the word that begins with this input's 4 bits.
  static inline Vector number(Words low, const uint8_t* high, int k, int v) {
    if constexpr (BITS == 4) {
      return look_up<-BIAS>(low);
    } else if constexpr (BITS == 5) {
      const Words bit = reinterpret_cast<const Words*>(high)[v] >> (uint32_t)high_of(k);
      return look_up<-BIAS>(low, bit);
    } else {
      const Words bits = reinterpret_cast<const Words*>(high + k / 16 * PANEL * 4)[v] >> (uint32_t)high_of(k);
      return to_floats((low & 15u) | (bits & 3u) << 4) - (float)BIAS;
    }
  }

  // Adds the products of a unit's inputs to the sums [R, PANEL] in memory. totals: of each group's inputs, by row.
  template <int R>
  static inline void add(const uint8_t* unit, const float* const* inputs, int64_t first, const float* const* totals,
                         float* kept) {
    const uint8_t* group = unit + HEAD;
    for (int g = 0; g < GROUPS; ++g, group += EACH, first += GROUP) {
      const uint8_t *low = group + FACTORS, *high = low + LOW;
      for (int fold = 0; fold < GROUP / FOLD; ++fold) {
        Vector sums[R][VECTORS] = {};
        for (int k = fold * FOLD; k < (fold + 1) * FOLD; k += 8) {
          const Words* words = &words_at(low, k / 8, 0);
#pragma GCC unroll 8
          for (int j = 0; j < 8; ++j) {
            Vector weights[VECTORS];
            for (int v = 0; v < VECTORS; ++v)
              if constexpr (BITS == 8) weights[v] = signed_byte(words_at(low, word_of(k + j), v), byte_of(j));
              else weights[v] = number(words[v] >> (uint32_t)(4 * j), high, k + j, v);
            for (int r = 0; r < R; ++r) {  // row by row: the inputs of all rows at once need too many registers
              const float input = inputs[r][first + k + j];
              for (int v = 0; v < VECTORS; ++v) sums[r][v] += input * weights[v];
            }
          }
        }
        Vector* into = reinterpret_cast<Vector*>(kept);
        for (int v = 0; v < VECTORS; ++v) {
          const Vector scale = scale_of(unit, group, fold, v);
          for (int r = 0; r < R; ++r) into[r * VECTORS + v] += scale * sums[r][v];
          if constexpr (HAS_MINIMUM) {
            const Vector minimum = minimum_of(unit, group, v);
            for (int r = 0; r < R; ++r) into[r * VECTORS + v] += totals[r][first / GROUP] * minimum;
          }
        }
      }
    }
  }

  // The same for `rows` rows of inputs in fixed point. groups: of the unit's first 32 inputs one for each of `stride`
  // rows, then those of the next 32.
  template <int D>
  static void add(const uint8_t* unit, const Group<D>* groups, int64_t stride, int64_t rows, float* kept) {
    constexpr int MOST = std::min(8, SUMS / D);  // rows whose sums fit in registers
    const int64_t blocks = (rows + MOST - 1) / MOST;
    const uint8_t* group = unit + HEAD;
    for (int g = 0; g < GROUPS; ++g, group += EACH, groups += stride) {
      for (int64_t b = 0; b < BYTES / GROUPS; b += 64) __builtin_prefetch(unit + AHEAD + BYTES / GROUPS * g + b, 0, 2);
      for (int v = 0; v < VECTORS; ++v)
        for (int fold = 0; fold < GROUP / FOLD; ++fold) {
          Words weights[FOLD / 4];
          for (int i = 0; i < FOLD / 4; ++i) weights[i] = operand(group + FACTORS, FOLD / 4 * fold + i, v);
          const Vector scale = scale_of(unit, group, fold, v);
          Vector minimum = scale * -(float)BIAS;
          if constexpr (HAS_MINIMUM) minimum += minimum_of(unit, group, v);
          for (int64_t b = 0; b < blocks; ++b) {
            const int64_t first = rows * b / blocks, count = rows * (b + 1) / blocks - first;
            with_rows<MOST>(count, [&]<int R>() {
              add_rows<D, R, FOLD / 4, HELD, (HAS_MINIMUM || BIAS), BITS == 8 && !TAKES_SIGNED>(
                  weights, scale, minimum, groups + first, FOLD == GROUP ? 2 : fold, kept + first * PANEL + WIDTH * v);
            });
          }
        }
    }
  }

  // Word i of a group's numbers, as bytes of four inputs.
  static Words operand(const uint8_t* low, int i, int v) {
    if constexpr (BITS == 8) return words_at(low, i, v) ^ (TAKES_SIGNED ? 0u : 0x80808080u);
    Words bytes = words_at(low, i / 2, v) >> (uint32_t)(4 * (i % 2)) & 0x0f0f0f0fu;
    if constexpr (BITS > 4) {
      constexpr int EACH_WORD = BITS == 5 ? 8 : 4;  // operands whose further bits are in one word
      const Words bits = words_at(low + LOW, i / EACH_WORD, v) >> (uint32_t)((BITS - 4) * (i % EACH_WORD));
      bytes |= (bits & (BITS == 5 ? 0x01010101u : 0x03030303u)) << 4u;
    }
    return bytes;
  }

  // Puts a file's block in a lane of a unit.
  static void pack(const uint8_t* block, uint8_t* unit, int lane) {
    const uint8_t* scales = SCALE == Scale::SUPER ? block + SOURCE - 2 : block;
    for (int i = 0; i < HEAD / PANEL / WIDE; ++i)
      std::memcpy(unit + WIDE * (PANEL * i + lane), scales + WIDE * i, WIDE);
    uint8_t* group = unit + HEAD;
    for (int g = 0; g < GROUPS; ++g, group += EACH) {
      for (int i = 0; i < FACTORS / PANEL; ++i) group[PANEL * i + lane] = factor(block, g, i);
      uint8_t *low = group + FACTORS, *high = low + LOW;
      for (int k = 0; k < GROUP; ++k) {
        const uint32_t q = read(block, g, k);
        if (BITS == 8) {
          low[4 * (word_of(k) * PANEL + lane) + byte_of(k)] = (uint8_t)q;
        } else {
          add_bits(low + 4 * (k / 8 * PANEL + lane), (q & 15u) << (4 * (k % 8)));
          if (BITS == 5) add_bits(high + 4 * lane, (q >> 4) << high_of(k));
          if (BITS == 6) add_bits(high + 4 * (k / 16 * PANEL + lane), (q >> 4) << high_of(k));
        }
      }
    }
  }

  // The values of a lane of a unit, rounded as ggml rounds them.
  static void unpack(const uint8_t* unit, int lane, float* into) {
    const float scale = scale_at(unit + WIDE * lane);
    const float minimum = HAS_MINIMUM ? scale_at(unit + WIDE * (PANEL + lane)) : 0.0f;
    const uint8_t* group = unit + HEAD;
    for (int g = 0; g < GROUPS; ++g, group += EACH)
      for (int k = 0; k < GROUP; ++k) {
        const uint8_t *low = group + FACTORS, *high = low + LOW;
        float factor = 1.0f, below = 1.0f;
        if (SCALE == Scale::SUPER) factor = (int8_t)group[PANEL * (k / FOLD) + lane];
        if (SCALE == Scale::SUPER_MIN) factor = group[lane], below = -(float)group[PANEL + lane];
        int q;
        if (BITS == 8) {
          q = (int8_t)low[4 * (word_of(k) * PANEL + lane) + byte_of(k)];
        } else {
          q = (int)(word_at(low + 4 * (k / 8 * PANEL + lane)) >> (4 * (k % 8)) & 15u);
          if (BITS == 5) q |= (int)(word_at(high + 4 * lane) >> high_of(k) & 1u) << 4;
          if (BITS == 6) q |= (int)(word_at(high + 4 * (k / 16 * PANEL + lane)) >> high_of(k) & 3u) << 4;
        }
        const float product = scale * factor * (float)(q - BIAS);
        *into++ = HAS_MINIMUM ? product + minimum * below : product;
      }
  }

 private:
  static const Words& words_at(const uint8_t* low, int word, int v) {
    return reinterpret_cast<const Words*>(low + word * PANEL * 4)[v];
  }
  static Vector signed_byte(Words words, int byte) {
    return __builtin_convertvector((Integers)(words << (uint32_t)(24 - 8 * byte)) >> 24, Vector);
  }
  static uint32_t word_at(const uint8_t* at) {
    uint32_t word;
    std::memcpy(&word, at, 4);
    return word;
  }
  static void add_bits(uint8_t* at, uint32_t bits) {
    bits |= word_at(at);
    std::memcpy(at, &bits, 4);
  }
  static float scale_at(const uint8_t* at) {
    std::conditional_t<IS_FLOAT, float, uint16_t> scale;
    std::memcpy(&scale, at, WIDE);
    if constexpr (IS_FLOAT) return scale;
    else return widen_half(scale);
  }
  static Vector load_scales(const uint8_t* from) {
    if constexpr (IS_FLOAT) return *reinterpret_cast<const Vector*>(from);
    else return load_halves(from);
  }

  // The factor of a group's scale (i = 0) or minimum; in Q6_K, that of half of the group.
  static uint8_t factor(const uint8_t* block, int g, int i) {
    if (SCALE == Scale::SUPER) return block[192 + 2 * g + i];
    const uint8_t* bits = block + 4;
    if (g < 4) return bits[g + 4 * i] & 63;
    return (i ? bits[g + 4] >> 4 : bits[g + 4] & 15) | bits[g - 4 + 4 * i] >> 6 << 4;
  }

  // Number k of a group as the file has it.
  static uint32_t read(const uint8_t* block, int g, int k) {
    if constexpr (SCALE == Scale::SUPER) {  // Q6_K: 2 halves; 4 groups share 64 bytes of low and 32 of high bits
      const int half = g / 4, quarter = g % 4;
      const uint8_t low = block[64 * half + 32 * (quarter % 2) + k], high = block[128 + 32 * half + k];
      return (low >> (quarter / 2 * 4) & 15u) | (high >> (2 * quarter) & 3u) << 4;
    } else if constexpr (IS_SUPER) {  // Q4_K, Q5_K: two groups share 32 bytes
      const uint8_t* numbers = block + 16 + (BITS == 5 ? 32 : 0);
      const uint32_t high = BITS == 5 ? block[16 + k] >> g & 1u : 0u;
      return (numbers[32 * (g / 2) + k] >> (g % 2 * 4) & 15u) | high << 4;
    } else {
      const uint8_t* numbers = block + HEAD / PANEL;
      if (BITS == 8) return numbers[k];
      const uint32_t high = BITS == 5 ? word_at(numbers) >> k & 1u : 0u;
      if (BITS == 5) numbers += 4;
      return (numbers[k % 16] >> (k / 16 * 4) & 15u) | high << 4;
    }
  }
};

using Q4_0 = Blocks<4, Scale::HALF, 8>;
using Q4_1 = Blocks<4, Scale::HALF_MIN, 0>;
using Q5_0 = Blocks<5, Scale::HALF, 16>;
using Q5_1 = Blocks<5, Scale::HALF_MIN, 0>;
using Q8_0 = Blocks<8, Scale::HALF, 0>;
using Q4_K = Blocks<4, Scale::SUPER_MIN, 0>;
using Q5_K = Blocks<5, Scale::SUPER_MIN, 0>;
using Q6_K = Blocks<6, Scale::SUPER, 32>;
using F4_0 = Blocks<4, Scale::FLOAT, 8>;
using F4_1 = Blocks<4, Scale::FLOAT_MIN, 8>;
using F8_0 = Blocks<8, Scale::FLOAT, 0>;
using F8_1 = Blocks<8, Scale::FLOAT_MIN, 0>;
static_assert(Q4_0::SOURCE == 18 && Q4_1::SOURCE == 20 && Q5_0::SOURCE == 22 && Q5_1::SOURCE == 24);
static_assert(Q8_0::SOURCE == 34 && Q4_K::SOURCE == 144 && Q5_K::SOURCE == 176 && Q6_K::SOURCE == 210);

}  // namespace draftless
