// Rows of a packed weight: ids [...] -> [..., K]. And what all operators of packed weights check.
#include <stdio.h>

#include "block_weight.h"

namespace specexport {
namespace {
int code_at(const Format& format, const uint8_t* block, int column, int input) {
  const int quad = input / 4, byte = column * 4 + input % 4;
  if (format.bits == 8) return block[64 * quad + byte];
  int code = 0, bits = 0;
  if (format.bits >= 4) {
    code = block[64 * (quad % 4) + byte] >> (quad / 4 * 4) & 15;
    block += 256, bits = 4;
  }
  if (format.bits - bits >= 2) {
    code |= (block[64 * (quad % 2) + byte] >> (quad / 2 * 2) & 3) << bits;
    block += 128, bits += 2;
  }
  if (format.bits > bits) code |= (block[byte] >> quad & 1) << bits;
  return format.lookup ? format.lookup[code] : code;
}

void dequantize_row(const Layout& layout, const uint8_t* tile, int column, float* out) {
  const Format& format = layout.format;
  if (format.is_float()) {
    for (int64_t k = 0; k < layout.K; k++) {
      const uint8_t* p = tile + (k * kNr + column) * (format.bits / 8);
      uint16_t half;
      memcpy(&half, p, 2);
      out[k] = format.scale == Scale::f32   ? load_single(p)
               : format.scale == Scale::f16 ? half_to_float(half)
                                            : float_of_bits(uint32_t(half) << 16);
    }
    return;
  }
  for (int64_t first = 0; first < layout.K; first += kPanelInputs) {
    const Panel& s = layout.K - first < kPanelInputs ? layout.last : layout.whole;
    for (int64_t g = 0; g < s.groups; g++) {
      const int64_t i = g * kNr + column, at_super = (g * format.group / kSuperInputs * kNr + column) * 2;
      const float scale = format.scale == Scale::half     ? load_half(tile + 2 * i)
                          : format.scale == Scale::single ? load_single(tile + 4 * i)
                          : format.scale == Scale::power  ? power_of(tile[i])
                                                          : load_half(tile + s.d + at_super) * float(int8_t(tile[i]));
      float offset = 0;
      if (format.offset_kind == OffsetKind::stored)
        offset =
            format.scale == Scale::half ? load_half(tile + s.offsets + 2 * i) : load_single(tile + s.offsets + 4 * i);
      if (format.offset_kind == OffsetKind::mins)
        offset = load_half(tile + s.dmin + at_super) * float(tile[s.offsets + i]);
      const int zero_point = format.offset_kind == OffsetKind::zero_point ? tile[s.offsets + i] : format.zero_point();
      const bool adds_offset = format.offset_kind == OffsetKind::stored || format.offset_kind == OffsetKind::mins;
      for (int64_t k = g * format.group; k < (g + 1) * format.group && first + k < layout.K; k++) {
        const uint8_t* block = tile + s.codes + k / kBlockInputs * 64 * format.bits;
        const float value = float(code_at(format, block, column, int(k % kBlockInputs)) - zero_point) * scale;
        out[first + k] = adds_offset ? value + offset : value;
      }
    }
    tile += s.end;
  }
}

Status* run(const void* kernel, KernelContext* context) {
  const Weight& weight = *static_cast<const Weight*>(kernel);
  const Layout& layout = weight.layout;
  Tensor ids, packed;
  TRY(input(context, 0, ids));
  TRY(input(context, 1, packed));
  TRY(check(weight, packed));
  REQUIRE(ids.rank < kMaxRank, "ids have more than 7 dimensions");
  int64_t dims[kMaxRank];
  for (size_t i = 0; i < ids.rank; i++) dims[i] = ids.dims[i];
  dims[ids.rank] = layout.K;
  const int64_t count = ids.count();
  for (int64_t i = 0; i < count; i++) {
    const long long id = ids.as<int64_t>()[i];
    if (id >= 0 && id < layout.N) continue;
    return refuse("id %lld is outside the table, which has %lld rows", id, (long long)layout.N);
  }
  void* out;
  TRY(output(context, 0, dims, ids.rank + 1, &out));
  const size_t parts = count * layout.K < 1 << 15 ? 1 : size_t(count < 32 ? count : 32);
  return parallel(context, count ? parts : 0, [&](size_t part) {
    for (int64_t i = count * int64_t(part) / int64_t(parts); i < count * int64_t(part + 1) / int64_t(parts); i++) {
      const int64_t id = ids.as<int64_t>()[i];
      const uint8_t* tile = packed.as<uint8_t>() + size_t(id / kNr) * layout.tile_bytes;
      dequantize_row(layout, tile, int(id % kNr), static_cast<float*>(out) + i * layout.K);
    }
  });
}
}  // namespace

Status* make_layout(const char* name, int64_t n, int64_t k, Layout& layout) {
  Format format;
  if (!find_format(name, format)) return refuse("there is no block format '%s'", name);
  layout.make(format, n, k);
  return nullptr;
}

Status* make_weight(const KernelInfo* info, void** kernel) {
  auto* weight = static_cast<Weight*>(calloc(1, sizeof(Weight)));
  REQUIRE(weight, "out of memory");
  *kernel = weight;
  int64_t n, k;
  TRY(attribute(info, "format", weight->format, sizeof weight->format));
  TRY(attribute(info, "N", 0, kMaxSize, n));
  TRY(attribute(info, "K", 0, kMaxSize, k));
  TRY(make_layout(weight->format, n, k, weight->layout));
  Tensor packed;
  TRY(constant(info, 1, packed));
  return packed.absent ? nullptr : check(*weight, packed);
}

Status* check(const Weight& weight, const Tensor& packed) {
  const Layout& layout = weight.layout;
  const int64_t tiles = layout.tiles, bytes = int64_t(layout.tile_bytes);
  if (packed.rank == 2 && packed.dims[0] == tiles && packed.dims[1] == bytes) return nullptr;
  return bad_shape("weight", packed, "[%lld, %lld] for its format, N and K", (long long)tiles, (long long)bytes);
}

Status* bad_shape(const char* what, const Tensor& tensor, const char* wanted, long long a, long long b) {
  char text[384];
  int at = snprintf(text, sizeof text, "%s has the shape [", what);
  for (size_t i = 0; i < tensor.rank; i++)
    at += snprintf(text + at, sizeof text - at, i ? ", %lld" : "%lld", (long long)tensor.dims[i]);
  at += snprintf(text + at, sizeof text - at, "], which must be ");
  snprintf(text + at, sizeof text - at, wanted, a, b);
  return refuse("%s", text);
}

void define_block_embedding(Operator& op) {
  op.name = "BlockEmbedding";
  op.inputs[0] = {ort::kInt64, false};
  op.inputs[1] = {ort::kUint8, false};
  op.num_inputs = 2;
  op.outputs[0] = {ort::kFloat, false};
  op.num_outputs = 1;
  op.make = make_weight;
  op.run = run;
}
}  // namespace specexport
