// An accelerator whose memory is main memory, and whose streams are as slow as they may be: what is submitted to one is
// written only when somebody waits for it. So a missing wait reads old numbers, each time.
//
// A kernel runs on the CPU at once, after all that its own stream has to do; its result is written later, in the order of
// the stream. A block of memory that is freed goes back to the stream that allocated it, which may give it out at once;
// that it was used on another stream, and this was not recorded, is counted as a violation.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace {

using namespace at;
constexpr auto kToy = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;

// Streams.

using Place = std::pair<int, int64_t>;  // a device and a stream of it

struct Queue {
  std::deque<std::function<void()>> work;
  uint64_t submitted = 0, done = 0;
};

// Never destroyed: tensors outlive the library's objects.
auto& mutex = *new std::recursive_mutex();  // for all below
auto& queues = *new std::map<Place, Queue>();
int64_t last_stream = 0;
thread_local int current = 0;
thread_local int64_t current_streams[kDevices] = {};
thread_local bool in_kernel = false;

using Lock = std::lock_guard<std::recursive_mutex>;

Place here(int device) { return {device, current_streams[device]}; }

uint64_t submit(Place place, std::function<void()> work) {
  Lock lock(mutex);
  queues[place].work.push_back(std::move(work));
  return ++queues[place].submitted;
}

void reach(Place place, uint64_t position = UINT64_MAX) {
  Lock lock(mutex);
  auto& queue = queues[place];
  while (!queue.work.empty() && queue.done < position) {
    auto work = std::move(queue.work.front());
    queue.work.pop_front();
    ++queue.done;
    work();
  }
}

struct Mark {
  Place place;
  uint64_t position = 0;
  std::shared_ptr<double> ms = std::make_shared<double>(0);
};

