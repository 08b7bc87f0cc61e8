// Where the functions of CANN are. Contract: symbols.h.
#include "symbols.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "device.h"

namespace moe::npu {
namespace {

namespace fs = std::filesystem;

struct Library {
  std::string path;
  void* handle;
  std::string error;
};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!part.empty()) {
      parts.push_back(part);
    }
  }
  return parts;
}

std::string custom_library(const fs::path& package) {
  return (package / "op_api" / "lib" / "libcust_opapi.so").string();
}

// vendors/config.ini has one line of interest: load_priority=vendor_a,vendor_b
std::vector<std::string> vendor_libraries() {
  const std::string opp = environment("ASCEND_OPP_PATH");
  std::vector<std::string> paths;
  if (opp.empty()) {
    return paths;
  }
  const fs::path vendors = fs::path(opp) / "vendors";
  std::ifstream config(vendors / "config.ini");
  constexpr std::string_view kKey = "load_priority=";
  for (std::string line; std::getline(config, line);) {
    if (line.rfind(kKey, 0) == 0) {
      for (const auto& vendor : split(line.substr(kKey.size()), ',')) {
        paths.push_back(custom_library(vendors / vendor));
      }
    }
  }
  return paths;
}

std::vector<std::string> split_packages() {
  const std::string home = environment("ASCEND_HOME_PATH");
  std::vector<std::string> paths;
  std::error_code ignored; // an unreadable folder holds nothing for us
  if (home.empty()) {
    return paths;
  }
  for (const auto& entry : fs::directory_iterator(fs::path(home) / "lib64", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("libopapi_", 0) == 0 && entry.path().extension() == ".so") {
      paths.push_back(entry.path().string());
    }
  }
  std::sort(paths.begin(), paths.end()); // a folder has no order of its own
  return paths;
}

std::vector<std::string> candidates() {
  std::vector<std::string> paths;
  for (const auto& package : split(environment("ASCEND_CUSTOM_OPP_PATH"), ':')) {
    paths.push_back(custom_library(package));
  }
  for (const auto& more : {vendor_libraries(), split_packages()}) {
    paths.insert(paths.end(), more.begin(), more.end());
  }
  paths.emplace_back("libopapi.so");
  return paths;
}

Library open_library(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_LAZY);
  const char* error = handle == nullptr ? dlerror() : nullptr;
  return {path, handle, error != nullptr ? error : ""};
}

// Opened at the first look-up and kept for the life of the process: executors may hold code of theirs.
const std::vector<Library>& libraries() {
  static const std::vector<Library> kLibraries = [] {
    std::vector<Library> opened;
    for (const auto& path : candidates()) {
      opened.push_back(open_library(path));
    }
    return opened;
  }();
  return kLibraries;
}

} // namespace

void* find_symbol(const std::string& name) {
  for (const auto& library : libraries()) {
    if (void* symbol = library.handle != nullptr ? dlsym(library.handle, name.c_str()) : nullptr) {
      return symbol;
    }
  }
  return nullptr;
}

void* require_symbol(const char* op, const std::string& name) {
  void* symbol = find_symbol(name);
  if (symbol == nullptr) {
    std::ostringstream searched;
    for (const auto& line : searched_libraries()) {
      searched << "\n  " << line;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "moe::", op, ": ", name, " is not in the CANN that is installed (", cann_version_text(), ", ",
        soc_name(), "). Searched:", searched.str(),
        "\nInstall a CANN release that has this operator, or set ASCEND_HOME_PATH (source ",
        "set_env.sh) if it is elsewhere; `python -m torch_moe_ops.info` shows what is found.");
  }
  return symbol;
}

void* find_runtime_symbol(const char* name) {
  static void* const kRuntime = dlopen("libascendcl.so", RTLD_LAZY);
  return kRuntime != nullptr ? dlsym(kRuntime, name) : nullptr;
}

std::string library_of(const std::string& name) {
  Dl_info info;
  void* symbol = find_symbol(name);
  return symbol != nullptr && dladdr(symbol, &info) != 0 ? info.dli_fname : "";
}

std::vector<std::string> searched_libraries() {
  std::vector<std::string> lines;
  for (const auto& library : libraries()) {
    lines.push_back(library.handle != nullptr ? library.path : library.path + " (" + library.error + ")");
  }
  return lines;
}

} // namespace moe::npu
