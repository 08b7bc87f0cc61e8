// The two-phase call of an aclnn operator. Contract: launch.h.
#include "launch.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch_npu/csrc/core/npu/NPUFormat.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <mutex>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "../common/dtypes.h"
#include "device.h"

namespace moe::npu {
namespace {

struct StatusName {
  Status status;
  const char* name;
};

constexpr StatusName kStatusNames[] = {
    {161001, "ACLNN_ERR_PARAM_NULLPTR"},
    {161002, "ACLNN_ERR_PARAM_INVALID"},
    {361001, "ACLNN_ERR_RUNTIME_ERROR"},
    {561000, "ACLNN_ERR_INNER"},
    {561001, "ACLNN_ERR_INNER_INFERSHAPE_ERROR"},
    {561002, "ACLNN_ERR_INNER_TILING_ERROR"},
    {561003, "ACLNN_ERR_INNER_FIND_KERNEL_ERROR"},
    {561101, "ACLNN_ERR_INNER_CREATE_EXECUTOR"},
    {561102, "ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR"},
    {561103, "ACLNN_ERR_INNER_NULLPTR"},
    {561104, "ACLNN_ERR_INNER_WRONG_ATTR_INFO_SIZE"},
    {561105, "ACLNN_ERR_INNER_KEY_CONFLICT"},
    {561106, "ACLNN_ERR_INNER_INVALID_IMPL_MODE"},
    {561107, "ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND"},
    {561108, "ACLNN_ERR_INNER_LOAD_JSON_FAILED"},
    {561109, "ACLNN_ERR_INNER_JSON_VALUE_NOT_FOUND"},
    {561110, "ACLNN_ERR_INNER_JSON_FORMAT_INVALID"},
    {561111, "ACLNN_ERR_INNER_JSON_DTYPE_INVALID"},
    {561112, "ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND"},
    {561113, "ACLNN_ERR_INNER_OP_FILE_INVALID"},
    {561114, "ACLNN_ERR_INNER_ATTR_NUM_OUT_OF_BOUND"},
    {561115, "ACLNN_ERR_INNER_ATTR_LEN_NOT_ENOUGH"},
    {561116, "ACLNN_ERR_INNER_INPUT_NUM_IN_JSON_TOO_LARGE"},
    {561117, "ACLNN_ERR_INNER_INPUT_JSON_IS_NULL"},
    {561118, "ACLNN_ERR_INNER_STATIC_WORKSPACE_INVALID"},
    {561119, "ACLNN_ERR_INNER_STATIC_BLOCK_DIM_INVALID"},
};

std::string status_text(Status status) {
  for (const auto& known : kStatusNames) {
    if (known.status == status) {
      return std::to_string(status) + " " + known.name;
    }
  }
  return std::to_string(status);
}

// CANN keeps its last message per thread: to be asked on the thread that failed. Null if there is none.
std::string recent_error() {
  using GetRecentErrMsg = const char* (*)();
  static const auto kGet = reinterpret_cast<GetRecentErrMsg>(find_runtime_symbol("aclGetRecentErrMsg"));
  const char* message = kGet != nullptr ? kGet() : nullptr;
  return message != nullptr ? message : "";
}

void print(std::ostream& out, const Argument& argument) {
  switch (argument.kind) {
    case Argument::Kind::Null:
      out << "null";
      return;
    case Argument::Kind::Int:
      out << argument.values.front();
      return;
    case Argument::Kind::Bool:
      out << (argument.values.front() != 0 ? "true" : "false");
      return;
    case Argument::Kind::Text:
      out << '"' << argument.text << '"';
      return;
    case Argument::Kind::Ints:
      out << at::IntArrayRef(argument.values);
      return;
    case Argument::Kind::Tensor:
    case Argument::Kind::TensorList:
      const char* separator = "";
      for (const auto& [dtype, sizes] : argument.tensors) {
        out << std::exchange(separator, ", ") << dtype_name(dtype) << at::IntArrayRef(sizes);
      }
  }
}

Argument describe(Argument::Kind kind, at::TensorList tensors) {
  Argument argument{kind, {}, {}};
  for (const auto& tensor : tensors) {
    argument.tensors.emplace_back(tensor.scalar_type(), at::DimVector(tensor.sizes()));
  }
  return argument;
}

// The failure of a queued call, until the next call of any operator tells it.
struct EarlierFailure {
  std::mutex mutex;
  std::string message;

