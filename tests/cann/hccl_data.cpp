#include "hccl_data.h"

#include <map>

namespace standin {
namespace {

template <typename T>
T combined(HcclReduceOp op, T left, T right) {
  switch (op) {
    case HCCL_REDUCE_SUM:
      return static_cast<T>(left + right);
    case HCCL_REDUCE_PROD:
      return static_cast<T>(left * right);
    case HCCL_REDUCE_MAX:
      return left < right ? right : left;
    default:
      return right < left ? right : left;
  }
}

template <typename T, typename Load, typename Store>
std::vector<char> reduced_as(
    HcclReduceOp op, const std::vector<std::vector<char>>& all, int64_t item, Load load, Store store) {
  std::vector<char> result(all[0].size());
  for (uint64_t at = 0; at < result.size(); at += static_cast<uint64_t>(item)) {
    T value = load(&all[0][at]);
    for (size_t rank = 1; rank < all.size(); ++rank) {
      value = combined<T>(op, value, load(&all[rank][at]));
    }
    store(&result[at], value);
  }
  return result;
}

template <typename T>
std::vector<char> reduced_plain(HcclReduceOp op, const std::vector<std::vector<char>>& all) {
  const auto load = [](const char* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  return reduced_as<T>(op, all, sizeof(T), load, [](char* to, T value) { std::memcpy(to, &value, sizeof value); });
}

} // namespace

const Type* find_type(HcclDataType type) {
  static const std::map<HcclDataType, Type> types = {
      {HCCL_DATA_TYPE_INT8, {"int8", 1, ACL_INT8}},
      {HCCL_DATA_TYPE_INT16, {"int16", 2, ACL_INT16}},
      {HCCL_DATA_TYPE_INT32, {"int32", 4, ACL_INT32}},
      {HCCL_DATA_TYPE_INT64, {"int64", 8, ACL_INT64}},
      {HCCL_DATA_TYPE_FP16, {"float16", 2, ACL_FLOAT16}},
      {HCCL_DATA_TYPE_FP32, {"float32", 4, ACL_FLOAT}},
      {HCCL_DATA_TYPE_BFP16, {"bfloat16", 2, ACL_BF16}},
      {HCCL_DATA_TYPE_FP64, {"float64", 8, on_950() ? ACL_DOUBLE : ACL_DT_UNDEFINED}},
      {HCCL_DATA_TYPE_UINT64, {"uint64", 8, on_950() ? ACL_UINT64 : ACL_DT_UNDEFINED}},
      {HCCL_DATA_TYPE_UINT8, {"uint8", 1, ACL_DT_UNDEFINED}},
      {HCCL_DATA_TYPE_UINT16, {"uint16", 2, ACL_DT_UNDEFINED}},
      {HCCL_DATA_TYPE_UINT32, {"uint32", 4, ACL_DT_UNDEFINED}},
      {HCCL_DATA_TYPE_INT128, {"int128", 16, ACL_DT_UNDEFINED}},
      {HCCL_DATA_TYPE_HIF8, {"hifloat8", 1, ACL_DT_UNDEFINED}},
      {HCCL_DATA_TYPE_FP8E4M3, {"float8_e4m3", 1, ACL_DT_UNDEFINED}},
      {HCCL_DATA_TYPE_FP8E5M2, {"float8_e5m2", 1, ACL_DT_UNDEFINED}},
      {HCCL_DATA_TYPE_FP8E8M0, {"float8_e8m0", 1, ACL_DT_UNDEFINED}}};
  const auto found = types.find(type);
  return found == types.end() ? nullptr : &found->second;
}

const char* name_of(HcclReduceOp op) {
  static const char* const names[] = {"sum", "prod", "max", "min"};
  return op <= HCCL_REDUCE_MIN ? names[op] : nullptr;
}

std::vector<char> reduced(HcclReduceOp op, const Type& type, const std::vector<std::vector<char>>& all) {
  switch (type.acl) {
    case ACL_INT8:
      return reduced_plain<int8_t>(op, all);
    case ACL_INT16:
      return reduced_plain<int16_t>(op, all);
    case ACL_INT32:
      return reduced_plain<int32_t>(op, all);
    case ACL_INT64:
      return reduced_plain<int64_t>(op, all);
    case ACL_UINT64:
      return reduced_plain<uint64_t>(op, all);
    case ACL_DOUBLE:
      return reduced_plain<double>(op, all);
    default:
      return reduced_as<float>(
          op, all, type.size, [&](const char* from) { return load_float(type.acl, from); },
          [&](char* to, float value) { store_float(type.acl, to, value); });
  }
}

} // namespace standin