bool is_reached(const Mark& mark) {
  Lock lock(mutex);
  auto& queue = queues[mark.place];
  if (queue.done < mark.position) reach(mark.place, queue.done + 1);  // asking is when time passes
  return queue.done >= mark.position;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Place of(const Stream& stream) { return {stream.device_index(), stream.id()}; }
  static Stream as_stream(int device, int64_t id) { return Stream(Stream::UNSAFE, Device(kToy, device), id); }

  DeviceType type() const override { return kToy; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kToy, static_cast<DeviceIndex>(current)}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "toy has no device ", device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override { return as_stream(device.index(), current_streams[device.index()]); }
  Stream getDefaultStream(Device device) const override { return as_stream(device.index(), 0); }
  Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    return as_stream(device.has_index() ? device.index() : current, ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mutex);
    return queues[of(stream)].work.empty();
  }
  void synchronizeStream(const Stream& stream) const override { reach(of(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override {
    Lock lock(mutex);
    for (auto& each : queues)
      if (each.first.first == device) reach(each.first);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Mark();
    auto mark = static_cast<Mark*>(*event);
    mark->place = of(stream);
    mark->position = submit(mark->place, [ms = mark->ms] {
      *ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    });
  }
  void block(void* event, const Stream& stream) const override {
    if (event) submit(of(stream), [mark = *static_cast<Mark*>(event)] { reach(mark.place, mark.position); });
  }
  bool queryEvent(void* event) const override { return !event || is_reached(*static_cast<Mark*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) reach(static_cast<Mark*>(event)->place, static_cast<Mark*>(event)->position);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return *static_cast<Mark*>(second)->ms - *static_cast<Mark*>(first)->ms;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Memory.

struct Block {
  size_t bytes;
  Place owner;
  std::set<Place> used, recorded;
};

auto& blocks = *new std::map<void*, Block>();
auto& free_blocks = *new std::multimap<std::pair<Place, size_t>, void*>();
auto& freed = *new std::vector<std::pair<void*, std::vector<Mark>>>();  // to be reused when these are reached
int64_t allocated[kDevices] = {}, peak[kDevices] = {}, violations = 0;

void use(const Tensor& tensor) {
  if (auto found = blocks.find(tensor.storage().mutable_data()); found != blocks.end())
    found->second.used.insert(here(tensor.device().index()));
}

void release(void* memory) {
  if (!memory) return;
  Lock lock(mutex);
  auto& block = blocks.at(memory);
  allocated[block.owner.first] -= static_cast<int64_t>(block.bytes);
  std::vector<Mark> awaited;
  for (auto& place : block.used)
    if (place != block.owner && !block.recorded.count(place) && !queues[place].work.empty()) ++violations;
  for (auto& place : block.recorded) awaited.push_back({place, queues[place].submitted});
  block.used.clear();
  block.recorded.clear();
  freed.emplace_back(memory, std::move(awaited));
}

struct Memory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    for (auto each = freed.begin(); each != freed.end();) {
      bool is_free = true;
      for (auto& mark : each->second) is_free = is_free && queues[mark.place].done >= mark.position;
      auto& block = blocks.at(each->first);
      if (is_free) free_blocks.emplace(std::make_pair(block.owner, block.bytes), each->first);
      each = is_free ? freed.erase(each) : each + 1;
    }
    Device device(kToy, static_cast<DeviceIndex>(current));
    if (bytes == 0) return {nullptr, device};
    auto found = free_blocks.find({here(current), bytes});
    void* memory;
    if (found != free_blocks.end()) {
      memory = found->second;
      free_blocks.erase(found);
    } else {
      memory = std::malloc(bytes);
      std::memset(memory, 0x7f, bytes);
      blocks[memory] = {bytes, here(current), {}, {}};
    }
    allocated[current] += static_cast<int64_t>(bytes);
    peak[current] = std::max(peak[current], allocated[current]);
    return {memory, memory, &release, device};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

auto& memory = *new Memory();
auto& pinned = *new std::map<char*, size_t>();

void release_pinned(void* from) {
  Lock lock(mutex);
  pinned.erase(static_cast<char*>(from));
  std::free(from);
}

struct PinnedMemory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    auto place = std::malloc(std::max<size_t>(bytes, 1));
    pinned[static_cast<char*>(place)] = bytes;
    return {place, place, &release_pinned, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

auto& pinned_memory = *new PinnedMemory();

// Generators.

struct ToyGenerator final : CPUGeneratorImpl {
  explicit ToyGenerator(DeviceIndex index) {
    device_ = Device(kToy, index);
    key_set_ = DispatchKeySet(DispatchKey::PrivateUse1);
  }
};

const Generator& generator_of(int device) {
  static auto& all = *[] {
    auto made = new std::vector<Generator>();
    for (int index = 0; index < kDevices; ++index) made->push_back(make_generator<ToyGenerator>(index));
    return made;
  }();
  return all[device];
}

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return generator_of(index < 0 ? current : index);
  }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<ToyGenerator>(index < 0 ? current : index);
  }
  Device getDeviceFromPtr(void* data) const override {
    return {kToy, static_cast<DeviceIndex>(blocks.at(data).owner.first)};
  }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(mutex);
    auto place = static_cast<char*>(const_cast<void*>(data));
    auto after = pinned.upper_bound(place);
    return after != pinned.begin() && place < std::prev(after)->first + std::prev(after)->second;
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    reach(here(current));
    auto made = memory.allocate(bytes);
    std::memcpy(made.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

// Kernels.

Tensor on_cpu(const Tensor& tensor) {  // the same memory, and no reference to it: as a real kernel has it
  auto shown = from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(kCPU));
  shown._set_conj(tensor.is_conj());
  shown._set_neg(tensor.is_neg());
  return shown;
}

// A link that is broken, from TOY_LINK: "hangs 0 1", "corrupts 0 1" or "is-slow 0 1", from one device to another.
std::string fault_of(const Device& from, const Device& to) {
  std::string what;
  int first = -1, second = -1;
  auto said = std::getenv("TOY_LINK");
  if (said) std::istringstream(said) >> what >> first >> second;
  return from.index() == first && to.index() == second ? what : "";
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool is_down = !from.device().is_cpu(), is_up = !to.device().is_cpu();
  int device = (is_up ? to : from).device().index();
  {
    Lock lock(mutex);
    if (is_down) use(from);
    if (is_up) use(to);
  }
  if (is_up && is_down && from.device() != to.device()) {  // both wait
    reach(here(from.device().index()));
    reach(here(device));
  }
  auto source = is_down ? on_cpu(from) : from.detach();
  auto target = is_up ? on_cpu(to) : to.detach();
  auto fault = is_up && is_down ? fault_of(from.device(), to.device()) : "";
  auto copy = [source, target, fault]() mutable {
    c10::InferenceMode guard(source.is_inference() || target.is_inference());
    NoGradGuard no_grad;
    target.copy_(source);
    while (fault == "hangs") std::this_thread::sleep_for(std::chrono::seconds(1));
    if (fault == "is-slow") std::this_thread::sleep_for(std::chrono::milliseconds(500));
    if (fault == "corrupts") static_cast<char*>(target.mutable_data_ptr())[target.nbytes() / 2] ^= 1;
  };
  bool is_later = in_kernel ? is_up : is_up && is_down ? true : non_blocking && (is_up ? from : to).is_pinned();
  if (is_later) {
    submit(here(device), std::move(copy));
  } else {
    reach(here(device));
    copy();
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor empty(
    SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::DeviceGuard guard(device.has_value() && device->has_index() ? *device : Guard().getDevice());
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, DispatchKeySet(DispatchKey::PrivateUse1),
      dtype.value_or(typeMetaToScalarType(get_default_dtype())), format);
}

Tensor empty_strided(
    SymIntArrayRef size, SymIntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.has_value() && device->has_index() ? *device : Guard().getDevice());
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      DispatchKeySet(DispatchKey::PrivateUse1), dtype.value_or(typeMetaToScalarType(get_default_dtype())));
}

const Tensor& resize(const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  reach(here(self.device().index()));
  return native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  return native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor view(const Tensor& self, SymIntArrayRef size) { return native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor& set_storage(Tensor& self, Storage source, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  return native::set_storage_cpu_(
      self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(Tensor& self, Stream stream) {
  Lock lock(mutex);
  if (auto found = blocks.find(self.storage().mutable_data()); found != blocks.end())
    if (Guard::of(stream) != found->second.owner) found->second.recorded.insert(Guard::of(stream));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  std::optional<Device> device;
  std::vector<Tensor> tensors;
  for (size_t place = first; place < stack->size(); ++place) {
    auto& value = (*stack)[place];
    if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& each : value.toTensorList()) tensors.push_back(each);
    if (value.isDevice() && value.toDevice().type() == kToy) device = value.toDevice();
  }
  {
    Lock lock(mutex);
    for (auto& each : tensors)
      if (each.device().type() == kToy) {
        if (device.has_value() && device->has_index())
          TORCH_CHECK(
              each.device() == *device || each.dim() == 0, "Expected all tensors to be on the same device, but found ",
              each.device(), " and ", *device);
        if (!device.has_value() || !device->has_index()) device = each.device();
        use(each);
      }
  }
  tensors.clear();
  c10::DeviceGuard guard(device.has_value() && device->has_index() ? *device : Guard().getDevice());
  reach(here(current));
  std::optional<Generator> own;
  Generator drawn = at::detail::createCPUGenerator();
  for (size_t number = 0; number < arguments.size(); ++number)
    if (arguments[number].name() == "generator") {
      auto& value = (*stack)[first + number];
      own = value.isNone() ? generator_of(current) : value.toGenerator();
      TORCH_CHECK(
          own->device().type() == kToy, "Expected a 'toy' device type for generator but found '",
          own->device().type(), "'");  // as CUDA does
      drawn.set_state(own->get_state());
      value = drawn;
    }
  in_kernel = true;
  try {
    native::cpu_fallback(op, stack);
  } catch (...) {
    in_kernel = false;
    throw;
  }
  in_kernel = false;
  if (own.has_value()) own->set_state(drawn.get_state());
}

// Collectives, by the group's part for main memory.

IValue shown_on_cpu(const IValue& value) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kToy) {
    auto tensor = value.toTensor();
    Lock lock(mutex);
    use(tensor);
    reach(here(tensor.device().index()));
    return on_cpu(tensor);
  }
  if (value.isTensorList()) {
    c10::List<Tensor> shown;
    for (const Tensor& each : value.toTensorList()) shown.push_back(shown_on_cpu(each).toTensor());
    return shown;
  }
  if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
    c10::List<c10::List<Tensor>> shown;
    for (auto& each : value.toListRef()) shown.push_back(shown_on_cpu(each).toTensorList());
    return shown;
  }
  return value;
}

void through_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto first = stack->size() - op.schema().arguments().size();
  for (size_t place = first; place < stack->size(); ++place) (*stack)[place] = shown_on_cpu((*stack)[place]);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (auto name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier",
        "send", "recv_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&through_host>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
// `copy_` leaves conjugation to the kernel; so does this, or it would be resolved by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", native::unfold);
  m.impl("view_as_real", native::view_as_real);
  m.impl("view_as_complex", native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Tensor", native::set_tensor_);
  m.impl("set_.source_Storage", native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
}
TORCH_LIBRARY(toy, m) {
  m.def("current_device", []() -> int64_t { return current; });
  m.def("get_state", [](int64_t device) { return generator_of(device).get_state(); });
  m.def("set_state", [](int64_t device, const Tensor& state) {
    auto generator = generator_of(device);
    generator.set_state(state);
  });
  m.def("seed", [](int64_t seed) {
    for (int device = 0; device < kDevices; ++device) {
      auto generator = generator_of(device);
      generator.set_current_seed(seed);
    }
  });
  m.def("memory_allocated", [](int64_t device) -> int64_t { return allocated[device]; });
  m.def("max_memory_allocated", [](int64_t device) -> int64_t { return peak[device]; });
  m.def("violations", []() -> int64_t { return violations; });
}

struct AtStart {
  AtStart() {
    RegisterPrivateUse1HooksInterface(new Hooks());
    SetAllocator(kToy, &memory);
  }
} at_start;

}  // namespace
