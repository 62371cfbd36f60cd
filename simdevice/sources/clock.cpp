#include "clock.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "uncharged.h"

namespace sim {

namespace {

constexpr double EVENT_US = 1;  // of the host, to record an event, or to have a stream wait for one
constexpr int TENSORS_OF_A_KERNEL = 48;  // of CUDA's kernels for lists, which take 30 to 110 by the number of lists

thread_local int in_kernel = -1;  // how many tasks the kernel has that this thread queues; -1: each is one

struct State {
  bool runs = false;
  Machine machine;
  double now = 0;
  uint64_t epoch = 1;
  std::vector<Span> spans;
  std::vector<double> free_at;  // by communicator
};

State& state() {
  static auto& state = *new State;
  return state;
}

std::atomic<int64_t> python_calls{0};

double number(const std::map<std::string, double>& record, const std::string& name) {
  const auto it = record.find(name);
  TORCH_CHECK(it != record.end(), "sim: the machine's record has no \"", name, "\"");
  return it->second;
}

Link link(const std::map<std::string, double>& record, const std::string& name) {
  return {number(record, name + ".latency") * 1e6, number(record, name + ".bandwidth") / 1e6};
}

void charge_python() {
  const int64_t calls = python_calls.exchange(0);
  if (state().runs) state().now += static_cast<double>(calls) * state().machine.python;
}

}  // namespace

bool clock_runs() { return state().runs; }
const Machine& machine() { return state().machine; }

void start_clock(const std::map<std::string, double>& record) {
  state().runs = !record.empty();
  if (record.empty()) return;
  Machine machine;
  machine.launch = number(record, "launch") * 1e6;
  machine.host = number(record, "host") * 1e6;
  machine.python = number(record, "python") * 1e6;
  machine.bytes_per_us = number(record, "bandwidth") / 1e6;
  machine.attention = number(record, "shares.attention");
  machine.reduction = number(record, "shares.reduction");
  machine.lookup = number(record, "shares.lookup");
  machine.copy = number(record, "shares.copy");
  machine.flops_per_us[c10::ScalarType::BFloat16] = number(record, "flops.bfloat16") / 1e6;
  machine.flops_per_us[c10::ScalarType::Half] = number(record, "flops.float16") / 1e6;
  machine.flops_per_us[c10::ScalarType::Float] = number(record, "flops.float32") / 1e6;
  machine.flops_per_us_tf32 = number(record, "flops.tfloat32") / 1e6;
  machine.within = link(record, "within");
  machine.across = link(record, "across");
  machine.to_host = link(record, "to_host");
  machine.ranks_per_node = static_cast<int>(number(record, "ranks_per_node"));
  state().machine = std::move(machine);
  reset_clock();
}

void reset_clock() {
  python_calls = 0;
  state().now = 0;
  state().epoch++;
  state().spans.clear();
  std::fill(state().free_at.begin(), state().free_at.end(), 0);
}

double host_time() {
  charge_python();
  return state().now;
}

void host_works(double us) {
  if (state().runs) state().now = host_time() + us;
}

void host_reaches(const Moment& moment) {
  if (state().runs && moment.epoch == state().epoch) state().now = std::max(host_time(), moment.at);
}

bool has_come(const Moment& moment) {
  return !state().runs || moment.epoch != state().epoch || moment.at <= host_time();
}

void refresh(Timeline& line) {
  if (line.awaited.epoch == state().epoch) return;
  line = Timeline{};
  line.awaited.epoch = state().epoch;
}

Moment moment_of(Timeline& line) {
  if (!state().runs) return {};
  refresh(line);
  host_works(EVENT_US);
  const bool is_behind = line.awaited.at > line.end;
  return {std::max({line.end, line.awaited.at, state().now}),
          is_behind ? line.awaited.by_communication : line.mainly_communicates(), state().epoch};
}

void wait_for(Timeline& line, const Moment& moment) {
  if (!state().runs) return;
  refresh(line);
  host_works(EVENT_US);
  if (moment.epoch == state().epoch && moment.at > line.awaited.at) line.awaited = moment;
}

void place(Timeline& line, int lane, const char* what, const Cost& cost) {
  if (!state().runs || cost.engine == Engine::none) return;
  refresh(line);
  const bool continues = in_kernel >= 0 && in_kernel++ % TENSORS_OF_A_KERNEL;
  const double us = continues ? std::max(0.0, cost.us - state().machine.launch) : cost.us;
  if (!continues) host_works(state().machine.host);
  const double free = std::max(line.end, state().now);
  double start = std::max(free, line.awaited.at);
  if (line.awaited.by_communication) line.exposed += start - free;
  if (cost.communicator >= 0) {
    double& free_at = state().free_at.at(cost.communicator);
    start = std::max(start, free_at);
    free_at = start + us;
  }
  line.end = start + us;
  auto& total = cost.engine == Engine::compute ? line.computing
                : cost.engine == Engine::copy  ? line.copying
                                               : line.communicating;
  total += us;
  state().spans.push_back({lane, what, cost.engine, start, line.end});
}

OneKernel::OneKernel() { in_kernel = 0; }
OneKernel::~OneKernel() { in_kernel = -1; }

const std::vector<Span>& spans() { return state().spans; }

int new_communicator() {
  state().free_at.push_back(0);
  return static_cast<int>(state().free_at.size()) - 1;
}

Cost copy_on_device(double bytes) {
  if (!state().runs) return {};
  const Machine& of = machine();
  return {Engine::copy, of.launch + bytes / (of.bytes_per_us * of.copy)};
}

Cost copy_by_link(double bytes) {
  if (!state().runs) return {};
  return {Engine::copy, machine().to_host.us(bytes)};
}

Cost collective_cost(const std::string& kind, double bytes, int size, int per_node, int communicator) {
  if (!state().runs) return {};
  const Machine& of = machine();
  const int nodes = (size + per_node - 1) / per_node, across = nodes - 1;
  const double hops = across * of.across.latency + (size - 1 - across) * of.within.latency;
  const double levels = std::ceil(std::log2(nodes));
  // A ring runs through each device of a node, so all of them share the traffic across; the slower link is the bound.
  double slowest = per_node > 1 || nodes == 1 ? of.within.bytes_per_us : INFINITY;
  if (across) slowest = std::min(slowest, per_node * of.across.bytes_per_us);
  const double ring = bytes * (size - 1) / size / slowest;
  double us = 0;
  if (size == 1) {
    us = bytes / of.bytes_per_us;  // a copy, if anything
  } else if (kind == "all_gather" || kind == "reduce_scatter") {
    us = ring + (per_node == 1 ? levels * of.across.latency : hops);
  } else if (kind == "all_reduce") {
    const double tree = (per_node - 1) * of.within.latency + levels * of.across.latency + bytes / slowest;
    us = 2 * std::min(hops + ring, tree);
  } else if (kind == "all_to_all") {
    const int near = per_node - 1, far = size - per_node;
    us = near * of.within.latency + far * of.across.latency +
         bytes / size * (near / of.within.bytes_per_us + far / of.across.bytes_per_us);
  } else if (kind == "send" || kind == "recv") {
    us = (across ? of.across : of.within).us(bytes);
  } else if (kind == "barrier") {
    us = 2 * hops;
  } else {  // broadcast, reduce, gather, scatter
    us = hops + bytes / slowest;
  }
  return {Engine::communication, of.launch + us, communicator};
}

void count_python_call() { python_calls.fetch_add(1, std::memory_order_relaxed); }

}  // namespace sim