  static EarlierFailure& get() {
    static auto* failure = new EarlierFailure; // never destroyed: the queue's thread outlives main()
    return *failure;
  }
};

} // namespace

void Call::prepare_thread() {
  using SetOption = int (*)(aclSysParamOpt, int64_t);
  static const auto kSet = reinterpret_cast<SetOption>(find_runtime_symbol("aclrtCtxSetSysParamOpt"));
  if (kSet != nullptr) {
    kSet(ACL_OPT_DETERMINISTIC, at::globalContext().deterministicAlgorithms() ? 1 : 0);
  }
}

void Call::raise_earlier_failure() {
  EarlierFailure& earlier = EarlierFailure::get();
  std::string message;
  {
    const std::lock_guard lock(earlier.mutex);
    message = std::exchange(earlier.message, {});
  }
  TORCH_CHECK(
      message.empty(), "an earlier call failed in torch_npu's task queue, results since then are not to be trusted. ",
      "TASK_QUEUE_ENABLE=0 shows where it comes from. ", message);
}

std::string Call::failure(const char* phase, Status status) const {
  std::ostringstream text;
  text << "moe::" << op_ << ": " << api_ << " failed in " << phase << ": " << status_text(status) << " ("
       << cann_version_text() << ", " << soc_name() << ")";
  for (size_t i = 0; i < arguments_.size(); ++i) {
    text << "\n  " << names_[i] << ": ";
    print(text, arguments_[i]);
  }
  const std::string message = recent_error();
  if (!message.empty()) {
    text << "\n" << message;
  }
  return text.str();
}

void Call::check_tensor(const at::Tensor& tensor) const {
  if (!tensor.defined()) {
    return;
  }
  TORCH_CHECK(
      tensor.is_privateuseone(), "moe::", op_, ": ", names_[arguments_.size() - 1], " must be on an NPU, got ",
      tensor.device());
  const int64_t format = at_npu::native::get_npu_format(tensor);
  switch (format) {
    case ACL_FORMAT_ND:
    case ACL_FORMAT_NCL:
    case ACL_FORMAT_NCHW:
    case ACL_FORMAT_NCDHW:
      return;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(
          false, "moe::", op_, ": ", names_[arguments_.size() - 1], " must be in a plain format, got format ", format,
          " (29 is FRACTAL_NZ); torch_npu.npu_format_cast(tensor, 2) makes a plain copy");
  }
}

void Call::fail_phase1(Status status) const {
  TORCH_CHECK(false, failure("phase 1 (GetWorkspaceSize)", status));
}

Status Call::run_phase2(Phase2 phase2, void* workspace, uint64_t workspace_size, aclrtStream stream) {
  const Status status = phase2(workspace, workspace_size, handles_.take_executor(), stream);
  if (status != kSuccess) {
    message_ = failure("phase 2", status);
  }
  handles_.release();
  return status;
}

void Call::enqueue(const std::shared_ptr<Call>& call, Phase2 phase2, uint64_t workspace_size) {
  const aclrtStream stream = c10_npu::getCurrentNPUStream().stream(/*need_empty=*/false);
  // Freed at the end of this function, after the enqueue: the allocator may then give it to work that is queued later
  // on this stream, never to earlier work.
  at::Tensor workspace;
  if (workspace_size > 0) {
    workspace = at::empty({static_cast<int64_t>(workspace_size)}, at::device(at::kPrivateUse1).dtype(at::kByte));
  }
  void* address = workspace.defined() ? workspace.data_ptr() : nullptr;
  const auto caller = std::this_thread::get_id();
  at_npu::native::OpCommand::RunOpApiV2(call->api_, [=]() -> int {
    const Status status = call->run_phase2(phase2, address, workspace_size, stream);
    if (status == kSuccess) {
      return kSuccess;
    }
    if (std::this_thread::get_id() == caller) {
      // Without a queue the error is thrown below: torch_npu would throw it after giving up the GIL.
      call->failed_inline_ = true;
      return kSuccess;
    }
    EarlierFailure& earlier = EarlierFailure::get();
    const std::lock_guard lock(earlier.mutex);
    earlier.message = call->message_;
    return status;
  });
  TORCH_CHECK(!call->failed_inline_, call->message_);
}

aclTensor* Convert<aclTensor*>::from(Call& call, const at::Tensor& tensor) {
  call.add(tensor.defined() ? describe(Argument::Kind::Tensor, tensor) : Argument());
  call.check_tensor(tensor);
  return call.handles().tensor(tensor);
}

aclTensor* Convert<aclTensor*>::from(Call& call, const std::optional<at::Tensor>& tensor) {
  return from(call, tensor.value_or(at::Tensor()));
}

aclTensor* Convert<aclTensor*>::from(Call& call, std::nullptr_t) {
  return from(call, at::Tensor());
}

aclTensorList* Convert<aclTensorList*>::from(Call& call, const Tensors& tensors) {
  call.add(describe(Argument::Kind::TensorList, tensors));
  for (const auto& tensor : tensors) {
    call.check_tensor(tensor);
  }
  return call.handles().list(tensors);
}

aclTensorList* Convert<aclTensorList*>::from(Call& call, const std::optional<Tensors>& tensors) {
  return tensors.has_value() ? from(call, *tensors) : from(call, nullptr);
}

aclTensorList* Convert<aclTensorList*>::from(Call& call, std::nullptr_t) {
  call.add({});
  return nullptr;
}

aclIntArray* Convert<aclIntArray*>::from(Call& call, const Ints& values) {
  call.add({Argument::Kind::Ints, {}, values});
  return call.handles().int_array(values);
}

aclIntArray* Convert<aclIntArray*>::from(Call& call, const std::optional<Ints>& values) {
  return values.has_value() ? from(call, *values) : from(call, nullptr);
}

aclIntArray* Convert<aclIntArray*>::from(Call& call, std::nullptr_t) {
  call.add({});
  return nullptr;
}

const char* Convert<const char*>::from(Call& call, const std::string& text) {
  call.add({Argument::Kind::Text, {}, {}, text});
  return call.handles().text(text);
}

int64_t Convert<int64_t>::from(Call& call, int64_t value) {
  call.add({Argument::Kind::Int, {}, {value}});
  return value;
}

bool Convert<bool>::from(Call& call, bool value) {
  call.add({Argument::Kind::Bool, {}, {value ? 1 : 0}});
  return value;
}

} // namespace moe::npu
