// Streams and events. With CANN_STANDIN_ASYNC=1 a stream is a queue of tasks and a thread that works it off, so that
// what is not ordered by the stream or by an event really is not ordered; "delay" makes that visible by sleeping up to
// 2 ms before tasks. With 0, the default, tasks run on the thread that submits them.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>

#include "runtime.h"

namespace standin {
namespace {

using Clock = std::chrono::steady_clock;
constexpr aclError kBadStream = 107003; // ACL_ERROR_RT_STREAM_CONTEXT
constexpr aclError kNotReady = 107021;  // ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID
constexpr aclError kTimeout = 107019;   // ACL_ERROR_RT_STREAM_SYNC_TIMEOUT

enum class Mode { Inline, Threads, Delays };

Mode mode() {
  static const std::string value = setting("CANN_STANDIN_ASYNC", "0");
  if (value != "0" && value != "1" && value != "delay") {
    die("CANN_STANDIN_ASYNC is " + value + ", not 0, 1 or delay");
  }
  return value == "0" ? Mode::Inline : value == "1" ? Mode::Threads : Mode::Delays;
}

class Stream {
 public:
  Stream(int id, int device) : id(id), device(device) {
    if (mode() != Mode::Inline) {
      thread_ = std::thread([this] { work(); });
    }
  }

  // Waits for the tasks, then ends the thread.
  ~Stream() {
    {
      std::unique_lock lock(mutex_);
      stop_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  void submit(std::function<void()> task) {
    if (mode() == Mode::Inline) {
      std::unique_lock lock(mutex_);
      task();
      return;
    }
    std::unique_lock lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  bool idle() {
    std::unique_lock lock(mutex_);
    return tasks_.empty();
  }

  // False if tasks are left after so many milliseconds; negative waits without limit.
  bool synchronize(int milliseconds) {
    std::unique_lock lock(mutex_);
    const auto empty = [this] { return tasks_.empty(); };
    if (milliseconds >= 0) {
      return changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), empty);
    }
    changed_.wait(lock, empty);
    return true;
  }

  const int id;
  const int device;

 private:
  void work() {
    std::minstd_rand random(static_cast<uint32_t>(id) + 1);
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) {
        return;
      }
      run_front(lock, random);
    }
  }

  // The task stays at the front while it runs: an empty queue means that all work is done.
  void run_front(std::unique_lock<std::mutex>& lock, std::minstd_rand& random) {
    const std::function<void()> task = std::move(tasks_.front());
    lock.unlock();
    if (mode() == Mode::Delays) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    }
    task();
    lock.lock();
    tasks_.pop_front();
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
  bool stop_ = false;
};

// An event counts how often it was recorded, by callers and by streams: who waits, waits for the recording that was the
// last one when the wait was submitted.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t submitted = 0;
  int64_t completed = 0;
  Clock::time_point time;

  bool done() {
    std::unique_lock lock(mutex);
    return submitted > 0 && completed == submitted;
  }
  bool wait(int64_t recording, int milliseconds) {
    std::unique_lock lock(mutex);
    const auto reached = [&] { return completed >= recording; };
    if (milliseconds >= 0) {
      return changed.wait_for(lock, std::chrono::milliseconds(milliseconds), reached);
    }
    changed.wait(lock, reached);
    return true;
  }
  void complete(int64_t recording) {
    std::unique_lock lock(mutex);
    completed = recording;
    time = Clock::now();
    changed.notify_all();
  }
};

// Live objects by handle. Never destroyed: threads outlive the destructors of globals.
struct Registry {
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<Stream>> streams;
  std::unordered_map<void*, std::shared_ptr<Event>> events;
  std::shared_ptr<Stream> default_streams[kDevices];
  int next_id = 0;
};

Registry& registry() {
  static auto* registry = new Registry;
  return *registry;
}

std::shared_ptr<Stream> default_stream(Registry& all) {
  auto& stream = all.default_streams[current_device()];
  if (stream == nullptr) {
    stream = std::make_shared<Stream>(all.next_id++, current_device());
  }
  return stream;
}

std::shared_ptr<Stream> find_stream(aclrtStream handle) {
  Registry& all = registry();
  std::unique_lock lock(all.mutex);
  if (handle == nullptr) {
    return default_stream(all);
  }
  const auto found = all.streams.find(handle);
  if (found == all.streams.end()) {
    die("a stream is used that does not exist");
  }
  return found->second;
}

