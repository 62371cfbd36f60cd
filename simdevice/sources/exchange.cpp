// What the workers do for a collective: send, receive, and see that all ranks ask for the same.
#include <sstream>

#include "collectives.h"

namespace sim {

static at::Tensor flat_on_host(const at::Tensor& tensor) {
  TORCH_CHECK(is_on_sim(tensor), "simccl: a tensor is on ", tensor.device(), ", not on the simulated device");
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "simccl: a tensor is not contiguous");
  return on_host(tensor).as_strided({tensor.numel()}, {1});
}

at::Tensor Call::reads(const at::Tensor& tensor) {
  access_of(tensor, false, accesses);
  held.push_back(tensor);
  return flat_on_host(tensor);
}

at::Tensor Call::writes(const at::Tensor& tensor) {
  access_of(tensor, true, accesses);
  held.push_back(tensor);
  results.push_back(tensor);
  return flat_on_host(tensor);
}

Exchange::Exchange(c10::intrusive_ptr<c10d::Store> store, int rank, int size, OptionsPtr options)
    : rank_(rank),
      size_(size),
      options_(std::move(options)),
      mailbox_(std::move(store), rank, size, is_aborted_),
      next_to_(size),
      next_from_(size) {}

void Exchange::number(Call& call) {
  call.number = call.to >= 0 ? next_to_.at(call.to)++ : call.from >= 0 ? next_from_.at(call.from)++ : next_++;
}

void Exchange::carry_out(const std::vector<Call>& calls) {
  auto deadline = std::chrono::steady_clock::now() + options_->timeout;
  Messages own;
  if (*is_aborted_) return;
  for (auto& call : calls) own.push_back(call.from >= 0 ? nullptr : send(call, deadline));
  for (size_t i = 0; i < calls.size(); i++) {
    auto& call = calls[i];
    if (call.to >= 0) continue;
    auto messages = receive(call, std::move(own[i]), deadline);
    if (*is_aborted_) return;
    check_agreement(call, messages);
    if (call.take) call.take(messages);
  }
}

MessagePtr Exchange::send(const Call& call, Deadline deadline) {
  std::vector<Part> parts;
  for (auto& tensor : call.sent) parts.push_back({tensor.data_ptr(), tensor.nbytes()});
  return mailbox_.send(1 + call.to, call.number, call.text, parts, call.to >= 0 ? 1 : size_ - 1, deadline);
}

Messages Exchange::receive(const Call& call, MessagePtr own, Deadline deadline) {
  Messages messages(size_);
  std::string missing;
  for (int rank = 0; rank < size_; rank++) {
    if (rank == rank_ && call.is_for_all()) {
      messages[rank] = std::move(own);
    } else if (call.is_for_all() || rank == call.from) {
      int channel = call.is_for_all() ? 0 : 1 + rank_;
      messages[rank] = mailbox_.receive(rank, channel, call.number, deadline);
      if (!messages[rank]) missing += (missing.empty() ? "" : ", ") + options_->name_of(rank);
    }
  }
  TORCH_CHECK_WITH(
      DistBackendError, missing.empty() || *is_aborted_, "simccl: ", missing, " did not come to ", described(call), " within ",
      options_->timeout.count(), " ms; ", options_->name_of(rank_), " called ", call.text);
  return messages;
}

void Exchange::check_agreement(const Call& call, const Messages& messages) const {
  std::ostringstream all;
  bool agree = true;
  for (int rank = 0; rank < size_; rank++) {
    if (!messages[rank]) continue;
    auto text = messages[rank]->text();
    agree &= text == call.text;
    all << "; " << options_->name_of(rank) << " called " << text;
  }
  if (!call.is_for_all()) all << "; " << options_->name_of(rank_) << " expects " << call.text;
  TORCH_CHECK_WITH(DistBackendError, agree, "simccl: the ranks disagree about ", described(call), all.str());
}

std::string CollectiveOptions::name_of(int rank) const {
  return "rank " + std::to_string(global_ranks_in_group.empty() ? rank : global_ranks_in_group.at(rank));
}

std::string Exchange::described(const Call& call) const {
  std::ostringstream text;
  if (call.is_for_all()) {
    text << "collective " << call.number << " of group '" << options_->group_name << "' (ranks";
    for (int rank = 0; rank < size_; rank++) text << (rank ? ", " : " ") << options_->name_of(rank).substr(5);
    text << ")";
  } else {
    text << "message " << call.number << " from " << options_->name_of(call.from) << " to " << options_->name_of(rank_) << " in group '"
         << options_->group_name << "'";
  }
  return text.str();
}

}  // namespace sim
