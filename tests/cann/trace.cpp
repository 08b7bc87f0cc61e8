// Arguments as JSON, and the file that they go to.
#include "trace.h"

#include <atomic>
#include <cstdio>
#include <mutex>
#include <sstream>

namespace standin {
namespace {

struct Trace {
  std::mutex mutex;
  std::FILE* file = nullptr;
};

Trace& trace() {
  static auto* trace = new Trace;
  return *trace;
}

const char* dtype_name(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT:
      return "float32";
    case ACL_FLOAT16:
      return "float16";
    case ACL_BF16:
      return "bfloat16";
    case ACL_DOUBLE:
      return "float64";
    case ACL_INT8:
      return "int8";
    case ACL_INT16:
      return "int16";
    case ACL_INT32:
      return "int32";
    case ACL_INT64:
      return "int64";
    case ACL_UINT8:
      return "uint8";
    case ACL_BOOL:
      return "bool";
    default:
      return "other";
  }
}

template <typename Values, typename Write>
std::string json_list(const Values& values, Write write) {
  std::ostringstream out;
  out << '[';
  bool first = true;
  for (const auto& value : values) {
    out << (first ? "" : ", ");
    write(out, value);
    first = false;
  }
  out << ']';
  return out.str();
}

template <typename Values>
std::string numbers(const Values& values) {
  return json_list(values, [](std::ostream& out, const auto& value) { out << value; });
}

template <typename Members>
std::string members(const Members& all) {
  return json_list(all, [](std::ostream& out, const auto* member) { out << describe(member); });
}

std::string escaped(const char* text) {
  std::ostringstream out;
  out << '"';
  for (; *text != '\0'; ++text) {
    if (*text == '"' || *text == '\\') {
      out << '\\';
    }
    out << (static_cast<unsigned char>(*text) < ' ' ? ' ' : *text);
  }
  out << '"';
  return out.str();
}

void write_line(const std::string& line) {
  std::unique_lock lock(trace().mutex);
  if (trace().file != nullptr) {
    std::fprintf(trace().file, "%s\n", line.c_str());
    std::fflush(trace().file);
  }
}

void open_trace(const char* path) {
  std::unique_lock lock(trace().mutex);
  if (trace().file != nullptr) {
    std::fclose(trace().file);
  }
  trace().file = path == nullptr ? nullptr : std::fopen(path, "w");
  if (path != nullptr && trace().file == nullptr) {
    die(std::string("cannot write the trace ") + path);
  }
}

[[maybe_unused]] const bool opened = [] {
  const std::string path = setting("CANN_STANDIN_TRACE", "");
  if (!path.empty()) {
    open_trace(path.c_str());
  }
  return true;
}();

} // namespace

Argument describe(const aclTensor* tensor) {
  if (tensor == nullptr) {
    return "null";
  }
  std::ostringstream out;
  out << R"({"dtype": ")" << dtype_name(tensor->dtype) << R"(", "shape": )" << numbers(tensor->dims)
      << R"(, "stride": )" << numbers(tensor->strides) << R"(, "off": )" << tensor->offset << R"(, "fmt": )"
      << tensor->format << R"(, "storage": )" << numbers(tensor->storage_dims) << R"(, "data": )"
      << reinterpret_cast<uintptr_t>(tensor->data) << '}';
  return out.str();
}

Argument describe(const aclTensorList* list) {
  return list == nullptr ? "null" : members(list->tensors);
}

Argument describe(const aclIntArray* array) {
  return array == nullptr ? "null" : numbers(array->values);
}

Argument describe(const aclBoolArray* array) {
  return array == nullptr
             ? "null"
             : json_list(array->values, [](std::ostream& out, bool value) { out << (value ? "true" : "false"); });
}

Argument describe(const aclFloatArray* array) {
  return array == nullptr ? "null" : numbers(array->values);
}

Argument describe(const aclScalar* scalar) {
  if (scalar == nullptr) {
    return "null";
  }
  std::ostringstream out;
  out << R"({"dtype": ")" << dtype_name(scalar->dtype) << R"(", "bytes": )"
      << json_list(scalar->bytes, [](std::ostream& to, char byte) { to << int{static_cast<unsigned char>(byte)}; })
      << '}';
  return out.str();
}

Argument describe(const aclScalarList* list) {
  return list == nullptr ? "null" : members(list->scalars);
}

Argument describe(int64_t value) {
  return std::to_string(value);
}

Argument describe(uint32_t value) {
  return std::to_string(value);
}

Argument describe(bool value) {
  return value ? "true" : "false";
}

Argument describe(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

Argument describe(float value) {
  return describe(static_cast<double>(value));
}

Argument describe(const char* text) {
  return text == nullptr ? "null" : escaped(text);
}

int64_t trace_phase1(const char* api, const std::vector<Argument>& arguments, uint64_t workspace, int status) {
  static std::atomic<int64_t> calls = 0;
  const int64_t call = ++calls;
  std::ostringstream out;
  out << R"({"call": )" << call << R"(, "phase": 1, "api": ")" << api << R"(", "args": )"
      << json_list(arguments, [](std::ostream& to, const Argument& argument) { to << argument; })
      << R"(, "workspace": )" << workspace << R"(, "status": )" << status << '}';
  write_line(out.str());
  return call;
}

void trace_phase2(int64_t call, const char* api, aclrtStream stream, bool launched, int status) {
  std::ostringstream out;
  out << R"({"call": )" << call << R"(, "phase": 2, "api": ")" << api << R"(", "stream": )" << stream_id(stream)
      << R"(, "launched": )" << describe(launched) << R"(, "status": )" << status << '}';
  write_line(out.str());
}

void trace_launch(const char* api, const std::vector<Argument>& arguments, aclrtStream stream) {
  trace_phase2(trace_phase1(api, arguments, 0, ACL_SUCCESS), api, stream, true, ACL_SUCCESS);
}

} // namespace standin

STANDIN_API void standin_trace(const char* path) {
  standin::open_trace(path);
}
