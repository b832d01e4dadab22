// tcgen05.mma and tcgen05.commit (PTX ISA "Tensorcore 5th generation: matrix multiply").
//
// The products are exact in f32 and are summed in f32 in order of K, into the accumulator in tensor memory. The hardware
// aligns and truncates the terms of one instruction before adding; results agree to a few units in the last place.
#include "alu.h"
#include "async.h"
#include "descriptor.h"
#include "mbarrier.h"
#include "memory.h"
#include "numeric.h"
#include "operand.h"
#include "race.h"
#include "tmem.h"

using namespace numeric;

namespace {

enum Kind_ : i64 { kF16, kTf32, kF8f6f4, kI8, kMxf8f6f4, kMxf4, kMxf4nvf4 };
const char *const kKindNames[] = {"f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4"};

struct Mma {
  Kind_ kind;
  u32 group;                 // participating CTAs
  bool weight_stationary, a_in_tmem;
  bool shift_a;              // .ashift: A moves up by one lane per quarter after the product
  u32 m, n, k, rows;         // rows of A and D in each CTA
  Element a, b;
  Packing a_packing, b_packing;
  bool a_mn_major, b_mn_major, negate;
  u32 d_format;              // 0 f16, 1 f32, 2 s32
  u32 d_column, d_lane;
  bool accumulate;
  bool saturate;             // kind::i8: saturate to the range of s32
  u32 a_tmem;                // its address, if A is in tensor memory
  u32 a_tmem_bits;           // bits per element there: 4- and 6-bit elements occupy a byte in the kinds that are not dense
  SmemDescriptor a_desc, b_desc;
  u32 scales_per_k;          // scale factors along K, 0 if the kind has none
  bool scale_ue8m0;
  u32 a_scale, b_scale, a_scale_id, b_scale_id;
  u32 disabled[8];
  bool has_disabled;
  i32 input_scale;           // D is first multiplied by 2^-input_scale; -1: no scale

