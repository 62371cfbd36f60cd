// The collectives, one by one: what a rank sends, says, and does with what the others have sent.
#include <ATen/ATen.h>

#include <numeric>

#include "collectives.h"
#include "reductions.h"

namespace sim {
namespace {

using Numels = std::vector<int64_t>;

// "float32 [2, 3]": what every rank sends, or gets.
std::string described(const at::Tensor& tensor, const Numels& numels) {
  return c10::str(c10::getDtypeNames(tensor.scalar_type()).first, " [", c10::Join(", ", numels), "]");
}

std::string described(const Tensors& tensors) {
  std::string text;
  for (auto& tensor : tensors) text += (text.empty() ? "" : ", ") + described(tensor, {tensor.numel()});
  return text;
}

Numels numels_of(const Tensors& tensors) {
  Numels numels;
  for (auto& tensor : tensors) numels.push_back(tensor.numel());
  return numels;
}

int64_t sum(const Numels& numels, size_t end) {
  return std::accumulate(numels.begin(), numels.begin() + end, int64_t(0));
}

// Cuts a 1-D tensor.
Tensors cut(const at::Tensor& flat, const Numels& numels) {
  TORCH_CHECK(sum(numels, numels.size()) == flat.numel(), "simccl: a tensor of ", flat.numel(), " elements cannot be cut into ", numels);
  Tensors parts;
  int64_t start = 0;
  for (auto numel : numels) {
    parts.push_back(flat.narrow(0, start, numel));
    start += numel;
  }
  return parts;
}

void check_dtypes(const Tensors& tensors, const at::Tensor& like) {
  for (auto& tensor : tensors) {
    TORCH_CHECK(
        tensor.scalar_type() == like.scalar_type(), "simccl: tensors of one call are of ", tensor.scalar_type(), " and ",
        like.scalar_type());
  }
}

// What lies in a message from byte `start` on, as a tensor like `like`.
at::Tensor part(const Message& message, size_t start, const at::Tensor& like, int64_t numel) {
  TORCH_INTERNAL_ASSERT(start + numel * like.itemsize() <= message.data_bytes());
  return at::from_blob(message.data() + start, {numel}, like.options());
}

void copy_part(const at::Tensor& to, const Message& message, size_t start) {
  to.copy_(part(message, start, to, to.numel()));
}

// Copies this rank's own part to the places of all ranks, which are imagined. One of another size stays what it was.
void copy_to_all(const Tensors& to, const at::Tensor& own) {
  for (auto& place : to) {
    if (place.numel() == own.numel()) place.copy_(own);
  }
}

// ---- all-gather: to[i][rank] gets that rank's i-th tensor

class GatherAll {
 public:
  explicit GatherAll(const char* name) : call_(name) { call_.text = std::string(name) + " of"; }

  void add(const at::Tensor& input, const Tensors& to, int rank, size_t size) {
    TORCH_CHECK(to.size() == size, "simccl: all-gather into ", to.size(), " tensors among ", size, " ranks");
    check_dtypes(to, input);
    auto numels = numels_of(to);
    TORCH_CHECK(
        input.numel() == numels.at(rank), "simccl: rank ", rank, " gathers ", input.numel(), " elements into a place of ",
        numels.at(rank));
    call_.text += (to_.empty() ? " " : ", ") + described(input, numels);
    call_.sends(input);
    to_.push_back(to);
  }

  Call& call() { return call_; }

  Call finished() {
    call_.take = [to = to_](const Messages& messages) {
      for (size_t rank = 0; rank < messages.size(); rank++) {
        size_t start = 0;
        for (auto& row : to) {
          copy_part(row[rank], *messages[rank], start);
          start += row[rank].nbytes();
        }
      }
    };
    call_.imagine = [to = to_, own = call_.sent] {
      for (size_t i = 0; i < to.size(); i++) copy_to_all(to[i], own[i]);
    };
    return std::move(call_);
  }

 private:
  Call call_;
  std::vector<Tensors> to_;
};

// ---- reduce-scatter: to[i] gets the reduction of what every rank has for this rank in its i-th row

class ReduceParts {
 public:
  ReduceParts(const char* name, const c10d::ReduceOp& op, int rank) : call_(name), reduction_(op, call_), rank_(rank) {
    call_.text = std::string(name) + " " + reduction_.name() + " of";
  }

  Call& call() { return call_; }

  void add(const at::Tensor& output, const Numels& numels) {
    TORCH_CHECK(
        output.numel() == numels.at(rank_), "simccl: rank ", rank_, " gets ", numels.at(rank_), " elements in a place of ",
        output.numel());
    call_.text += (to_.empty() ? " " : ", ") + described(output, numels);
    starts_.push_back(row_start_ + sum(numels, rank_) * output.itemsize());
    row_start_ += sum(numels, numels.size()) * output.itemsize();
    to_.push_back(call_.writes(output));
  }

