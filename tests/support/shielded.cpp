// A device for machines without one: torch's PrivateUse1, whose memory no code of the host can touch.
//
// Addresses of device tensors lie in a reservation that may be neither read nor written, so whoever takes data_ptr()
// for host memory ends with a segmentation fault. The values lie elsewhere, at a fixed distance that only this file
// knows. Every operation is torch's own for the CPU, on tensors over those values; operands on two devices are refused
// as torch refuses them for CUDA.

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr size_t RESERVED = size_t(1) << 32;
constexpr size_t GRAIN = 256;

// Device addresses, the host memory behind them, and which parts are free.
struct Memory {
  char* device;
  char* host;
  size_t used = 0;
  std::multimap<size_t, size_t> free;
  std::map<size_t, size_t> sizes;
  std::mutex mutex;

  Memory() {
    device = map(PROT_NONE);
    host = map(PROT_READ | PROT_WRITE);
  }
  static char* map(int protection) {
    void* at = mmap(nullptr, RESERVED, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no room for the memory of the stand-in device");
    return static_cast<char*>(at);
  }
  void* take(size_t bytes) {
    std::lock_guard<std::mutex> held(mutex);
    size_t size = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    auto found = free.lower_bound(size);
    size_t at = used;
    if (found != free.end() && found->first <= 2 * size) {
      size = found->first;
      at = found->second;
      free.erase(found);
    } else {
      used += size;
      TORCH_CHECK(used <= RESERVED, "the stand-in device has no memory left");
    }
    sizes[at] = size;
    return device + at;
  }
  void give(void* pointer) {
    std::lock_guard<std::mutex> held(mutex);
    size_t at = static_cast<char*>(pointer) - device;
    free.emplace(sizes.at(at), at);
    sizes.erase(at);
  }
};

// Never freed: tensors may outlive static objects.
Memory& memory() {
  static Memory* made = new Memory;
  return *made;
}

void release(void* pointer) {
  memory().give(pointer);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes ? memory().take(bytes) : nullptr;
    return {at, at, bytes ? &release : &c10::detail::deleteNothing, c10::Device(c10::kPrivateUse1, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto& m = memory();
    std::memcpy(static_cast<char*>(to) - m.device + m.host, static_cast<const char*>(from) - m.device + m.host, bytes);
  }
};
DeviceAllocator allocator;

// A CPU tensor over the values of a device tensor, with its sizes and strides.
at::Tensor values_of(const at::Tensor& tensor) {
  auto& m = memory();
  const auto& impl = tensor.storage();
  char* at = static_cast<char*>(const_cast<void*>(impl.data()));
  char* values = at == nullptr ? m.host : at - m.device + m.host;
  const size_t bytes = impl.nbytes();
  auto storage = c10::Storage(c10::Storage::use_byte_size_t{}, bytes,
                              c10::DataPtr(values, c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() ? values_of(tensor) : tensor;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(self));
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) {
  return values_of(self).item();
}

// Operations that change no value and no memory, and those that torch composes of others, need no values.
at::Tensor& set_to_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                           c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  auto storage = impl->storage();
  if (needed > storage.nbytes()) {
    auto fresh = allocator.allocate(needed);
    if (storage.nbytes()) allocator.copy_data(fresh.mutable_get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(needed);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

struct Seen {
  at::Tensor host, device;
};

// Runs an operation on the values of its operands; what it makes goes to the device.
void run_on_values(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n_in = schema.arguments().size();
  std::vector<Seen> seen;
  auto enter = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      TORCH_CHECK(!tensor.is_cpu() || tensor.dim() == 0 || op.operator_name().name == "aten::index" ||
                      op.operator_name().name == "aten::_index_put_impl_",
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  c10::Device(c10::kPrivateUse1, 0), " and cpu, in ", op.operator_name().name);
      return tensor;
    }
    auto host = values_of(tensor);
    seen.push_back({host, tensor});
    return host;
  };
  auto leave = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& each : seen)
      if (each.host.is_same(tensor)) return each.device;
    for (const auto& each : seen)
      if (tensor.numel() && tensor.storage().data() == each.host.storage().data()) {
        // A view, such as view_as_real's.
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(each.device.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
        view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
        return view;
      }
    auto made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
    values_of(made).copy_(tensor);
    return made;
  };
  for (size_t i = stack->size() - n_in; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = enter(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(enter(each));
      value = c10::IValue(c10::List<at::Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector())
        list.push_back(each ? std::optional<at::Tensor>(enter(*each)) : std::nullopt);
      value = c10::IValue(list);
    } else if (value.isDevice()) {
      value = c10::IValue(c10::Device(c10::kCPU));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const size_t n_out = schema.returns().size();
  for (size_t i = stack->size() - n_out; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = leave(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(leave(each));
      value = c10::IValue(c10::List<at::Tensor>(list));
    }
  }
  // An operation with `out` may have given its result other sizes.
  for (const auto& each : seen)
    if (each.host.sizes() != each.device.sizes()) {
      resize(each.device, each.host.sizes(), {});
      values_of(each.device).copy_(each.host);
    }
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  bool isPinnedPtr(const void*) const override {
    return false;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = allocator.allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept) allocator.copy_data(fresh.mutable_get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

int registered = [] {
  c10::SetAllocator(c10::kPrivateUse1, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return 0;
}();

}  // namespace

// One device, one stream; what is started is over at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kPrivateUse1;
  c10::DeviceType type() const override {
    return static_type;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return getDevice();
  }
  c10::Device getDevice() const override {
    return c10::Device(static_type, 0);
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream exchangeStream(c10::Stream) const override {
    return getStream(getDevice());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
};

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, ::Guard)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_values>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", [](const at::Tensor& self, const at::Tensor& target) {
    if (self.sizes() != target.sizes()) resize(target, self.sizes(), {});
    return copy_from(self, target, false);
  });
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", [](const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
  });
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    const int64_t n = source.nbytes() / self.itemsize();
    return set_to_storage(self, std::move(source), 0, {n}, {});
  });
  m.impl("set_.source_Storage_storage_offset", set_to_storage);
}
