// libhccl.so: what torch_npu's process group calls. Everything runs in the order of its stream.
//
// Strict where real devices would hang: the n-th collective of a communicator must be the same one on every rank, with
// the same counts, types and reduction; a send waits until it is received. The host's order counts, so with
// CANN_STANDIN_ASYNC=0, where a collective runs inside of its call, all ranks must call those of several communicators
// in one order. Functions that torch_npu can do without (AllGatherV, cluster information, ...) are not there.
#include "hccl_calls.h"

using namespace standin;

namespace {

HcclResult make_communicator(
    uint32_t size, const HcclRootInfo* root, uint32_t rank, const char* name, HcclComm* handle) {
  if (root == nullptr || handle == nullptr) {
    return refuse_hccl(HCCL_E_PTR, "the root information or the communicator is null");
  }
  if (size == 0 || rank >= size) {
    return refuse_hccl(HCCL_E_PARA, "there is no rank " + std::to_string(rank));
  }
  const std::string id(root->internal, strnlen(root->internal, sizeof root->internal));
  const std::string shown = name != nullptr && *name != '\0' ? name : "standin_" + id;
  if (find_communicator(shown) != nullptr) {
    return refuse_hccl(HCCL_E_PARA, "there is a communicator of the name " + shown + " already");
  }
  std::string error;
  auto made = Communicator::join(id, static_cast<int>(rank), static_cast<int>(size), shown, error);
  if (made == nullptr) {
    return refuse_hccl(HCCL_E_TIMEOUT, shown + " is not made: " + error);
  }
  *handle = made.get();
  add_communicator(std::move(made));
  return HCCL_SUCCESS;
}

// What AlltoAllV is told about one side, copied at the call.
struct Splits {
  aclIntArray counts;
  aclIntArray offsets;

  Splits(const void* counts, const void* offsets, int size)
      : counts(copy(counts, size)), offsets(copy(offsets, size)) {}
  static aclIntArray copy(const void* values, int size) {
    const auto* from = static_cast<const uint64_t*>(values);
    return {{from, from + size}};
  }
  Buffer part(const Buffer& whole, int rank) const {
    return whole.part(static_cast<uint64_t>(offsets.values[rank]), static_cast<uint64_t>(counts.values[rank]));
  }
};

} // namespace

// ---- communicators -----------------------------------------------------------------------------------------------
HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  *root = {};
  std::strcpy(root->internal, Communicator::create_id().c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) {
  return make_communicator(size, root, rank, nullptr, comm);
}

HcclResult HcclCommInitRootInfoConfig(
    uint32_t size, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig* config, HcclComm* comm) {
  return make_communicator(size, root, rank, config == nullptr ? nullptr : config->hcclCommName, comm);
}

HcclResult HcclCommDestroy(HcclComm comm) {
  remove_communicator(comm);
  return HCCL_SUCCESS;
}

// As many of HcclCommConfig's fields as can be set: up to the names, and what changes nothing here.
uint32_t HcclGetCommConfigCapability() {
  return HCCL_COMM_CONFIG_WORLD_RANKID;
}