  // D splits into this many column segments, each on its own lanes (CUTLASS mma_traits_sm100_frag.hpp).
  u32 segments() const {
    if (weight_stationary) return 128 / m;
    return group == 2 && m == 128 ? 2 : 1;
  }
  bool half_lanes() const { return !weight_stationary && group == 1 && m == 64; }
  u32 lane_of(u32 row) const { return half_lanes() ? row / 16 * 32 + row % 16 + d_lane : row; }
  u32 lane_of_a(u32 row) const { return half_lanes() ? row / 16 * 32 + row % 16 + tmem_lane(a_tmem) : row; }
};

Element element_of(const Warp &w, const Instruction &in, Kind_ kind, u32 format, const char *operand) {
  static const i8 f8f6f4[8] = {(i8)Element::E4M3, (i8)Element::E5M2, -1, (i8)Element::E2M3, (i8)Element::E3M2,
                               (i8)Element::E2M1, -1, -1};
  switch (kind) {
    case kF16:
      if (format < 2) return format ? Element::BF16 : Element::F16;
      break;
    case kTf32:
      if (format == 2) return Element::TF32;
      break;
    case kI8:
      if (format < 2) return format ? Element::S8 : Element::U8;
      break;
    case kMxf4: case kMxf4nvf4:
      if (format == 1) return Element::E2M1;
      break;
    default:
      if (f8f6f4[format] >= 0) return (Element)f8f6f4[format];
  }
  fail(ErrorKind::IllegalInstruction, &w, &in, "instruction descriptor: format %u of %s does not exist in kind::%s", format,
       operand, kKindNames[kind]);
}

// The limits of the PTX ISA's tables of shapes.
void check_shape(const Warp &w, const Instruction &in, const Mma &x) {
  bool ok;
  if (x.weight_stationary) ok = (x.m == 32 || x.m == 64 || x.m == 128) && (x.n == 64 || x.n == 128 || x.n == 256) && x.group == 1;
  else if (x.kind >= kMxf8f6f4)
    ok = x.group == 1 ? x.m == 128 && x.n % 8 == 0 && x.n >= 8 && x.n <= 256
                      : (x.m == 128 || x.m == 256) && x.n % 16 == 0 && x.n >= 16 && x.n <= 256;
  else if (x.group == 1)
    ok = (x.m == 64 || x.m == 128) && x.n % 8 == 0 && x.n >= 8 && x.n <= 256;  // CUTLASS runs M=128 with N=8
  else ok = (x.m == 128 || x.m == 256) && x.n % 16 == 0 && x.n >= 16 && x.n <= 256;
  if (!ok)
    fail(ErrorKind::IllegalInstruction, &w, &in, "kind::%s with cta_group::%u%s has no shape M=%u N=%u", kKindNames[x.kind],
         x.group, x.weight_stationary ? " .ws" : "", x.m, x.n);
  if (x.group == 2 && x.m == 128 && x.n % 32)
    fail(ErrorKind::IllegalInstruction, &w, &in, "M=128 in cta_group::2 needs N to be a multiple of 32, it is %u", x.n);
}

void load_a_from_tmem(Cta &c, const Mma &x, u32 lane_offset, float *out) {
  u32 per_column = 32 / x.a_tmem_bits, column = tmem_column(x.a_tmem);
  for (u32 r = 0; r < x.rows; r++) {
    const u32 *cells = tmem_row(c, x.lane_of_a(r) + lane_offset) + column;
    for (u32 k = 0; k < x.k; k++) {
      u32 bits = cells[k / per_column] >> (k % per_column * x.a_tmem_bits);
      float v;
      switch (x.a) {
        case Element::F16: v = half_to_float((u16)bits); break;
        case Element::BF16: v = bf16_to_float((u16)bits); break;
        case Element::TF32: v = bit_cast<float>(bits & 0xffffe000u); break;
        case Element::E4M3: v = tables().e4m3[bits & 255]; break;
        case Element::E5M2: v = tables().e5m2[bits & 255]; break;
        // In the middle of a byte, unless the kind is dense.
        case Element::E2M1: v = tables().e2m1[(x.a_tmem_bits == 8 ? bits >> 2 : bits) & 15]; break;
        case Element::E2M3: v = tables().e2m3[bits >> 1 & 63]; break;
        case Element::E3M2: v = tables().e3m2[bits >> 1 & 63]; break;
        case Element::S8: v = (float)(i8)bits; break;
        default: v = (float)(bits & 255); break;
      }
      out[(size_t)r * x.k + k] = v;
    }
  }
}

float scale_factor(Cta &c, const Mma &x, u32 base, u32 id, u32 lane, u32 column, u32 j) {
  u32 cell = tmem_row(c, lane)[tmem_column(base) + column];
  u8 code = (u8)(cell >> (8 * (id + j)));
  return x.scale_ue8m0 ? tables().ue8m0[code] : tables().e4m3[code & 0x7f];
}
void apply_scales(Cta &c, const Mma &x, float *a, float *bt) {
  u32 block = x.k / x.scales_per_k;
  for (u32 j = 0; j < x.scales_per_k; j++) {
    for (u32 r = 0; r < x.rows; r++) {
      float s = scale_factor(c, x, x.a_scale, x.a_scale_id, r % 32, r / 32, j);
      for (u32 k = j * block; k < (j + 1) * block; k++) a[(size_t)r * x.k + k] *= s;
    }
    for (u32 n = 0; bt && n < x.n; n++) {
      u32 half = x.segments() == 2 ? n / (x.n / 2) : 0, nn = x.segments() == 2 ? n % (x.n / 2) : n;
      float s = scale_factor(c, x, x.b_scale, x.b_scale_id, nn % 32 + 64 * half, nn / 32, j);
      for (u32 k = j * block; k < (j + 1) * block; k++) bt[(size_t)k * x.n + n] *= s;
    }
  }
}

void execute(Cluster &cluster, u32 first_rank, const Mma &x) {
  static thread_local std::vector<float> a, bt, bt_scaled, temp;
  // A in tensor memory has a copy for every column segment of D, on that segment's lanes; they may differ.
  u32 segments = x.segments(), copies = x.a_in_tmem ? segments : 1;
  size_t a_size = (size_t)x.rows * x.k;
  a.resize(a_size * copies);
  bt.resize((size_t)x.n * x.k);
  temp.resize(x.n);
  u32 n_cta = x.n / x.group;
  for (u32 h = 0; h < x.group; h++)
    load_operand(*cluster.ctas[first_rank + h], x.b_desc, x.b_mn_major, x.b, x.b_packing, n_cta, x.k, bt.data() + h * n_cta, 1, x.n);
  for (u32 h = 0; h < x.group; h++) {
    Cta &c = *cluster.ctas[first_rank + h];
    const float *b_use = bt.data();
    if (x.a_in_tmem)
      for (u32 copy = 0; copy < copies; copy++) load_a_from_tmem(c, x, 128 / segments * copy, a.data() + copy * a_size);
    else
      load_operand(c, x.a_desc, x.a_mn_major, x.a, x.a_packing, x.rows, x.k, a.data(), x.k, 1);
    if (x.negate)
      for (float &f : a) f = -f;
    if (x.scales_per_k) {
      bt_scaled = bt;
      for (u32 copy = 0; copy < copies; copy++) apply_scales(c, x, a.data() + copy * a_size, copy ? nullptr : bt_scaled.data());
      b_use = bt_scaled.data();
    }
    u32 width = x.n / segments;
    for (u32 r = 0; r < x.rows; r++)
      for (u32 s = 0; s < segments; s++) {
        u32 lane = x.lane_of(r) + 128 / segments * s;
        if (x.has_disabled && x.disabled[lane / 32 + (x.group == 2 ? 4 * h : 0)] >> (lane % 32) & 1) continue;
        u32 *cells = tmem_row(c, lane) + x.d_column;
        const float *row_a = a.data() + (copies > 1 ? s : 0) * a_size + (size_t)r * x.k;
        if (x.d_format == 2) {
          for (u32 j = 0; j < width; j++) {
            i64 sum = x.accumulate ? (i32)cells[j] : 0;
            for (u32 k = 0; k < x.k; k++) sum += (i64)row_a[k] * (i64)b_use[(size_t)k * x.n + s * width + j];
            cells[j] = (u32)(x.saturate ? std::clamp<i64>(sum, INT32_MIN, INT32_MAX) : sum);
          }
          continue;
        }
        float *acc = x.d_format == 1 ? reinterpret_cast<float *>(cells) : temp.data();
        for (u32 j = 0; j < width; j++) {
          float v = !x.accumulate ? 0.f : x.d_format == 1 ? bit_cast<float>(cells[j]) : half_to_float((u16)cells[j]);
          acc[j] = x.input_scale >= 0 ? std::ldexp(v, -x.input_scale) : v;
        }
        multiply_row(width, x.k, row_a, b_use + s * width, x.n, acc);
        if (x.d_format == 0)
          for (u32 j = 0; j < width; j++) cells[j] = float_to_half(acc[j]);
      }
  }
  if (x.shift_a)
    for (u32 h = 0; h < x.group; h++)
      for (u32 lane = 0; lane < 128; lane += 32)
        shift_rows(*cluster.ctas[first_rank + h], lane, tmem_column(x.a_tmem), x.k * x.a_tmem_bits / 32);
}

}  // namespace

