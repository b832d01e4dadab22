#include "descriptor.h"
#include "numeric.h"

using namespace numeric;

SmemDescriptor read_smem_descriptor(const Warp &w, const Instruction &in, u64 bits, const char *operand, bool wgmma) {
  SmemDescriptor d{};
  d.start = (u32)(bits & 0x3fff) << 4;
  d.leading = (u32)(bits >> 16 & 0x3fff) << 4;
  d.stride = (u32)(bits >> 32 & 0x3fff) << 4;
  d.layout = (u32)(bits >> 61 & 7);
  u32 version = (u32)(bits >> 46 & 3), base_offset = (u32)(bits >> 49 & 7), absolute = (u32)(bits >> 52 & 1);
  switch (d.layout) {
    case 0: d.width = 16, d.swizzle_mode = 0; break;
    case 6: d.width = 32, d.swizzle_mode = 1; break;
    case 4: d.width = 64, d.swizzle_mode = 2; break;
    case 2: d.width = 128, d.swizzle_mode = 3; break;
    case 1: d.width = 128, d.swizzle_mode = kSwizzle128Atom32; break;
    default:
      fail(ErrorKind::MisalignedDescriptor, &w, &in, "descriptor %s %016llx: layout type %u is invalid", operand,
           (unsigned long long)bits, d.layout);
  }
  if (wgmma && d.layout & 1)
    fail(ErrorKind::MisalignedDescriptor, &w, &in, "descriptor %s %016llx: bit 61 is set, which wgmma does not have", operand,
         (unsigned long long)bits);
  if (version != (wgmma ? 0u : 1u))
    fail(ErrorKind::MisalignedDescriptor, &w, &in, "descriptor %s %016llx: version field %u, %s", operand,
         (unsigned long long)bits, version, wgmma ? "wgmma has none: a descriptor of tcgen05?" : "tcgen05 needs 1");
  if (absolute) fail(ErrorKind::MisalignedDescriptor, &w, &in, "descriptor %s: absolute leading offsets are not modelled", operand);
  if (base_offset)
    fail(ErrorKind::MisalignedDescriptor, &w, &in, "descriptor %s: base offset %u is not modelled", operand, base_offset);
  // The swizzle is a function of address bits. Released kernels start tiles at any multiple of 128 bytes with a zero base
  // offset; PTX requires a pattern-aligned start, so this is a warning.
  u32 pattern_rows = d.start >> 7 & (d.width * d.pattern_rows() / 128 - 1);
  if (pattern_rows)
    warn(ErrorKind::MisalignedDescriptor, &in,
         std::string("descriptor ") + operand + ": the start address is not aligned to the swizzle's pattern of 8 rows");
  return d;
}

u32 decode_chunk(const u8 *chunk, Element e, Packing p, float *out) {
  const Tables &t = tables();
  switch (e) {
    case Element::F16: {
      _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)chunk)));
      break;
    }
    case Element::BF16: {
      __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)chunk)), 16);
      _mm256_storeu_si256((__m256i *)out, wide);
      break;
    }
    case Element::TF32:
      for (u32 k = 0; k < 4; k++) {
        u32 x;
        memcpy(&x, chunk + 4 * k, 4);
        out[k] = bit_cast<float>(x & 0xffffe000u);
      }
      break;
    case Element::E4M3:
      for (u32 k = 0; k < 16; k++) out[k] = t.e4m3[chunk[k]];
      break;
    case Element::E5M2:
      for (u32 k = 0; k < 16; k++) out[k] = t.e5m2[chunk[k]];
      break;
    case Element::S8:
      for (u32 k = 0; k < 16; k++) out[k] = (float)(i8)chunk[k];
      break;
    case Element::U8:
      for (u32 k = 0; k < 16; k++) out[k] = (float)chunk[k];
      break;
    case Element::E2M1:
      for (u32 k = 0; k < p.per_chunk; k++) out[k] = t.e2m1[chunk[k / 2] >> (4 * (k & 1)) & 15];
      break;
    case Element::E2M3: case Element::E3M2:
      for (u32 k = 0; k < 16; k++) {
        u32 bit = 6 * k, pair = chunk[bit / 8] | (u32)chunk[bit / 8 + 1] << 8;
        u32 code = pair >> (bit % 8) & 63;
        out[k] = e == Element::E2M3 ? t.e2m3[code] : t.e3m2[code];
      }
      break;
  }
  return p.per_chunk;
}