  Call finished() {
    call_.take = [to = to_, starts = starts_, reduction = reduction_](const Messages& messages) {
      for (size_t i = 0; i < to.size(); i++) {
        Tensors parts;
        for (auto& message : messages) parts.push_back(part(*message, starts[i], to[i], to[i].numel()));
        to[i].copy_(reduction.of(parts));
      }
    };
    return std::move(call_);
  }

 private:
  Call call_;
  Reduction reduction_;
  int rank_;
  Tensors to_;
  std::vector<size_t> starts_;
  size_t row_start_ = 0;
};

Numels even(const at::Tensor& tensor, int size) {
  TORCH_CHECK(tensor.numel() % size == 0, "simccl: ", tensor.numel(), " elements cannot be cut for ", size, " ranks");
  return Numels(size, tensor.numel() / size);
}

// ---- all-to-all: every rank tells how much it sends to whom, and expects of whom, before what it sends

at::Tensor counts_of(const Numels& sent, const Numels& expected) {
  Numels both = sent;
  both.insert(both.end(), expected.begin(), expected.end());
  return at::tensor(both, at::kLong);
}

void check_counts(const Messages& messages, const CollectiveOptions& options) {
  int64_t size = messages.size();
  auto counts = [&](int64_t rank) { return reinterpret_cast<int64_t*>(messages[rank]->data()); };
  for (int64_t from = 0; from < size; from++) {
    for (int64_t to = 0; to < size; to++) {
      auto sent = counts(from)[to], expected = counts(to)[size + from];
      TORCH_CHECK_WITH(
          DistBackendError, sent == expected, "simccl: the ranks disagree about an all_to_all: ", options.name_of(from),
          " sends ", sent, " elements to ", options.name_of(to), ", which expects ", expected);
    }
  }
}

Call all_to_all(const Tensors& to, const Tensors& from, Call call, int rank, OptionsPtr options) {
  call.text = c10::str("all_to_all of ", c10::getDtypeNames(to.at(0).scalar_type()).first);
  check_dtypes(to, to[0]);
  check_dtypes(from, to[0]);
  call.sent = {counts_of(numels_of(from), numels_of(to))};
  call.sent.insert(call.sent.end(), from.begin(), from.end());
  call.take = [to, rank, options](const Messages& messages) {
    check_counts(messages, *options);
    for (size_t other = 0; other < messages.size(); other++) {
      auto counts = reinterpret_cast<int64_t*>(messages[other]->data());
      auto before = std::accumulate(counts, counts + rank, int64_t(0));
      copy_part(to[other], *messages[other], 2 * messages.size() * sizeof(int64_t) + before * to[other].itemsize());
    }
  };
  return call;
}

// Rows of the first dimension per rank, in elements; all the same if `rows` is empty.
Numels split_numels(const at::Tensor& tensor, const Numels& rows, int size) {
  if (rows.empty()) return even(tensor, size);
  auto length = tensor.dim() ? tensor.size(0) : 1;
  Numels numels;
  for (auto each : rows) numels.push_back(length ? each * (tensor.numel() / length) : 0);
  return numels;
}

}  // namespace

WorkPtr Collectives::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  GatherAll all("all_gather");
  Tensors to;
  for (auto& output : outputs.at(0)) to.push_back(all.call().writes(output));
  all.add(inputs.at(0), to, rank_, size_);
  return launch(all.finished(), options.asyncOp);
}

WorkPtr Collectives::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Collectives::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  GatherAll all("all_gather");
  for (size_t i = 0; i < inputs.size(); i++) {
    auto to = all.call().writes(outputs.at(i));
    all.add(inputs[i], cut(to, even(to, size_)), rank_, size_);
  }
  return launch(all.finished(), options.asyncOp);
}

WorkPtr Collectives::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  ReduceParts parts("reduce_scatter", options.reduceOp, rank_);
  auto& row = inputs.at(0);
  TORCH_CHECK(int(row.size()) == size_, "simccl: reduce-scatter of ", row.size(), " tensors among ", size_, " ranks");
  check_dtypes(row, outputs.at(0));
  for (auto& input : row) parts.call().sends(input);
  parts.add(outputs[0], numels_of(row));
  return launch(parts.finished(), options.asyncOp);
}

WorkPtr Collectives::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Collectives::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  ReduceParts parts("reduce_scatter", options.reduceOp, rank_);
  for (size_t i = 0; i < inputs.size(); i++) {
    check_dtypes({inputs[i]}, outputs.at(i));
    parts.call().sends(inputs[i]);
    parts.add(outputs[i], even(inputs[i], size_));
  }
  return launch(parts.finished(), options.asyncOp);
}

