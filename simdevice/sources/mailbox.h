// Messages between ranks that are processes of one host. They lie in memory files without a name (memfd), which a reader
// opens through /proc/<pid>/fd. So nothing is left behind, however a process ends.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace sim {

using Deadline = std::chrono::steady_clock::time_point;

struct Part {  // some bytes of a message
  const void* at;
  size_t bytes;
};

struct Slot;  // where a rank announces a message

// A message that is mapped for reading: a line of text, and bytes.
class Message {
 public:
  Message(int fd, size_t text_bytes, size_t data_bytes, Slot* read_from);
  ~Message();
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  std::string text() const;
  char* data() const;  // 64-byte aligned
  size_t data_bytes() const { return data_bytes_; }

 private:
  char* map_;
  size_t text_bytes_, data_bytes_;
  Slot* read_from_;  // counts its readers; null for the sender itself
};
using MessagePtr = std::unique_ptr<Message>;

// One group's messages. Every message has a channel and a number there, so messages of different streams are never
// confused, in whatever order the streams come to them.
//
//   channel 0        to all ranks of the group
//   channel 1 + r    to rank r alone
class Mailbox {
 public:
  Mailbox(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::shared_ptr<const std::atomic<bool>> is_aborted);
  ~Mailbox();
  // Announces a message that `num_readers` ranks will read. Returns it, for this rank's own use.
  MessagePtr send(
      int channel, uint64_t number, const std::string& text, const std::vector<Part>& parts, int num_readers, Deadline);
  // Returns the message of `rank`, or null if none has come in time, or before the group was aborted.
  MessagePtr receive(int rank, int channel, uint64_t number, Deadline);

 private:
  struct Peer {
    std::mutex mutex;
    int pid = 0;
    Slot* slots = nullptr;
  };
  Slot& slot_of(Slot* slots, int channel, uint64_t number) const;
  bool meet(int rank, Deadline);
  size_t region_bytes() const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  std::shared_ptr<const std::atomic<bool>> is_aborted_;
  Slot* own_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace sim
