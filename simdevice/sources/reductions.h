// How tensors of several ranks become one.
#pragma once

#include "collectives.h"

namespace sim {

/// A reduction as it was asked for. It is given to workers, so it holds no tensor of the user.
class Reduction {
 public:
  /// Notes in `call` what the reduction itself reads. Raises for one that NCCL has not either.
  Reduction(const c10d::ReduceOp& op, Call& call);
  const std::string& name() const { return name_; }
  /// Returns the reduction of `parts`, one of each rank, 1-D. Adds them up in the order of the ranks.
  at::Tensor of(const Tensors& parts) const;

 private:
  at::Tensor scaled(const at::Tensor& part) const;

  c10d::ReduceOp::RedOpType op_;
  std::string name_;
  double factor_ = 1;
  at::Tensor factors_;  // on the host; undefined, or one element
};

}  // namespace sim
