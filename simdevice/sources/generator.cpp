#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <mutex>

#include "settings.h"
#include "streams.h"

namespace sim {

namespace {

/// A seed, and how many operators have drawn since it was set.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(SIM, static_cast<c10::DeviceIndex>(device)),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { state_ = {seed, 0}; }
  uint64_t current_seed() const override { return state_.seed; }
  void set_offset(uint64_t offset) override { state_.num_drawn = offset; }
  uint64_t get_offset() const override { return state_.num_drawn; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor bytes = at::empty({sizeof(State)}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), &state_, sizeof(State));
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& bytes) override {
    TORCH_CHECK(bytes.numel() == sizeof(State), "sim: a generator's state has ", sizeof(State), " bytes, and not ",
                bytes.numel());
    std::memcpy(&state_, bytes.data(), sizeof(State));
  }

  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->state_ = state_;
    return copy;
  }

  uint64_t next_seed() {
    // Two rounds of a mixing function: neighbouring seeds and numbers must not give related sequences.
    return mixed(mixed(state_.seed) + ++state_.num_drawn);
  }

  static c10::DeviceType device_type() { return SIM; }

 private:
  struct State {
    uint64_t seed = c10::default_rng_seed_val;
    uint64_t num_drawn = 0;
  };

  static uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }

  State state_;
};

}  // namespace

const at::Generator& default_generator(int device) {
  static const auto& all = *[] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < num_devices(); i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(device < 0 ? current_device() : device);
}

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

at::Generator generator_for_operator(const at::Generator& generator) {
  if (generator.device().type() != SIM) return generator;
  auto* ours = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  std::unique_lock<std::mutex> lock(ours->mutex_);
  const uint64_t seed = ours->next_seed();
  lock.unlock();
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

}  // namespace sim
