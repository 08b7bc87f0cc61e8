// What libascendcl.so shares with libnnopbase.so beyond standin.h: the work of streams, the message of the last error,
// injected faults, and counts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "acl/acl_rt.h"
#include "standin.h"

#pragma GCC visibility push(default)

namespace standin {

// 0xFFFE is NaN as float16 and as bfloat16; repeated it is NaN as float and double, and no plausible number as int32,
// int64 or bool.
constexpr uint16_t kPoison = 0xFFFE;
void fill_poison(void* host, uint64_t bytes);

// One element of float, float16 or bfloat16.
float load_float(aclDataType dtype, const char* from);
void store_float(aclDataType dtype, char* to, float value);

// The host's view of the first element, after a check of the whole extent; null for a tensor without elements.
char* first_element(const aclTensor& tensor);

// An environment variable, or the fallback if it is unset or empty.
std::string setting(const char* name, const char* fallback);

// ---- errors ------------------------------------------------------------------------------------------------------
// Sets what aclGetRecentErrMsg returns next on this thread; returns `code`, so that refusing is one statement.
int refuse(int code, const std::string& message);
// Counts a call of `where` ("malloc", "phase1", ...); the code to fail with, or 0.
int injected_fault(const std::string& where);

// ---- streams -----------------------------------------------------------------------------------------------------
// Runs the task in the stream's order: now, or later on the stream's own thread (CANN_STANDIN_ASYNC). Ends the process
// if the stream does not exist.
void submit(aclrtStream stream, std::function<void()> task);
void synchronize_device(int device);
int stream_id(aclrtStream stream);
int stream_device(aclrtStream stream);
int current_device();

// ---- counts ------------------------------------------------------------------------------------------------------
int64_t live_streams();
int64_t live_events();
int64_t live_device_bytes();
int64_t live_device_bytes(int device);
// The device that owns a live address, -1 for none.
int device_of(const void* address);

constexpr int kDevices = 2;
constexpr uint64_t kDeviceBytes = uint64_t{16} << 30;

} // namespace standin

#pragma GCC visibility pop