HcclResult HcclGetCommName(HcclComm comm, char* name) {
  std::strcpy(name, communicator(comm)->name.c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
  *size = static_cast<uint32_t>(communicator(comm)->size);
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = static_cast<uint32_t>(communicator(comm)->rank);
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* error) {
  communicator(comm);
  *error = HCCL_SUCCESS; // errors end the process
  return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult code) {
  return code == HCCL_SUCCESS ? "no error" : "error";
}

// ---- collectives -------------------------------------------------------------------------------------------------
HcclResult HcclAllReduce(
    void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  const Buffer from(send, count, type);
  const Buffer to(receive, count, type);
  return launch_reduction({"HcclAllReduce", comm, stream, {from, to}}, op, [=](const Collective& all, const Type& t) {
    const Part same = [&](int) { return from; };
    to.write(reduced(op, t, all.exchange(same, same)));
  });
}

HcclResult HcclReduceScatter(
    void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  const Buffer from(send, count * static_cast<uint64_t>(communicator(comm)->size), type);
  const Buffer to(receive, count, type);
  return launch_reduction(
      {"HcclReduceScatter", comm, stream, {from, to}}, op, [=](const Collective& all, const Type& t) {
        const Part sent = [&](int peer) { return from.part(static_cast<uint64_t>(peer) * count, count); };
        const Part received = [&](int) { return to; };
        to.write(reduced(op, t, all.exchange(sent, received)));
      });
}

HcclResult HcclReduce(
    void* send,
    void* receive,
    uint64_t count,
    HcclDataType type,
    HcclReduceOp op,
    uint32_t root,
    HcclComm comm,
    aclrtStream stream) {
  const Buffer from(send, count, type);
  const Buffer to(receive, count, type);
  const int target = static_cast<int>(root);
  if (target >= communicator(comm)->size) {
    return refuse_hccl(HCCL_E_PARA, "HcclReduce: there is no such root");
  }
  return launch_reduction(
      {"HcclReduce", comm, stream, {from, to}, "root " + std::to_string(root) + ", ", {describe(int64_t{root})}}, op,
      [=](const Collective& all, const Type& t) {
        if (all.rank() != target) {
          all.send(target, from);
          return;
        }
        std::vector<std::vector<char>> data;
        for (int peer = 0; peer < all.size(); ++peer) {
          data.push_back(peer == target ? from.read() : all.receive(peer, from));
        }
        to.write(reduced(op, t, data));
      });
}

HcclResult HcclBroadcast(
    void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  const Buffer data(buffer, count, type);
  const int source = static_cast<int>(root);
  return launch_rooted({"HcclBroadcast", comm, stream, {data}}, root, [=](const Collective& all) {
    if (all.rank() != source) {
      data.write(all.receive(source, data));
      return;
    }
    for (int peer = 0; peer < all.size(); ++peer) {
      if (peer != source) {
        all.send(peer, data);
      }
    }
  });
}

HcclResult HcclScatter(
    void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  const Buffer to(receive, count, type);
  const int source = static_cast<int>(root);
  return launch_rooted({"HcclScatter", comm, stream, {to}}, root, [=](const Collective& all) {
    if (all.rank() != source) {
      to.write(all.receive(source, to));
      return;
    }
    const Buffer from(send, count * static_cast<uint64_t>(all.size()), type);
    for (int peer = 0; peer < all.size(); ++peer) {
      const Buffer part = from.part(static_cast<uint64_t>(peer) * count, count);
      if (peer == source) {
        to.write(part.read());
      } else {
        all.send(peer, part);
      }
    }
  });
}

HcclResult HcclAllGather(
    void* send, void* receive, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  const Buffer from(send, count, type);
  const Buffer to(receive, count * static_cast<uint64_t>(communicator(comm)->size), type);
  return launch({"HcclAllGather", comm, stream, {from, to}}, [=](const Collective& all) {
    const Part same = [&](int) { return from; };
    const auto data = all.exchange(same, same);
    for (int peer = 0; peer < all.size(); ++peer) {
      to.part(static_cast<uint64_t>(peer) * count, count).write(data[static_cast<size_t>(peer)]);
    }
  });
}

HcclResult HcclAlltoAllV(
    const void* send,
    const void* send_counts,
    const void* send_offsets,
    HcclDataType send_type,
    const void* receive,
    const void* receive_counts,
    const void* receive_offsets,
    HcclDataType receive_type,
    HcclComm comm,
    aclrtStream stream) {
  if (send_counts == nullptr || send_offsets == nullptr || receive_counts == nullptr || receive_offsets == nullptr) {
    return refuse_hccl(HCCL_E_PTR, "HcclAlltoAllV: counts or offsets are null");
  }
  const int size = communicator(comm)->size;
  const Splits sent(send_counts, send_offsets, size);
  const Splits received(receive_counts, receive_offsets, size);
  const Buffer from(send, 0, send_type); // the counts are in the splits
  const Buffer to(receive, 0, receive_type);
  const Call call = {"HcclAlltoAllV", comm, stream,
                     {from, to},      "",   {describe(&sent.counts), describe(&received.counts)}};
  return launch(call, [=](const Collective& all) {
    const Part sent_to = [&](int peer) { return sent.part(from, peer); };
    const Part received_from = [&](int peer) { return received.part(to, peer); };
    const auto data = all.exchange(sent_to, received_from);
    for (int peer = 0; peer < all.size(); ++peer) {
      received_from(peer).write(data[static_cast<size_t>(peer)]);
    }
  });
}

HcclResult HcclAlltoAll(
    const void* send,
    uint64_t send_count,
    HcclDataType send_type,
    const void* receive,
    uint64_t receive_count,
    HcclDataType receive_type,
    HcclComm comm,
    aclrtStream stream) {
  const auto size = static_cast<uint64_t>(communicator(comm)->size);
  const Buffer from(send, send_count * size, send_type);
  const Buffer to(receive, receive_count * size, receive_type);
  return launch({"HcclAlltoAll", comm, stream, {from, to}}, [=](const Collective& all) {
    const Part sent = [&](int peer) { return from.part(static_cast<uint64_t>(peer) * send_count, send_count); };
    const Part received = [&](int peer) { return to.part(static_cast<uint64_t>(peer) * receive_count, receive_count); };
    const auto data = all.exchange(sent, received);
    for (int peer = 0; peer < all.size(); ++peer) {
      received(peer).write(data[static_cast<size_t>(peer)]);
    }
  });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return launch({"HcclBarrier", comm, stream}, [](const Collective& all) {
    const Part nothing = [](int) { return Buffer(nullptr, 0, HCCL_DATA_TYPE_INT8); };
    all.exchange(nothing, nothing);
  });
}

// ---- messages ----------------------------------------------------------------------------------------------------
HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm, aclrtStream stream) {
  return launch_message({"HcclSend", comm, stream, {Buffer(buffer, count, type)}}, true, to);
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm, aclrtStream stream) {
  return launch_message({"HcclRecv", comm, stream, {Buffer(buffer, count, type)}}, false, from);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  Call call = {"HcclBatchSendRecv", comm, stream};
  std::vector<Message> batch;
  for (const HcclSendRecvItem* item = items; item != items + count; ++item) {
    const Buffer buffer(item->buf, item->count, item->dataType);
    call.buffers.push_back(buffer);
    batch.push_back({item->sendRecvType == HCCL_SEND, static_cast<int>(item->remoteRank), buffer, ""});
  }
  return launch_batch(call, std::move(batch));
}
