#include "collectives.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

namespace sim {
namespace {

class CollectiveWork : public c10d::Work {
 public:
  CollectiveWork(int device, c10::Stream stream, Tensors held, Tensors results, std::shared_ptr<Shelf> shelf)
      : device_(device),
        event_(record(stream)),
        held_(std::move(held)),
        results_(std::move(results)),
        shelf_(std::move(shelf)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    auto before = exchange_stream(stream);  // the future records its events on the current stream
    future_->markCompleted(at::IValue(results_));
    exchange_stream(before);
  }

  ~CollectiveWork() override {
    if (held_.empty()) return;
    std::lock_guard<std::mutex> lock(shelf_->mutex);
    shelf_->held.push_back(std::move(held_));
  }

  bool isCompleted() override { return query(event_); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void be_a_barrier() { is_barrier_ = true; }
  void synchronize() override { wait(kNoTimeout); }

  // As with NCCL, the host waits for a barrier, and where it is told for how long.
  bool wait(std::chrono::milliseconds timeout) override {
    stream_wait(current_stream(device_), event_);
    bool is_timed = timeout != kNoTimeout && timeout != c10d::kUnsetTimeout;
    if (is_barrier_ || is_timed) {
      count_host_wait(is_barrier_ ? "barrier" : "work.wait with a timeout");
      host_wait(event_);
      raise_failure();
    }
    held_.clear();  // what is freed from here on is freed behind the collective, as far as this stream is concerned
    return true;
  }

 private:
  int device_;
  bool is_barrier_ = false;
  EventPtr event_;
  Tensors held_, results_;
  std::shared_ptr<Shelf> shelf_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

Collectives::Collectives(c10::intrusive_ptr<c10d::Store> store, int rank, int size, OptionsPtr options, bool imagined)
    : Backend(rank, size),
      options_(options),
      exchange_(imagined ? nullptr : std::make_shared<Exchange>(std::move(store), rank, size, options)),
      shelf_(std::make_shared<Shelf>()) {
  HostLock lock(host_mutex());
  communicator_ = new_communicator();
}

c10::intrusive_ptr<c10d::Backend> Collectives::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& given) {
  auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) return nullptr;
  auto options = c10::make_intrusive<CollectiveOptions>(given ? given->timeout : options_->timeout);
  if (given) options->group_name = given->group_name;
  auto& global = options_->global_ranks_in_group;
  for (auto rank : ranks) options->global_ranks_in_group.push_back(global.empty() ? rank : global.at(rank));
  return c10::make_intrusive<Collectives>(store, int(place - ranks.begin()), int(ranks.size()), options, !exchange_);
}

c10::Stream Collectives::own_stream(int device, int peer) {
  auto found = streams_.find({device, peer});
  if (found != streams_.end()) return found->second;
  return streams_.emplace(std::make_pair(device, peer), new_stream(device, -1)).first->second;
}

WorkPtr Collectives::launch(Call call, bool is_async) {
  int device = call.held.empty() ? current_device() : call.held[0].device().index();
  is_async |= !call.is_for_all();
  auto here = current_stream(device);
  auto stream = is_async ? own_stream(device, is_coalescing_ ? -1 : std::max(call.to, call.from)) : here;
  if (is_async) stream_wait(stream, record(here));
  if (exchange_) exchange_->number(call);
  num_calls_++;
  std::vector<Call> calls;
  calls.push_back(std::move(call));
  if (!is_coalescing_) return queue(std::move(calls), device, stream, is_async);
  coalesced_.push_back(std::move(calls[0]));
  coalesces_async_ |= is_async;
  return nullptr;
}

WorkPtr Collectives::queue(std::vector<Call> calls, int device, c10::Stream stream, bool is_async) {
  Accesses accesses;
  Tensors held, results;
  for (auto& call : calls) {  // a worker gets no tensor of the user
    accesses.insert(accesses.end(), call.accesses.begin(), call.accesses.end());
    held.insert(held.end(), call.held.begin(), call.held.end());
    results.insert(results.end(), call.results.begin(), call.results.end());
    call.held.clear();
    call.results.clear();
  }
  auto name = calls[0].name;
  auto shared = std::make_shared<const std::vector<Call>>(std::move(calls));
  const bool keeps = !exchange_ && std::all_of(held.begin(), held.end(), is_kept);
  enqueue_copy(stream, name, accesses, cost_of(*shared), keeps, [exchange = exchange_, shared] {
    if (exchange) return exchange->carry_out(*shared);
    for (auto& call : *shared) {
      if (call.imagine) call.imagine();
    }
  });
  if (!is_async) return nullptr;
  return c10::make_intrusive<CollectiveWork>(device, stream, std::move(held), std::move(results), shelf_);
}

Cost Collectives::cost_of(const std::vector<Call>& calls) const {
  double read = 0, written = 0;
  for (auto& call : calls) {
    for (auto& access : call.accesses) (access.write ? written : read) += access.bytes;
  }
  // The ranks that share a node with this one, or of a message, whether both do.
  auto node = [&](int rank) {
    auto& global = options_->global_ranks_in_group;
    return int(global.empty() ? rank : global.at(rank)) / std::max(1, machine().ranks_per_node);
  };
  int peer = std::max(calls[0].to, calls[0].from), size = peer < 0 ? size_ : 2, per_node = 0;
  if (peer >= 0) {
    per_node = node(peer) == node(rank_) ? 2 : 1;
  } else {
    for (int rank = 0; rank < size_; rank++) per_node += node(rank) == node(rank_);
  }
  // A communicator runs one collective at a time; messages have one for each pair of ranks, as their streams.
  return collective_cost(calls[0].name, std::max(read, written), size, per_node, peer < 0 ? communicator_ : -1);
}

void Collectives::startCoalescing() {
  is_coalescing_ = true;
  coalesces_async_ = false;
}

WorkPtr Collectives::endCoalescing() {
  is_coalescing_ = false;
  auto calls = std::exchange(coalesced_, {});
  if (calls.empty()) return nullptr;
  int device = calls[0].held.empty() ? current_device() : calls[0].held[0].device().index();
  auto stream = coalesces_async_ ? own_stream(device) : current_stream(device);
  return queue(std::move(calls), device, stream, coalesces_async_);
}

WorkPtr Collectives::barrier(const c10d::BarrierOptions& options) {
  Call call("barrier");
  call.text = "barrier";
  auto work = launch(std::move(call), options.asyncOp);
  if (work) {
    static_cast<CollectiveWork*>(work.get())->be_a_barrier();
  } else if (!is_coalescing_) {
    synchronize_stream(current_stream(), "barrier");
  }
  return work;
}

void bind_collectives(pybind11::module& module) {
  namespace py = pybind11;
  py::class_<CollectiveOptions, OptionsPtr, c10d::Backend::Options>(module, "CollectiveOptions")
      .def("__deepcopy__", [](const CollectiveOptions& self, py::dict) {
        return c10::make_intrusive<CollectiveOptions>(self);
      });
  py::class_<Collectives, c10::intrusive_ptr<Collectives>, c10d::Backend>(module, "Collectives")
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout,
                       const std::string& name, const std::vector<uint64_t>& global_ranks, bool imagined) {
        auto options = c10::make_intrusive<CollectiveOptions>(timeout);
        options->group_name = name;
        options->global_ranks_in_group = global_ranks;
        return c10::make_intrusive<Collectives>(std::move(store), rank, size, std::move(options), imagined);
      }))
      .def_property_readonly("options", &Collectives::options)
      // What a rank calls that is in no part of a split: NCCL needs all ranks there, we do not.
      .def("perform_nocolor_split", [](Collectives&, const py::object&) {});
}

}  // namespace sim
