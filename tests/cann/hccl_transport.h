// Communicators of HCCL, and the messages between their processes: files of a directory in /dev/shm, whose name is the
// root information. All processes have to be on one machine.
//
// Every process holds a shared lock on the directory as long as it takes part. Who leaves and finds nobody else removes
// it; what processes that were killed leave behind, the next communicator that is made clears away. A new directory has
// a random name, so stale files are never read.
//
// Messages are buffered without limit. Who waits longer than CANN_STANDIN_HCCL_TIMEOUT seconds (60 by default) ends the
// process, as a device ends a kernel whose peer does not come; so does a message that is not the expected one.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime.h"

#pragma GCC visibility push(default)

namespace standin {

class Communicator {
 public:
  // The id of a new directory, which this process keeps alive until it joins.
  static std::string create_id();
  // Waits for all ranks; null with a reason in `error` if they do not come in time or the id or the rank is taken.
  static std::shared_ptr<Communicator> join(
      const std::string& id, int rank, int size, std::string name, std::string& error);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // `box` tells messages between the same two ranks apart, `label` says what they are: both sides must agree on it.
  void send(const std::string& box, int to, const std::string& label, const void* data, uint64_t bytes) const;
  std::vector<char> receive(const std::string& box, int from, const std::string& label, uint64_t bytes) const;
  // Waits until the receiver has taken a message.
  void wait_taken(const std::string& box, int to, const std::string& label) const;

  // Boxes: collectives and fused operators are numbered in the order in which a rank comes to them, sends and receives
  // by pair.
  std::string next_collective();
  std::string next_fused();
  std::string next_send(int to);
  std::string next_receive(int from);

  const std::string name;
  const int rank;
  const int size;
  const int device; // the current one of the thread that joined

 private:
  Communicator(std::string directory, int lock, int rank, int size, std::string name);
  std::string path(const std::string& box, int from, int to) const;
  void leave() const;
  [[noreturn]] void fail(const std::string& message) const;

  const std::string directory_;
  const int lock_;
  std::atomic<int64_t> collectives_ = 0;
  std::atomic<int64_t> fused_ = 0;
  std::mutex mutex_;
  std::vector<int64_t> sends_;
  std::vector<int64_t> receives_;
};

// The live communicator of that name in this process, or null.
std::shared_ptr<Communicator> find_communicator(const std::string& name);

} // namespace standin

#pragma GCC visibility pop
