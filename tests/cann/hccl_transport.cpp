#include "hccl_transport.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <system_error>
#include <thread>

namespace standin {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

const std::string kRoot = "/dev/shm/";
const std::string kPrefix = "cann_standin-";

double time_limit() {
  static const std::string text = setting("CANN_STANDIN_HCCL_TIMEOUT", "60");
  const double seconds = std::strtod(text.c_str(), nullptr);
  if (seconds <= 0) {
    die("CANN_STANDIN_HCCL_TIMEOUT is " + text + ", not a number of seconds");
  }
  return seconds;
}

std::string waited() {
  std::string text = std::to_string(time_limit());
  text.erase(text.find_last_not_of('0') + 1);
  return "waited " + (text.back() == '.' ? text.substr(0, text.size() - 1) : text) + " s";
}

// Asks again and again, ever less often up to once a millisecond. False if the time is up.
template <typename Ready>
bool poll(Ready ready) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(time_limit());
  for (int microseconds = 10; !ready(); microseconds = std::min(microseconds * 2, 1000)) {
    if (Clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  }
  return true;
}

int open_directory(const std::string& path) {
  return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

// Gives up the lock on a directory. Who was the last removes it.
void close_directory(const std::string& path, int lock) {
  flock(lock, LOCK_UN); // first: of two that leave at once, at least one then sees itself alone
  if (flock(lock, LOCK_EX | LOCK_NB) == 0) {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  close(lock);
}

// Directories that nobody holds a lock on.
void clear_stale() {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(kRoot, ignored)) {
    const int lock = entry.path().filename().string().rfind(kPrefix, 0) == 0 ? open_directory(entry.path()) : -1;
    if (lock >= 0) {
      close_directory(entry.path(), lock);
    }
  }
}

bool exists(const std::string& path) {
  return access(path.c_str(), F_OK) == 0;
}

void write_all(int file, const void* data, uint64_t bytes, const std::string& path) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = write(file, from, bytes);
    if (written <= 0) {
      die("cannot write " + path + ": " + std::strerror(errno));
    }
    from += written;
    bytes -= static_cast<uint64_t>(written);
  }
}

void read_all(int file, void* data, uint64_t bytes, const std::string& path) {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = read(file, to, bytes);
    if (got <= 0) {
      die("cannot read " + path);
    }
    to += got;
    bytes -= static_cast<uint64_t>(got);
  }
}

std::string joined(const std::string& directory, int rank, int size) {
  return directory + "/joined-" + std::to_string(rank) + "-of-" + std::to_string(size);
}

// Live communicators, and the locks of directories that this process made and has not joined. Never destroyed.
struct Registry {
  std::mutex mutex;
  std::vector<Communicator*> live;
  std::map<std::string, int> created;
};

Registry& registry() {
  static auto* registry = new Registry;
  return *registry;
}

void release_created(const std::string& id) {
  std::unique_lock lock(registry().mutex);
  const auto found = registry().created.find(id);
  if (found != registry().created.end()) {
    close(found->second);
    registry().created.erase(found);
  }
}

} // namespace

std::string Communicator::create_id() {
  clear_stale();
  std::random_device random;
  std::string id;
  for (int i = 0; i < 4; ++i) {
    char word[9];
    std::snprintf(word, sizeof word, "%08x", random());
    id += word;
  }
  // Gets its name when it is locked: nobody takes it for a stale one.
  const std::string unnamed = kRoot + ".new-" + kPrefix + id;
  const int lock = mkdir(unnamed.c_str(), 0700) == 0 ? open_directory(unnamed) : -1;
  if (lock < 0 || flock(lock, LOCK_SH) != 0 || rename(unnamed.c_str(), (kRoot + kPrefix + id).c_str()) != 0) {
    die("cannot make a directory in " + kRoot + ": " + std::strerror(errno));
  }
  std::unique_lock guard(registry().mutex);
  registry().created[id] = lock;
  return id;
}

