// A second device for torch on a machine that has none: memory and arithmetic are the CPU's, and still a tensor of it is
// as far away as one on a GPU. Whoever mixes devices, or asks such a tensor for a numpy array, is told.

#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::malloc(size ? size : 1);
    return {data, data, &std::free, c10::Device(KIND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
};

// One device with one stream, on which everything is done at once: events have nothing to wait for.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<KIND> {
  c10::Device exchangeDevice(c10::Device) const override { return {KIND, 0}; }
  c10::Device getDevice() const override { return {KIND, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {KIND, 0}); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream({KIND, 0}); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The same memory seen as a CPU tensor.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       c10::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Tensor brought(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(c10::Device(KIND, 0)) : tensor;
}

at::Tensor convolve(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                    c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(!input.is_cpu() && !weight.is_cpu(), "convolution: an argument is on the CPU");
  const auto on = bias && bias->defined() ? std::optional<at::Tensor>(on_cpu(*bias)) : std::nullopt;
  return brought(at::convolution_symint(on_cpu(input), on_cpu(weight), on, stride, padding, dilation, transposed,
                                        output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolve_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  const std::vector<c10::SymInt> biases{weight.sym_size(0)};
  auto [to_input, to_weight, to_bias] = at::convolution_backward_symint(
      on_cpu(gradient), on_cpu(input), on_cpu(weight), at::OptionalSymIntArrayRef(biases), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {brought(to_input), brought(to_weight), brought(to_bias)};
}

// As on a GPU: numbers and indices may come from the CPU, arrays may not.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = op.schema().name();
  const bool takes_indices = name.find("index") != std::string::npos;
  const size_t count = op.schema().arguments().size();
  for (size_t place = 0; place < count; ++place) {
    const auto& value = (*stack)[stack->size() - count + place];
    auto check = [&](const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.defined() || !tensor.is_cpu() || tensor.dim() == 0, name, ": argument ", place,
                  " is on the CPU, another is on ", c10::Device(KIND));
    };
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList() && !takes_indices)
      for (const at::Tensor& one : value.toTensorList()) check(one);
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

REGISTER_ALLOCATOR(KIND, &memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("convolution_overrideable", convolve);
  m.impl("convolution_backward_overrideable", convolve_backward);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", [](const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format)
                        -> const at::Tensor& { return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

static const bool is_hooked = [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); return true; }();
