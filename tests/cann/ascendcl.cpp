// The runtime without memory and streams: settings, devices, versions, system parameters, error messages, and faults
// that tests inject.
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "runtime.h"

namespace standin {
namespace {

constexpr aclError kBadParameter = ACL_ERROR_INVALID_PARAM;

thread_local int device = 0;
thread_local std::string pending_message;  // not yet returned by aclGetRecentErrMsg
thread_local std::string returned_message; // what the last returned pointer points to

std::atomic<int64_t> system_parameters[3] = {-1, -1, -1}; // by aclSysParamOpt
std::atomic<int64_t> contexts_parameters[3] = {-1, -1, -1};

struct Fault {
  int64_t calls_left = 0; // 0: none
  int64_t code = 0;
};

struct Faults {
  std::mutex mutex;
  std::map<std::string, Fault> by_place;
};

Faults& faults() {
  static auto* faults = new Faults;
  return *faults;
}

struct Version {
  int major;
  int minor;
  int patch;
};

std::string version_text() {
  static const std::string text = setting("CANN_STANDIN_VERSION", "9.1.0");
  return text;
}

Version version() {
  Version version{};
  if (std::sscanf(version_text().c_str(), "%d.%d.%d", &version.major, &version.minor, &version.patch) != 3) {
    die("CANN_STANDIN_VERSION is " + version_text() + ", not like 9.1.0");
  }
  return version;
}

const std::string& soc_name() {
  static const std::string name = setting("CANN_STANDIN_SOC", "Ascend910B2");
  return name;
}

void put_number(char (&field)[ACL_PKG_VERSION_PARTS_MAX_SIZE], int number) {
  std::snprintf(field, sizeof field, "%d", number);
}

int set_parameter(std::atomic<int64_t> (&parameters)[3], aclSysParamOpt option, int64_t value) {
  if (option < 0 || option > ACL_OPT_STRONG_CONSISTENCY) {
    return refuse(kBadParameter, "unknown system parameter");
  }
  parameters[option] = value;
  return ACL_SUCCESS;
}

int get_parameter(const std::atomic<int64_t> (&parameters)[3], aclSysParamOpt option, int64_t* value) {
  if (option < 0 || option > ACL_OPT_STRONG_CONSISTENCY || value == nullptr) {
    return refuse(kBadParameter, "unknown system parameter");
  }
  *value = parameters[option] < 0 ? 0 : parameters[option].load();
  return ACL_SUCCESS;
}

} // namespace

std::string setting(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? fallback : value;
}

Product product() {
  static const std::map<std::string, Product> products = {
      {"Ascend910B2", Product::A2}, {"Ascend910_9391", Product::A3}, {"Ascend950PR_9589", Product::Ascend950}};
  const auto found = products.find(soc_name());
  if (found == products.end()) {
    die("CANN_STANDIN_SOC is " + soc_name() + ", not Ascend910B2, Ascend910_9391 or Ascend950PR_9589");
  }
  return found->second;
}

bool on_950() {
  return product() == Product::Ascend950;
}

bool cann_at_least(int major, int minor) {
  const Version have = version();
  return have.major != major ? have.major > major : have.minor >= minor;
}

bool unsettled() {
  static const bool value = setting("CANN_STANDIN_UNSETTLED", "0") == "1";
  return value;
}

void die(const std::string& message) {
  std::fprintf(stderr, "CANN stand-in: %s\n", message.c_str());
  std::fflush(stderr);
  std::abort();
}

int refuse(int code, const std::string& message) {
  pending_message = message;
  return code;
}

int injected_fault(const std::string& where) {
  std::unique_lock lock(faults().mutex);
  const auto found = faults().by_place.find(where);
  if (found == faults().by_place.end() || found->second.calls_left == 0 || --found->second.calls_left > 0) {
    return 0;
  }
  found->second.calls_left = where == "malloc" ? 1 : 0;
  return static_cast<int>(found->second.code);
}

int current_device() {
  return device;
}

} // namespace standin

using namespace standin;

STANDIN_API void standin_fail(const char* where, int64_t nth, int64_t code) {
  std::unique_lock lock(faults().mutex);
  faults().by_place[where] = {nth, code};
}

STANDIN_API int64_t standin_deterministic() {
  return contexts_parameters[ACL_OPT_DETERMINISTIC];
}