std::shared_ptr<Event> find_event(aclrtEvent handle) {
  Registry& all = registry();
  std::unique_lock lock(all.mutex);
  const auto found = all.events.find(handle);
  if (found == all.events.end()) {
    die("an event is used that does not exist");
  }
  return found->second;
}

int64_t last_recording(Event& event) {
  std::unique_lock lock(event.mutex);
  return event.submitted;
}

} // namespace

void submit(aclrtStream stream, std::function<void()> task) {
  find_stream(stream)->submit(std::move(task));
}

int stream_id(aclrtStream stream) {
  return find_stream(stream)->id;
}

int stream_device(aclrtStream stream) {
  return find_stream(stream)->device;
}

void synchronize_device(int device) {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::unique_lock lock(registry().mutex);
    for (const auto& [handle, stream] : registry().streams) {
      streams.push_back(stream);
    }
    streams.insert(streams.end(), std::begin(registry().default_streams), std::end(registry().default_streams));
  }
  for (const auto& stream : streams) {
    if (stream != nullptr && stream->device == device) {
      stream->synchronize(-1);
    }
  }
}

int64_t live_streams() {
  std::unique_lock lock(registry().mutex);
  return static_cast<int64_t>(registry().streams.size());
}

int64_t live_events() {
  std::unique_lock lock(registry().mutex);
  return static_cast<int64_t>(registry().events.size());
}

} // namespace standin

using namespace standin;

aclError aclrtCreateStream(aclrtStream* stream) {
  std::unique_lock lock(registry().mutex);
  auto created = std::make_shared<Stream>(registry().next_id++, current_device());
  *stream = created.get();
  registry().streams[*stream] = std::move(created);
  return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return aclrtCreateStream(stream);
}

aclError aclrtDestroyStream(aclrtStream stream) {
  const auto last = find_stream(stream); // ends its thread outside the lock
  std::unique_lock lock(registry().mutex);
  if (registry().streams.erase(stream) == 0) {
    return refuse(kBadStream, "aclrtDestroyStream: the default stream cannot be destroyed");
  }
  return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return aclrtDestroyStream(stream);
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  find_stream(stream)->synchronize(-1);
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds) {
  const bool done = find_stream(stream)->synchronize(milliseconds);
  return done ? ACL_SUCCESS : refuse(kTimeout, "aclrtSynchronizeStreamWithTimeout: time is up");
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  *status = find_stream(stream)->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream_id(stream);
  return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  auto created = std::make_shared<Event>();
  *event = created.get();
  std::unique_lock lock(registry().mutex);
  registry().events[*event] = std::move(created);
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}

aclError aclrtDestroyEvent(aclrtEvent event) {
  const auto last = find_event(event);
  std::unique_lock lock(registry().mutex);
  registry().events.erase(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  const auto found = find_event(event);
  int64_t recording;
  {
    std::unique_lock lock(found->mutex);
    recording = ++found->submitted;
  }
  submit(stream, [found, recording] { found->complete(recording); });
  return ACL_SUCCESS;
}

// Events of this stand-in need no reset between recordings.
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  find_event(event);
  find_stream(stream);
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  const auto found = find_event(event);
  const int64_t recording = last_recording(*found);
  if (recording == 0) {
    die("a stream waits for an event that was never recorded");
  }
  submit(stream, [found, recording] { found->wait(recording, -1); });
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  const auto found = find_event(event);
  found->wait(last_recording(*found), -1);
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t milliseconds) {
  const auto found = find_event(event);
  const bool done = found->wait(last_recording(*found), milliseconds);
  return done ? ACL_SUCCESS : refuse(kTimeout, "aclrtSynchronizeEventWithTimeout: time is up");
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  *status = find_event(event)->done() ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

// Waits are tasks of their streams, of which an event keeps no list: all are done once the event is.
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  *status = find_event(event)->done() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const auto first = find_event(start);
  const auto second = find_event(end);
  if (!first->done() || !second->done()) {
    return refuse(kNotReady, "aclrtEventElapsedTime: an event is not complete");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(second->time - first->time).count();
  return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  const auto found = find_event(event);
  if (!found->done()) {
    return refuse(kNotReady, "aclrtEventGetTimestamp: the event is not complete");
  }
  const auto since = found->time.time_since_epoch();
  *microseconds = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(since).count());
  return ACL_SUCCESS;
}
