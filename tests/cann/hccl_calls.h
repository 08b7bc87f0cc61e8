// A call of libhccl.so on its way from the host to a stream: checked, put into the trace, numbered, submitted.
#pragma once

#include "hccl_data.h"
#include "hccl_transport.h"

namespace standin {

// The communicator of a handle. Ends the process if there is none.
std::shared_ptr<Communicator> communicator(HcclComm handle);
void add_communicator(std::shared_ptr<Communicator> made);
void remove_communicator(HcclComm handle);

// Sets the message of the last error; returns `code`.
HcclResult refuse_hccl(HcclResult code, const std::string& message);

// What a call is given, checked before anything runs.
struct Call {
  const char* api;
  HcclComm handle;
  aclrtStream stream;
  std::vector<Buffer> buffers = {};
  std::string details = {}; // what the label says beside the counts: a root, a reduction
  std::vector<Argument> trace = {};
};

// The part of a buffer that belongs to a rank.
using Part = std::function<Buffer(int)>;

// One collective on one rank, once its stream has come to it.
struct Collective {
  std::shared_ptr<Communicator> comm;
  std::string box;
  std::string what;

  int rank() const {
    return comm->rank;
  }
  int size() const {
    return comm->size;
  }
  std::string label(const Buffer& buffer) const {
    return what + ", " + buffer.text();
  }
  void send(int to, const Buffer& from) const {
    comm->send(box, to, label(from), from.view(), from.bytes());
  }
  std::vector<char> receive(int from, const Buffer& shape) const {
    return comm->receive(box, from, label(shape), shape.bytes());
  }
  // To and from every rank. What goes to itself is read before anything is written: buffers may be the same.
  std::vector<std::vector<char>> exchange(const Part& sent, const Part& received) const {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) {
        send(peer, sent(peer));
      }
    }
    std::vector<std::vector<char>> data;
    for (int peer = 0; peer < size(); ++peer) {
      data.push_back(peer == rank() ? sent(peer).read() : receive(peer, received(peer)));
    }
    return data;
  }
};

HcclResult launch(const Call& call, std::function<void(const Collective&)> run);
HcclResult launch_rooted(Call call, uint32_t root, std::function<void(const Collective&)> run);
// Of the data type of the first buffer.
HcclResult launch_reduction(Call call, HcclReduceOp op, std::function<void(const Collective&, const Type&)> run);

// What goes from this rank to another or comes from there.
struct Message {
  bool send;
  int peer;
  Buffer buffer;
  std::string box;

  std::string label() const {
    return "a message, " + buffer.text();
  }
};

// Returns on the stream when all has come and all that was sent has been taken.
HcclResult launch_batch(const Call& call, std::vector<Message> batch);
HcclResult launch_message(Call call, bool send, uint32_t peer);

} // namespace standin