// aux: 0 cta_group, 1 kind, 2 A in tensor memory, 3 disable registers, 4 offset of A, 5 offset of D, 6 bit 0 .ws, bit
// 1 the operand is in the collector, 7 scale factors along K (0: none), 8 input scale or -1, 9 .ashift.
// Operands: D, A, B, instruction descriptor, enable-input-d, scale A or none, scale B or none, disable registers..
HANDLER("tcgen05.mma", Plain) {
  for (int i : lanes_of(lanes)) {
    Mma x{};
    x.group = (u32)in.aux[0];
    x.kind = (Kind_)in.aux[1];
    x.a_in_tmem = in.aux[2];
    x.weight_stationary = in.aux[6] & 1;
    bool collected = in.aux[6] & 2;
    x.scales_per_k = (u32)in.aux[7];
    x.input_scale = (i32)in.aux[8];
    x.shift_a = in.aux[9];
    Cluster &cluster = *w.cta->cluster;
    if (x.group == 2 && (w.cta->rank & 1 || cluster.ctas.size() < 2))
      fail(ErrorKind::IllegalInstruction, &w, &in, "cta_group::2 is issued by the even CTA of a pair");
    u32 id = row<u32>(w, in.op[3])[i], d = (u32)lane_address(w, in.op[0], i, in.aux[5]);
    bool scaled = x.scales_per_k != 0;
    // Bit 3 saturates integers; in a 4-bit kind it would be the upper half of K's size, which sm_103 has.
    x.saturate = x.kind == kI8 && (id & 0x8);
    if (id & (x.kind == kI8 ? 0x7u : x.kind == kMxf8f6f4 ? 0x4u : scaled ? 0xcu : 0xfu))
      fail(ErrorKind::IllegalInstruction, &w, &in, "instruction descriptor 0x%08x: sparsity is not modelled, or a reserved bit is set", id);
    x.n = (id >> 17 & 63) * 8;
    x.m = (id >> 24 & 31) * 16;
    bool dense4 = x.kind == kMxf4 || x.kind == kMxf4nvf4;
    x.a = element_of(w, in, x.kind, id >> 7 & 7, "A");
    // The third bit of B's format is the sparsity version of the 4-bit kinds, which dense products ignore.
    x.b = element_of(w, in, x.kind, id >> 10 & (dense4 ? 3 : 7), "B");
    x.a_packing = packing_of(x.a, dense4);
    x.b_packing = packing_of(x.b, dense4);
    x.k = 2 * (x.kind == kF16 ? 8u : x.kind == kTf32 ? 4u : dense4 ? 32u : 16u);
    x.a_mn_major = id >> 15 & 1;
    x.b_mn_major = id >> 16 & 1;
    x.negate = (id >> 13 & 1) != (id >> 14 & 1);
    x.d_format = scaled ? 1 : id >> 4 & 3;
    if (x.d_format == 3 || (x.kind == kI8) != (x.d_format == 2) || (x.kind == kTf32 && x.d_format != 1))
      fail(ErrorKind::IllegalInstruction, &w, &in, "kind::%s has no accumulator format %u", kKindNames[x.kind], x.d_format);
    if (scaled) {
      x.scale_ue8m0 = id >> 23 & 1;
      x.a_scale_id = id >> 29 & 3;
      x.b_scale_id = id >> 4 & 3;
      if (id >> 31) fail(ErrorKind::IllegalInstruction, &w, &in, "K=96 exists on sm_103 only");
      if (x.a_scale_id + x.scales_per_k > 4 || x.b_scale_id + x.scales_per_k > 4 || (x.scales_per_k == 2 && ((x.a_scale_id | x.b_scale_id) & 1)))
        fail(ErrorKind::IllegalInstruction, &w, &in, "scale factor ids %u and %u do not fit %u factors", x.a_scale_id, x.b_scale_id, x.scales_per_k);
      if (x.kind != kMxf4nvf4 && !x.scale_ue8m0)
        fail(ErrorKind::IllegalInstruction, &w, &in, "kind::%s takes ue8m0 scale factors", kKindNames[x.kind]);
      // The two top bits of the address repeat the scale factor id.
      x.a_scale = row<u32>(w, in.op[5])[i] & 0x3fffffff;
      x.b_scale = row<u32>(w, in.op[6])[i] & 0x3fffffff;
    }
    check_shape(w, in, x);
    if (x.shift_a && (!x.a_in_tmem || x.weight_stationary || x.m / x.group != 128))
      fail(ErrorKind::IllegalInstruction, &w, &in, ".ashift needs A in tensor memory and 128 rows in each CTA");
    x.rows = x.m / x.group;
    if ((x.a_mn_major && x.a_packing.bits < 8) || (x.b_mn_major && x.b_packing.bits < 8) ||
        ((x.a_mn_major || x.b_mn_major) && dense4))
      fail(ErrorKind::IllegalInstruction, &w, &in, "4- and 6-bit operands are K-major only");
    x.d_column = tmem_column(d);
    x.d_lane = tmem_lane(d);
    if (x.half_lanes() ? x.d_lane % 16 || x.d_lane > 16 : x.d_lane != 0)
      fail(ErrorKind::IllegalInstruction, &w, &in, "the accumulator's lane field is %u", x.d_lane);
    x.accumulate = predicate_of(w, in.op[4]) >> i & 1;
    if (x.a_in_tmem) {
      x.a_tmem = (u32)lane_address(w, in.op[1], i, in.aux[4]);
      x.a_tmem_bits = dense4 ? 4 : std::max(8u, x.a_packing.bits);
      if (x.a_mn_major) fail(ErrorKind::IllegalInstruction, &w, &in, "A in tensor memory is K-major");
    } else {
      x.a_desc = read_smem_descriptor(w, in, row<u64>(w, in.op[1])[i], "A");
    }
    x.b_desc = read_smem_descriptor(w, in, row<u64>(w, in.op[2])[i], "B");
    x.has_disabled = in.aux[3] > 0;
    for (u32 k = 0; k < (u32)in.aux[3]; k++) x.disabled[k] = row<u32>(w, in.op[7 + k])[i];

    race::Actor actor = race::stream(w, kTensorPipe, true);
    race::enter_tensor_pipe(w);
    u32 width = x.n / x.segments();
    for (u32 h = 0; h < x.group; h++) {
      Cta &c = *cluster.ctas[w.cta->rank + h];
      if (&c != w.cta) race::touch_peer(w, in, c, actor);
      check_tmem_columns(w, in, c, x.d_column, width, "accumulator of tcgen05.mma");
      if (x.a_in_tmem) {
        u32 columns = x.k * x.a_tmem_bits / 32;
        check_tmem_columns(w, in, c, tmem_column(x.a_tmem), columns, "operand A of tcgen05.mma");
        u32 a_column = tmem_column(x.a_tmem);
        bool same_lanes = !x.half_lanes() || tmem_lane(x.a_tmem) == x.d_lane;
        if (same_lanes && a_column < x.d_column + width && x.d_column < a_column + columns)
          report(ErrorKind::TmemOverlap, &w, &in,
                 "operand A in tensor memory columns [%u, %u) and the accumulator in [%u, %u) overlap", a_column,
                 a_column + columns, x.d_column, x.d_column + width);
        for (u32 l = 0; l < 8; l++)
          if (!x.half_lanes() || l % 2 == tmem_lane(x.a_tmem) / 16)
            race::tmem_access(w, in, c, l, tmem_column(x.a_tmem), columns, 0xffff, false, actor, "tcgen05.mma (operand A)");
        for (u32 lane = 0; x.shift_a && lane < 128; lane += 32)
          track_shift(w, in, c, lane, tmem_column(x.a_tmem), columns, actor, "tcgen05.mma (.ashift)");
      } else {
        track_operand(w, in, c, x.a_desc, x.a_mn_major, x.a_packing, x.rows, x.k, actor, "operand A of tcgen05.mma", 0,
                      collected && !x.weight_stationary);
      }
      track_operand(w, in, c, x.b_desc, x.b_mn_major, x.b_packing, x.n / x.group, x.k, actor, "operand B of tcgen05.mma", 0,
                    collected && x.weight_stationary);
      if (scaled) {
        for (u32 which = 0; which < 2; which++) {
          u32 address = which ? x.b_scale : x.a_scale;
          u32 count = which ? (x.n / x.segments() + 31) / 32 : (x.rows + 31) / 32;
          const char *what = which ? "scale factors of B" : "scale factors of A";
          if (tmem_lane(address)) fail(ErrorKind::IllegalInstruction, &w, &in, "the lane field of the %s must be 0", what);
          check_tmem_columns(w, in, c, tmem_column(address), count, what);
          for (u32 l = 0; l < 8; l++) race::tmem_access(w, in, c, l, tmem_column(address), count, 0xffff, false, actor, what);
        }
      }
      for (u32 l = 0; l < 8; l++) {
        if (x.half_lanes() && l % 2 != x.d_lane / 16) continue;
        u16 written = 0xffff;
        if (x.has_disabled) written = (u16)~(x.disabled[l / 2 + (x.group == 2 ? 4 * h : 0)] >> (16 * (l % 2)));
        if (written)
          race::tmem_access(w, in, c, l, x.d_column, width, written, true, actor, "tcgen05.mma (accumulator)", x.accumulate);
      }
    }
    double flops = 2.0 * x.m * x.n * x.k;
    machine.counters.mma_flops += flops;
    char shape[160];
    snprintf(shape, sizeof shape, "tcgen05.mma%s kind::%s cta_group::%u %s %c%c m%u n%u k%u", x.weight_stationary ? ".ws" : "",
             kKindNames[x.kind], x.group, x.a_in_tmem ? "TS" : "SS", x.a_mn_major ? 'M' : 'K', x.b_mn_major ? 'N' : 'K', x.m, x.n, x.k);
    machine.shapes[shape]++;
    u32 rank = w.cta->rank;
    issue_tensor_pipe(w, make_async(in, "tcgen05.mma", [&cluster, rank, x] { execute(cluster, rank, x); }));
  }
  return Step::Done;
}

