#include "hccl_calls.h"

#include <map>

namespace standin {
namespace {

struct Communicators {
  std::mutex mutex;
  std::map<HcclComm, std::shared_ptr<Communicator>> live;
};

Communicators& communicators() {
  static auto* communicators = new Communicators;
  return *communicators;
}

HcclResult check(const Call& call, const Communicator& comm) {
  if (stream_device(call.stream) != comm.device) {
    return refuse_hccl(HCCL_E_PARA, std::string(call.api) + ": the stream belongs to another device");
  }
  for (const Buffer& buffer : call.buffers) {
    if (buffer.type == nullptr) {
      return refuse_hccl(HCCL_E_NOT_SUPPORT, std::string(call.api) + ": unknown data type");
    }
    if (buffer.address == nullptr && buffer.count > 0) {
      return refuse_hccl(HCCL_E_PTR, std::string(call.api) + ": a buffer is null");
    }
  }
  return HCCL_SUCCESS;
}

void trace(const Call& call, const Communicator& comm) {
  std::vector<Argument> arguments = {describe(comm.name.c_str())};
  for (const Buffer& buffer : call.buffers) {
    arguments.push_back(describe(static_cast<int64_t>(buffer.count)));
    arguments.push_back(describe(buffer.type->name));
  }
  arguments.insert(arguments.end(), call.trace.begin(), call.trace.end());
  trace_launch(call.api, arguments, call.stream);
}

// All sends first, so that the two directions of a batch do not wait for each other.
void transfer(const Communicator& comm, const std::vector<Message>& batch) {
  for (const Message& message : batch) {
    if (message.send) {
      const Buffer& from = message.buffer;
      comm.send(message.box, message.peer, message.label(), from.view(), from.bytes());
    }
  }
  for (const Message& message : batch) {
    if (!message.send) {
      message.buffer.write(comm.receive(message.box, message.peer, message.label(), message.buffer.bytes()));
    }
  }
  for (const Message& message : batch) {
    if (message.send) {
      comm.wait_taken(message.box, message.peer, message.label());
    }
  }
}

} // namespace

std::shared_ptr<Communicator> communicator(HcclComm handle) {
  std::unique_lock lock(communicators().mutex);
  const auto found = communicators().live.find(handle);
  if (found == communicators().live.end()) {
    die("HCCL: a communicator is used that does not exist");
  }
  return found->second;
}

void add_communicator(std::shared_ptr<Communicator> made) {
  std::unique_lock lock(communicators().mutex);
  const HcclComm handle = made.get();
  communicators().live[handle] = std::move(made);
}

// Work that a stream has not come to yet keeps it alive.
void remove_communicator(HcclComm handle) {
  const auto last = communicator(handle);
  std::unique_lock lock(communicators().mutex);
  communicators().live.erase(handle);
}

std::shared_ptr<Communicator> find_communicator(const std::string& name) {
  std::unique_lock lock(communicators().mutex);
  for (const auto& [handle, live] : communicators().live) {
    if (live->name == name) {
      return live;
    }
  }
  return nullptr;
}

HcclResult refuse_hccl(HcclResult code, const std::string& message) {
  refuse(code, "HCCL: " + message);
  return code;
}

HcclResult launch(const Call& call, std::function<void(const Collective&)> run) {
  const auto comm = communicator(call.handle);
  if (const HcclResult wrong = check(call, *comm)) {
    return wrong;
  }
  trace(call, *comm);
  const std::string what = call.api + (call.details.empty() ? "" : " " + call.details);
  submit(call.stream, [run = std::move(run), collective = Collective{comm, comm->next_collective(), what}] {
    run(collective);
  });
  return HCCL_SUCCESS;
}

HcclResult launch_reduction(Call call, HcclReduceOp op, std::function<void(const Collective&, const Type&)> run) {
  const Type* type = call.buffers[0].type;
  if (name_of(op) == nullptr || type == nullptr || type->acl == ACL_DT_UNDEFINED) {
    return refuse_hccl(HCCL_E_NOT_SUPPORT, std::string(call.api) + ": reduction or data type not supported");
  }
  call.details += name_of(op);
  call.trace.push_back(describe(name_of(op)));
  return launch(call, [type, run = std::move(run)](const Collective& all) { run(all, *type); });
}

HcclResult launch_rooted(Call call, uint32_t root, std::function<void(const Collective&)> run) {
  if (root >= static_cast<uint32_t>(communicator(call.handle)->size)) {
    return refuse_hccl(HCCL_E_PARA, std::string(call.api) + ": there is no such root");
  }
  call.details = "root " + std::to_string(root);
  call.trace.push_back(describe(static_cast<int64_t>(root)));
  return launch(call, std::move(run));
}

HcclResult launch_batch(const Call& call, std::vector<Message> batch) {
  const auto comm = communicator(call.handle);
  if (const HcclResult wrong = check(call, *comm)) {
    return wrong;
  }
  for (Message& message : batch) {
    if (message.peer < 0 || message.peer >= comm->size) {
      return refuse_hccl(HCCL_E_PARA, std::string(call.api) + ": there is no such rank");
    }
    message.box = message.send ? comm->next_send(message.peer) : comm->next_receive(message.peer);
  }
  trace(call, *comm);
  submit(call.stream, [comm, batch = std::move(batch)] { transfer(*comm, batch); });
  return HCCL_SUCCESS;
}

HcclResult launch_message(Call call, bool send, uint32_t peer) {
  if (static_cast<int>(peer) == communicator(call.handle)->rank) {
    return refuse_hccl(HCCL_E_PARA, std::string(call.api) + ": a rank sends nothing to itself");
  }
  call.trace.push_back(describe(static_cast<int64_t>(peer)));
  const Buffer& buffer = call.buffers[0];
  return launch_batch(call, {{send, static_cast<int>(peer), buffer, ""}});
}

} // namespace standin