std::shared_ptr<Communicator> Communicator::join(
    const std::string& id, int rank, int size, std::string name, std::string& error) {
  const std::string directory = kRoot + kPrefix + id;
  const int lock = open_directory(directory);
  if (lock < 0 || flock(lock, LOCK_SH) != 0) {
    error = "the root information names no communicator that is being made";
    return nullptr;
  }
  release_created(id);
  std::shared_ptr<Communicator> made(new Communicator(directory, lock, rank, size, std::move(name)));
  const int marker = open(joined(directory, rank, size).c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (marker < 0) {
    error = "rank " + std::to_string(rank) + " is taken";
    return nullptr;
  }
  close(marker);
  for (int peer = 0; peer < size; ++peer) {
    if (!poll([&] { return exists(joined(directory, peer, size)); })) {
      error = waited() + " for rank " + std::to_string(peer) + " to join";
      return nullptr;
    }
  }
  return made;
}

Communicator::Communicator(std::string directory, int lock, int rank, int size, std::string name)
    : name(std::move(name)),
      rank(rank),
      size(size),
      device(current_device()),
      directory_(std::move(directory)),
      lock_(lock),
      sends_(size),
      receives_(size) {
  // What is alive when the process exits leaves then.
  static const int registered = std::atexit([] {
    std::unique_lock guard(registry().mutex);
    for (const Communicator* communicator : registry().live) {
      communicator->leave();
    }
    registry().live.clear();
  });
  static_cast<void>(registered);
  std::unique_lock guard(registry().mutex);
  registry().live.push_back(this);
}

Communicator::~Communicator() {
  std::unique_lock guard(registry().mutex);
  if (std::erase(registry().live, this) > 0) {
    leave();
  }
}

void Communicator::leave() const {
  close_directory(directory_, lock_);
}

void Communicator::fail(const std::string& message) const {
  leave();
  die("HCCL: rank " + std::to_string(rank) + " of " + name + " " + message);
}

std::string Communicator::path(const std::string& box, int from, int to) const {
  return directory_ + "/" + box + "-" + std::to_string(from) + "-" + std::to_string(to);
}

void Communicator::send(
    const std::string& box, int to, const std::string& label, const void* data, uint64_t bytes) const {
  const std::string target = path(box, rank, to);
  const std::string partial = target + ".part";
  const int file = open(partial.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (file < 0) {
    die("cannot make " + partial + ": " + std::strerror(errno));
  }
  const uint64_t header[2] = {label.size(), bytes};
  write_all(file, header, sizeof header, partial);
  write_all(file, label.data(), label.size(), partial);
  write_all(file, data, bytes, partial);
  close(file);
  if (rename(partial.c_str(), target.c_str()) != 0) {
    die("cannot make " + target + ": " + std::strerror(errno));
  }
}

std::vector<char> Communicator::receive(
    const std::string& box, int from, const std::string& label, uint64_t bytes) const {
  const std::string source = path(box, from, rank);
  int file = -1;
  if (!poll([&] { return (file = open(source.c_str(), O_RDONLY | O_CLOEXEC)) >= 0; })) {
    fail(waited() + " for rank " + std::to_string(from) + ", which did not send: " + label);
  }
  uint64_t header[2];
  read_all(file, header, sizeof header, source);
  std::string sent(header[0], '\0');
  read_all(file, sent.data(), sent.size(), source);
  if (sent != label || header[1] != bytes) {
    fail("expects from rank " + std::to_string(from) + ": " + label + "; it sent: " + sent);
  }
  std::vector<char> data(bytes);
  read_all(file, data.data(), bytes, source);
  close(file);
  unlink(source.c_str());
  return data;
}

void Communicator::wait_taken(const std::string& box, int to, const std::string& label) const {
  const std::string target = path(box, rank, to);
  if (!poll([&] { return !exists(target); })) {
    fail(waited() + " for rank " + std::to_string(to) + ", which did not take: " + label);
  }
}

std::string Communicator::next_collective() {
  return "collective-" + std::to_string(++collectives_);
}

std::string Communicator::next_fused() {
  return "fused-" + std::to_string(++fused_);
}

std::string Communicator::next_send(int to) {
  std::unique_lock guard(mutex_);
  return "message-" + std::to_string(++sends_[to]);
}

std::string Communicator::next_receive(int from) {
  std::unique_lock guard(mutex_);
  return "message-" + std::to_string(++receives_[from]);
}

} // namespace standin
