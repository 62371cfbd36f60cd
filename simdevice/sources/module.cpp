// The module of Python: what `sim.py` calls.
#include "module.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <thread>

#include "allocator.h"
#include "generator.h"
#include "python_hooks.h"
#include "settings.h"
#include "streams.h"
#include "tensors.h"

namespace sim {

namespace {

namespace py = pybind11;

/// Returns the function for a hook: it takes the GIL to call, and to die.
template <class Result, class... Arguments>
std::function<Result(Arguments...)> from_python(const py::object& function) {
  if (function.is_none()) return nullptr;
  std::shared_ptr<py::object> kept(new py::object(function), [](py::object* object) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    delete object;
  });
  return [kept](Arguments... arguments) {
    py::gil_scoped_acquire gil;
    return (*kept)(arguments...).template cast<Result>();
  };
}

template <class Value>
Value named(const std::string& what, const std::string& name, const std::map<std::string, Value>& values) {
  const auto it = values.find(name);
  if (it != values.end()) return it->second;
  std::string names;
  for (const auto& [each, _] : values) names += (names.empty() ? "" : ", ") + each;
  throw py::value_error(what + " is \"" + name + "\", and must be one of: " + names);
}

const std::map<std::string, Spoil> SPOILS{
    {"no", Spoil::no}, {"handed out", Spoil::handed_out}, {"freed", Spoil::freed}};
const std::map<std::string, Races> RACES{{"off", Races::off}, {"collect", Races::collect}, {"raise", Races::raise}};

void configure_from_python(int64_t pause_us, int pause_percent, uint64_t seed, const std::string& spoil,
                           const std::string& races, bool computes, const std::map<std::string, double>& machine) {
  const Settings wanted{pause_us, pause_percent, seed, named("spoil", spoil, SPOILS), named("races", races, RACES),
                        computes};
  HostLock lock(host_mutex());
  const bool was_off = settings().races == Races::off;
  configure(wanted);
  start_clock(machine);
  count_calls(clock_runs() && sim::machine().python > 0);
  restart_pauses();
  if (was_off) race_detector().clear();  // it has missed what was done meanwhile
}

void sleep(int64_t microseconds) {
  enqueue(current_stream(), "sleep", {}, Cost{Engine::compute, double(microseconds)}, [=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

/// Keeps the current stream busy until it is opened, or dies.
class Gate {
 public:
  Gate() {
    enqueue(current_stream(), "gate", {}, Cost{}, [opened = opened_] { opened->wait(); });
  }
  ~Gate() { open(); }
  void open() { opened_->set(); }

 private:
  const EventPtr opened_ = std::make_shared<Event>(Clock{}, Moment{});
};

void access_by_host(const at::Tensor& tensor, bool write) {
  TORCH_CHECK(tensor.device().is_cpu(), "sim: the host reads and writes its own memory, not that of ", tensor.device());
  if (tensor.numel()) host_access(bytes_of(tensor, write), write ? "a write" : "a read");
}

std::map<std::string, int64_t> holders_at_peak(int device) {
  HostLock lock(host_mutex());
  return memory_of(device).holders_at_peak();
}

const char* name_of(Engine engine) {
  switch (engine) {
    case Engine::compute: return "compute";
    case Engine::copy: return "copy";
    case Engine::communication: return "communication";
    default: return "";
  }
}

/// By stream: computing, copying, communicating, exposed, end.
std::map<std::string, std::vector<double>> times_from_python() {
  HostLock lock(host_mutex());
  const double host = host_time();
  std::map<std::string, std::vector<double>> times;
  for (int device = 0; device < num_devices(); device++) {
    for (const auto& [id, line] : timelines(device)) {
      if (line.end <= 0) continue;
      times["sim:" + std::to_string(device) + " stream " + std::to_string(id)] = {
          line.computing, line.copying, line.communicating, line.exposed, line.end};
    }
  }
  times["host"] = {host};
  return times;
}

std::vector<std::tuple<std::string, std::string, std::string, double, double>> trace_from_python() {
  HostLock lock(host_mutex());
  std::vector<std::tuple<std::string, std::string, std::string, double, double>> found;
  for (const Span& each : spans()) {
    found.emplace_back(name_of_lane(each.lane), each.what, name_of(each.engine), each.start, each.end);
  }
  return found;
}

}  // namespace

PYBIND11_MODULE(sim_native, module) {
  module.def("device_count", &num_devices);
  module.def("current_device", &current_device);
  module.def("set_device", &set_device);
  module.def("default_generator", &default_generator);
  module.def("configure", &configure_from_python);
  module.def("races", &take_races);
  module.def("host_waits", &take_host_waits);
  module.def("on_host_wait", [](const py::object& function) {
    host_wait_hook().set(from_python<void, const std::string&>(function));
  });
  module.def("label_tasks", [](const py::object& function) {
    task_label_hook().set(from_python<std::string>(function));
  });
  module.def("label_allocations", [](const py::object& function) {
    allocation_label_hook().set(from_python<std::string>(function));
  });
  module.def("holders_at_peak", &holders_at_peak);
  module.def("host_access", &access_by_host);
  module.def("sleep", &sleep);
  py::class_<Gate>(module, "Gate").def(py::init<>()).def("open", &Gate::open);
  module.def("times", &times_from_python);
  module.def("trace", &trace_from_python);
  module.def("reset_times", [] {
    HostLock lock(host_mutex());
    reset_clock();
  });
  module.def("host_works", [](double us) {
    HostLock lock(host_mutex());
    host_works(us);
  });
  module.def("stop_workers", &stop_workers);
  module.def("is_forked", &is_forked);
  bind_collectives(module);
}

}  // namespace sim