WorkPtr Collectives::reduce_whole(
    const char* name, const Tensors& tensors, const c10d::ReduceOp& op, int root, bool is_async) {
  Call call(name);
  Reduction reduction(op, call);
  call.text = c10::str(name, " ", reduction.name(), root < 0 ? "" : " to " + options_->name_of(root), " of ", described(tensors));
  Tensors to;
  for (auto& tensor : tensors) {
    call.sends(tensor);
    if (root < 0 || root == rank_) to.push_back(call.writes(tensor));
  }
  call.take = [to, reduction](const Messages& messages) {
    size_t start = 0;
    for (auto& tensor : to) {
      Tensors parts;
      for (auto& message : messages) parts.push_back(part(*message, start, tensor, tensor.numel()));
      tensor.copy_(reduction.of(parts));
      start += tensor.nbytes();
    }
  };
  return launch(std::move(call), is_async);
}

WorkPtr Collectives::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return reduce_whole("all_reduce", tensors, options.reduceOp, -1, options.asyncOp);
}

WorkPtr Collectives::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return reduce_whole("all_reduce", tensors, options.reduceOp, -1, options.asyncOp);
}

WorkPtr Collectives::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return reduce_whole("reduce", tensors, options.reduceOp, int(options.rootRank), options.asyncOp);
}

WorkPtr Collectives::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Call call("broadcast");
  int root = options.rootRank;
  call.text = c10::str("broadcast from ", options_->name_of(root), " of ", described(tensors));
  auto& tensor = tensors.at(0);
  if (root == rank_) {
    call.sends(tensor);
  } else {
    call.take = [root, to = call.writes(tensor)](const Messages& messages) { copy_part(to, *messages[root], 0); };
  }
  return launch(std::move(call), options.asyncOp);
}

WorkPtr Collectives::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  Call call("gather");
  int root = options.rootRank;
  call.text = c10::str("gather to ", options_->name_of(root), " of ", described(inputs));
  call.sends(inputs.at(0));
  if (root == rank_) {
    auto& row = outputs.at(0);
    TORCH_CHECK(int(row.size()) == size_, "simccl: gather into ", row.size(), " tensors among ", size_, " ranks");
    check_dtypes(row, inputs[0]);
    Tensors to;
    for (auto& output : row) {
      TORCH_CHECK(output.numel() == inputs[0].numel(), "simccl: gather into tensors of several sizes");
      to.push_back(call.writes(output));
    }
    call.take = [to](const Messages& messages) {
      for (size_t rank = 0; rank < to.size(); rank++) copy_part(to[rank], *messages[rank], 0);
    };
    call.imagine = [to, own = call.sent[0]] { copy_to_all(to, own); };
  }
  return launch(std::move(call), options.asyncOp);
}

WorkPtr Collectives::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  Call call("scatter");
  int root = options.rootRank;
  call.text = c10::str("scatter from ", options_->name_of(root), " of ", described(outputs));
  if (root == rank_) {
    auto& row = inputs.at(0);
    TORCH_CHECK(int(row.size()) == size_, "simccl: scatter of ", row.size(), " tensors among ", size_, " ranks");
    check_dtypes(row, outputs.at(0));
    for (auto& input : row) {
      TORCH_CHECK(input.numel() == outputs[0].numel(), "simccl: scatter of tensors of several sizes");
      call.sends(input);
    }
  }
  auto to = call.writes(outputs.at(0));
  call.take = [root, to, rank = rank_](const Messages& messages) { copy_part(to, *messages[root], rank * to.nbytes()); };
  return launch(std::move(call), options.asyncOp);
}

WorkPtr Collectives::alltoall_base(
    at::Tensor& output, at::Tensor& input, Numels& output_rows, Numels& input_rows, const c10d::AllToAllOptions& options) {
  Call call("all_to_all");
  auto to = cut(call.writes(output), split_numels(output, output_rows, size_));
  auto from = cut(call.reads(input), split_numels(input, input_rows, size_));
  return launch(all_to_all(to, from, std::move(call), rank_, options_), options.asyncOp);
}

WorkPtr Collectives::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK(
      int(outputs.size()) == size_ && int(inputs.size()) == size_, "simccl: all-to-all of ", inputs.size(),
      " tensors into ", outputs.size(), " among ", size_, " ranks");
  Call call("all_to_all");
  Tensors to, from;
  for (auto& output : outputs) to.push_back(call.writes(output));
  for (auto& input : inputs) from.push_back(call.reads(input));
  return launch(all_to_all(to, from, std::move(call), rank_, options_), options.asyncOp);
}

WorkPtr Collectives::send(Tensors& tensors, int to, int) {
  Call call("send");
  call.to = to;
  call.text = "a message of " + described(tensors);
  for (auto& tensor : tensors) call.sends(tensor);
  return launch(std::move(call), true);
}

WorkPtr Collectives::recv(Tensors& tensors, int from, int) {
  Call call("recv");
  call.from = from;
  call.text = "a message of " + described(tensors);
  auto to = call.writes(tensors.at(0));
  call.take = [to, from](const Messages& messages) { copy_part(to, *messages[from], 0); };
  return launch(std::move(call), true);
}

}  // namespace sim
