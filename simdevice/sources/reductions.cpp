#include "reductions.h"

#include <ATen/ATen.h>

namespace sim {

using c10d::ReduceOp;

static std::string name_of(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM: return "SUM";
    case ReduceOp::AVG: return "AVG";
    case ReduceOp::PRODUCT: return "PRODUCT";
    case ReduceOp::MIN: return "MIN";
    case ReduceOp::MAX: return "MAX";
    case ReduceOp::PREMUL_SUM: return "PREMUL_SUM";
    default: TORCH_CHECK(false, "simccl: this reduction is not one of NCCL's (SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM)");
  }
}

Reduction::Reduction(const ReduceOp& op, Call& call) : op_(op.op_), name_(name_of(op.op_)) {
  if (op_ != ReduceOp::PREMUL_SUM) return;
  auto* scale = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
  factor_ = scale->double_factor;
  if (scale->tensor_factor.defined()) factors_ = call.reads(scale->tensor_factor);
}

at::Tensor Reduction::scaled(const at::Tensor& part) const {
  if (op_ != ReduceOp::PREMUL_SUM) return part;
  return factors_.defined() ? part * factors_ : part * factor_;
}

at::Tensor Reduction::of(const Tensors& parts) const {
  auto result = scaled(parts[0]).clone();
  for (size_t rank = 1; rank < parts.size(); rank++) {
    if (op_ == ReduceOp::MAX) {
      at::maximum_out(result, result, parts[rank]);
    } else if (op_ == ReduceOp::MIN) {
      at::minimum_out(result, result, parts[rank]);
    } else if (op_ == ReduceOp::PRODUCT) {
      result.mul_(parts[rank]);
    } else {
      result.add_(scaled(parts[rank]));
    }
  }
  if (op_ == ReduceOp::AVG) {
    int64_t num_ranks = parts.size();
    if (at::isIntegralType(result.scalar_type(), false)) {
      result.div_(num_ranks, "trunc");
    } else {
      result.div_(num_ranks);
    }
  }
  return result;
}

}  // namespace sim
