#include "mailbox.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <thread>

namespace sim {

constexpr uint64_t SLOTS = 256;  // messages of one channel that may be unread at a time
constexpr size_t BOARD_BYTES = size_t(1) << 32;  // addresses only: pages that nobody writes take no memory
constexpr size_t PAGE = 4096;

struct alignas(64) Slot {
  std::atomic<uint32_t> number;   // of the message, plus 1; readers sleep on it
  std::atomic<uint32_t> readers;  // who have yet to read it
  int32_t fd;
  uint64_t text_bytes, data_bytes;
};

namespace {

size_t rounded(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

size_t size_of(size_t text_bytes, size_t data_bytes) {
  return rounded(text_bytes, 64) + data_bytes;
}

int new_memory(size_t bytes) {
  int fd = memfd_create("simccl", MFD_CLOEXEC);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, bytes) == 0, "simccl: no memory file of ", bytes, " bytes: ", strerror(errno));
  return fd;
}

char* mapped(int fd, size_t bytes, off_t offset = 0) {
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, offset);
  TORCH_CHECK(map != MAP_FAILED, "simccl: cannot map ", bytes, " bytes: ", strerror(errno));
  return static_cast<char*>(map);
}

int opened(int pid, int fd) {
  auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  int found = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(found >= 0, "simccl: cannot open ", path, " (has that rank ended?): ", strerror(errno));
  return found;
}

// Sleeps for a moment while `word` is `seen`, until the deadline at most. Returns false once that has passed.
bool sleep_on(std::atomic<uint32_t>& word, uint32_t seen, Deadline deadline) {
  auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now()).count();
  if (left <= 0) return false;
  left = std::min<decltype(left)>(left, 20'000'000);  // whether the group was aborted is looked at that often
  timespec patience{left / 1000000000, left % 1000000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &patience, nullptr, 0);
  return true;
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// This process's slots, of all groups, and the messages it has sent that somebody has yet to read. Lives as long as the
// process: a peer may read the last message of a group that was destroyed here already.
class Board {
 public:
  int fd = new_memory(BOARD_BYTES);
  char* map = mapped(fd, BOARD_BYTES);

  size_t take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto start = end_;
    end_ += rounded(bytes, PAGE);
    TORCH_CHECK(end_ <= BOARD_BYTES, "simccl: too many groups were made in one process");
    return start;
  }

  void sent(Slot* slot, int message) {
    std::lock_guard<std::mutex> lock(mutex_);
    unread_.emplace_back(slot, message);
  }

  void close_what_is_read() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(unread_, [](auto& each) {
      bool is_read = each.first->readers.load() == 0;
      if (is_read) close(each.second);
      return is_read;
    });
  }

 private:
  std::mutex mutex_;
  size_t end_ = 0;
  std::vector<std::pair<Slot*, int>> unread_;
};

Board& board() {
  static auto& only = *new Board;
  return only;
}

}  // namespace

// ---- Message

Message::Message(int fd, size_t text_bytes, size_t data_bytes, Slot* read_from)
    : map_(mapped(fd, size_of(text_bytes, data_bytes))),
      text_bytes_(text_bytes),
      data_bytes_(data_bytes),
      read_from_(read_from) {}

Message::~Message() {
  munmap(map_, size_of(text_bytes_, data_bytes_));
  if (read_from_) read_from_->readers.fetch_sub(1);
}

std::string Message::text() const {
  return std::string(map_, text_bytes_);
}

char* Message::data() const {
  return map_ + rounded(text_bytes_, 64);
}

// ---- Mailbox

Mailbox::Mailbox(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::shared_ptr<const std::atomic<bool>> is_aborted)
    : store_(std::move(store)), rank_(rank), size_(size), is_aborted_(std::move(is_aborted)) {
  auto start = board().take(region_bytes());
  own_ = reinterpret_cast<Slot*>(board().map + start);
  for (int each = 0; each < size; each++) peers_.push_back(std::make_unique<Peer>());
  std::ostringstream where;
  where << getpid() << ' ' << board().fd << ' ' << start;
  store_->set("simccl/" + std::to_string(rank), where.str());
}

Mailbox::~Mailbox() {
  for (auto& peer : peers_) {
    if (peer->slots) munmap(peer->slots, region_bytes());
  }
}

size_t Mailbox::region_bytes() const {
  return rounded((1 + size_) * SLOTS * sizeof(Slot), PAGE);
}

Slot& Mailbox::slot_of(Slot* slots, int channel, uint64_t number) const {
  return slots[channel * SLOTS + number % SLOTS];
}

MessagePtr Mailbox::send(
    int channel, uint64_t number, const std::string& text, const std::vector<Part>& parts, int num_readers,
    Deadline deadline) {
  board().close_what_is_read();
  size_t bytes = 0;
  for (auto& part : parts) bytes += part.bytes;
  int fd = new_memory(size_of(text.size(), bytes));
  auto message = std::make_unique<Message>(fd, text.size(), bytes, nullptr);
  std::memcpy(message->data() - rounded(text.size(), 64), text.data(), text.size());
  auto to = message->data();
  for (auto& part : parts) {
    if (part.bytes) std::memcpy(to, part.at, part.bytes);
    to += part.bytes;
  }
  if (num_readers == 0) {
    close(fd);
    return message;
  }
  auto& slot = slot_of(own_, channel, number);
  while (slot.readers.load() != 0) {
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "simccl: ", SLOTS, " messages were sent that nobody reads");
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  slot.fd = fd;
  slot.text_bytes = text.size();
  slot.data_bytes = bytes;
  slot.readers.store(num_readers);
  slot.number.store(uint32_t(number + 1));
  wake_all(slot.number);
  board().sent(&slot, fd);
  return message;
}

// The store is asked and not waited for: a wait would hold its connection, which the rank's other threads use as well.
bool Mailbox::meet(int rank, Deadline deadline) {
  auto& peer = *peers_.at(rank);
  std::lock_guard<std::mutex> lock(peer.mutex);
  if (peer.slots) return true;
  auto key = "simccl/" + std::to_string(rank);
  while (!store_->check({key})) {
    if (*is_aborted_ || std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::istringstream where(store_->get_to_str(key));
  int board_fd = 0;
  size_t start = 0;
  where >> peer.pid >> board_fd >> start;
  int fd = opened(peer.pid, board_fd);
  peer.slots = reinterpret_cast<Slot*>(mapped(fd, region_bytes(), start));
  close(fd);
  return true;
}

MessagePtr Mailbox::receive(int rank, int channel, uint64_t number, Deadline deadline) {
  if (!meet(rank, deadline)) return nullptr;
  auto& peer = *peers_.at(rank);
  auto& slot = slot_of(peer.slots, channel, number);
  auto wanted = uint32_t(number + 1);
  for (auto seen = slot.number.load(); seen != wanted; seen = slot.number.load()) {
    if (*is_aborted_ || !sleep_on(slot.number, seen, deadline)) return nullptr;
  }
  int fd = opened(peer.pid, slot.fd);
  auto message = std::make_unique<Message>(fd, slot.text_bytes, slot.data_bytes, &slot);
  close(fd);
  return message;
}

}  // namespace sim