// aux: 0 offset, 1 multicast, 2 cta_group. Operands: mbarrier, mask or none.
HANDLER("tcgen05.commit", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 address = (u32)lane_address(w, in.op[0], i, in.aux[0]);
    Cluster &cluster = *w.cta->cluster;
    u32 mask = 1u << shared_rank(address);
    if (in.aux[1]) {
      mask = row<u32>(w, in.op[1])[i] & 0xffff;
      if (!mask || mask >> cluster.ctas.size())
        fail(ErrorKind::OutOfBounds, &w, &in, "multicast mask 0x%x names a CTA beyond the cluster of %zu", mask, cluster.ctas.size());
    }
    // The arrival publishes all operations in the pipe so far, and the events that each of them knew.
    auto publish = std::make_shared<ClockPair>(w.pipe);
    // A separate event: a CTA that acquired an earlier arrival need not know this one when it exits.
    race::Actor actor = race::stream(w, kTensorPipe, true);
    if (machine.track_order) {
      publish->order.raise(actor.agent, actor.event);
      publish->fenced.raise(actor.agent, actor.event);
      publish->tensor.raise(actor.agent, actor.event);  // a commit implies fence::before_thread_sync
    }
    std::vector<u32> targets;
    for (int r : lanes_of(mask)) {
      targets.push_back(shared_address((u32)r, shared_offset(address)));
      mbarrier_at(w, in, targets.back(), actor, "tcgen05.commit");
    }
    Warp *warp = &w;
    const Instruction *instruction = &in;
    issue_tensor_pipe(w, make_async(in, "tcgen05.commit", [=] {
                        for (u32 t : targets) mbarrier_arrive(*warp, *instruction, t, 1, publish.get());
                      }));
  }
  return Step::Done;
}