// ---- life cycle and devices --------------------------------------------------------------------------------------
aclError aclInit(const char*) {
  product();
  version();
  return ACL_SUCCESS;
}

aclError aclFinalize() {
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = kDevices;
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t id) {
  if (id < 0 || id >= kDevices) {
    return refuse(ACL_ERROR_INVALID_DEVICE, "aclrtSetDevice: there is no such device");
  }
  device = id;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* id) {
  *id = device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t id) {
  synchronize_device(id);
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeDevice() {
  synchronize_device(device);
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t) {
  return aclrtSynchronizeDevice();
}

// A context is the address of its device's number.
aclError aclrtGetCurrentContext(aclrtContext* context) {
  static int numbers[kDevices] = {0, 1};
  *context = &numbers[device];
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  return aclrtSetDevice(*static_cast<int*>(context));
}

aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) {
    *flags = 0;
  }
  *active = 1;
  return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* possible, int32_t id, int32_t peer) {
  *possible = id != peer ? 1 : 0;
  return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) {
  return ACL_SUCCESS;
}

const char* aclrtGetSocName() {
  return soc_name().c_str();
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  *value = info == ACL_DEVICE_INFO_AI_CORE_NUM ? 24 : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 48 : 192 << 20;
  return ACL_SUCCESS;
}

aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  *value = type == ACL_RT_DEV_RES_CUBE_CORE ? 24 : 48;
  return ACL_SUCCESS;
}

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
  *value = attribute == ACL_CANN_ATTR_INF_NAN || attribute == ACL_CANN_ATTR_BF16 ? 1 : 0;
  return ACL_SUCCESS;
}

aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
  static const aclCannAttr attributes[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
  *list = attributes;
  *count = 3;
  return ACL_SUCCESS;
}

// ---- versions ----------------------------------------------------------------------------------------------------
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* out) {
  const Version have = version();
  *out = {};
  std::snprintf(out->version, sizeof out->version, "%s", version_text().c_str());
  put_number(out->majorVersion, have.major);
  put_number(out->minorVersion, have.minor);
  put_number(out->releaseVersion, have.patch);
  return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char*, char* out) {
  std::strcpy(out, version_text().c_str());
  return ACL_SUCCESS;
}

aclError aclsysGetVersionNum(char*, int32_t* out) {
  const Version have = version();
  *out = (have.major * 10000000) + (have.minor * 100000) + (have.patch * 1000);
  return ACL_SUCCESS;
}

// ---- system parameters -------------------------------------------------------------------------------------------
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return set_parameter(contexts_parameters, option, value);
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return get_parameter(contexts_parameters, option, value);
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return set_parameter(system_parameters, option, value);
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return get_parameter(system_parameters, option, value);
}

// Time limits, failure and overflow modes change nothing: no kernel of this stand-in hangs, half fails or saturates.
aclError aclrtSetOpWaitTimeout(uint32_t) {
  return ACL_SUCCESS;
}

aclError aclrtSetOpExecuteTimeOut(uint32_t) {
  return ACL_SUCCESS;
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) {
  return ACL_SUCCESS;
}

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t) {
  stream_id(stream);
  return ACL_SUCCESS;
}

// ---- errors ------------------------------------------------------------------------------------------------------
const char* aclGetRecentErrMsg() {
  if (pending_message.empty()) {
    return nullptr;
  }
  returned_message = std::exchange(pending_message, {});
  return returned_message.c_str();
}

aclError aclrtGetLastError(aclrtLastErrLevel) {
  return ACL_SUCCESS;
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) {
  return ACL_SUCCESS;
}

void aclAppLog(aclLogLevel level, const char* function, const char*, uint32_t, const char* format, ...) {
  static const bool wanted = setting("CANN_STANDIN_LOG", "0") == "1";
  if (!wanted || level < ACL_ERROR) {
    return;
  }
  va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "CANN stand-in: log of %s: ", function);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
}

// torch_npu tells HCCL too whether to be deterministic; the collectives of the stand-in always are.
STANDIN_API int HcclSetConfig(int, int64_t) {
  return 0;
}

// Tools that listen in on profiling: none.
STANDIN_API int32_t MsprofRegisterCallback(uint32_t, void*) {
  return 0;
}
