// The process group backend "simccl": collectives that are ordered as NCCL's are.
//
// With async_op a collective runs on the group's own stream, behind the current one, and `wait()` makes the current stream
// wait for it. Without, it runs on the current stream. Sends and receives always run on a stream of their own: that of
// the pair of ranks, or the group's if they are coalesced. The host waits for a barrier and for nothing else.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <map>

#include "device.h"
#include "mailbox.h"

namespace sim {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Messages = std::vector<MessagePtr>;  // by rank of the group

/// What one rank asks for: what it sends, what it says of it, and what it does with what the others have sent.
struct Call {
  std::string name;
  std::string text;                            // the same on all ranks, or they disagree
  Tensors sent;                                // on the host, 1-D
  std::function<void(const Messages&)> take;   // on the stream's worker
  std::function<void()> imagine;               // instead, where the other ranks have what this one has
  int to = -1, from = -1;                      // the peer of a send or of a receive
  uint64_t number = 0;                         // among the calls of its channel
  Accesses accesses;
  Tensors held, results;                       // tensors of the user

  explicit Call(std::string name) : name(std::move(name)) {}
  bool is_for_all() const { return to < 0 && from < 0; }
  /// Notes the access, and returns the tensor's memory on the host, 1-D.
  at::Tensor reads(const at::Tensor& tensor);
  at::Tensor writes(const at::Tensor& tensor);
  void sends(const at::Tensor& tensor) { sent.push_back(reads(tensor)); }
};

class CollectiveOptions : public c10d::Backend::Options {
 public:
  explicit CollectiveOptions(std::chrono::milliseconds timeout) : Options("simccl", timeout) {}
  /// Names a rank of the group by its number in the default group.
  std::string name_of(int rank) const;
};
using OptionsPtr = c10::intrusive_ptr<CollectiveOptions>;

/// One group's calls: takes their numbers, and carries them out on workers. It outlives the group while any is queued.
class Exchange {
 public:
  Exchange(c10::intrusive_ptr<c10d::Store> store, int rank, int size, OptionsPtr options);
  void number(Call& call);
  /// Sends all that is sent first, so that calls of one batch do not wait for one another.
  void carry_out(const std::vector<Call>& calls);
  /// Ends the calls that are waiting and all later ones, as NCCL's do: with results that are none, and without an error.
  void abort() { *is_aborted_ = true; }

 private:
  Messages receive(const Call& call, MessagePtr own, Deadline deadline);
  MessagePtr send(const Call& call, Deadline deadline);
  void check_agreement(const Call& call, const Messages& messages) const;
  std::string described(const Call& call) const;

  int rank_, size_;
  OptionsPtr options_;
  std::shared_ptr<std::atomic<bool>> is_aborted_ = std::make_shared<std::atomic<bool>>(false);
  Mailbox mailbox_;
  uint64_t next_ = 0;
  std::vector<uint64_t> next_to_, next_from_;
};

/// Tensors of calls that nobody waited for. They stay until the group goes: were they freed, they would be handed out again
/// under the collective.
struct Shelf {
  std::mutex mutex;
  std::vector<Tensors> held;
};

class Collectives : public c10d::Backend {
 public:
  /// Of ranks that are imagined only this one is there, and nothing is sent or received. What is gathered is this rank's
  /// own, once for each rank; the results of other collectives are what they were.
  Collectives(c10::intrusive_ptr<c10d::Store> store, int rank, int size, OptionsPtr options, bool imagined = false);

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  OptionsPtr options() const { return options_; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void abort() override {
    if (exchange_) exchange_->abort();
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_calls_; }
  void eagerConnectSingleDevice(at::Device) override {}
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks, const c10::intrusive_ptr<Options>&) override;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&, const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;
  WorkPtr send(Tensors&, int to, int tag) override;
  WorkPtr recv(Tensors&, int from, int tag) override;

 private:
  WorkPtr reduce_whole(const char* name, const Tensors&, const c10d::ReduceOp&, int root, bool is_async);
  WorkPtr launch(Call call, bool is_async);
  WorkPtr queue(std::vector<Call> calls, int device, c10::Stream stream, bool is_async);
  c10::Stream own_stream(int device, int peer = -1);
  Cost cost_of(const std::vector<Call>& calls) const;

  OptionsPtr options_;
  std::shared_ptr<Exchange> exchange_;  // null: the other ranks are imagined
  std::shared_ptr<Shelf> shelf_;
  std::map<std::pair<int, int>, c10::Stream> streams_;  // by device, and peer or -1
  std::vector<Call> coalesced_;
  bool is_coalescing_ = false, coalesces_async_ = false;
  uint64_t num_calls_ = 0;
  int communicator_;
};

}  // namespace sim
