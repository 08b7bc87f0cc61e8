// The trace of aclnn calls: JSON lines, two a call. One of phase 1 with the arguments, the workspace and the status,
// and one of phase 2 with the stream and the status; "call" says which belong together.
#pragma once

#include "runtime.h"

namespace standin {

// Returns the number of the call.
int64_t trace_phase1(const char* api, const std::vector<Argument>& arguments, uint64_t workspace, int status);
void trace_phase2(int64_t call, const char* api, aclrtStream stream, bool launched, int status);

} // namespace standin
