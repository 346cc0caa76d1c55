// Makes torch take a CUDA device for present in a build for CPUs, for tensors without data.
//
// torch asks a device guard for the current device and its stream, and the CUDA hooks whether CUDA
// is there. A build for CPUs has neither. torch also asks a build for CUDA which kernel of attention
// fits the arguments. Nothing here computes: a kernel for CUDA is still missing.

#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

thread_local c10::DeviceIndex current_device = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }

  c10::Device getDevice() const override {
    return c10::Device(c10::DeviceType::CUDA, current_device);
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }

  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current_device = device.index();
    }
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    const c10::DeviceIndex index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, index));
  }

  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return 1; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  // torch 2.15 asks for these when it chooses a kernel of attention. Not all versions have them.
  long versionCuDNN() const { return 0; }
  long versionRuntimeCuDNN() const { return 0; }
  long versionCuDNNFrontend() const { return 0; }
};

// The kernel of scaled_dot_product_attention: flash where it can be used, else the one that takes
// every dtype and a bias. A GPU may have cuDNN's in place of flash, which is one operator as well.
int64_t choose_attention(const at::Tensor& q, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>& bias, double, bool,
                         std::optional<double>, bool enable_gqa) {
  const auto dtype = q.scalar_type();
  const bool is_half = dtype == at::kBFloat16 || dtype == at::kHalf;
  auto backend = at::SDPBackend::efficient_attention;
  if (is_half && !bias.has_value()) {
    backend = at::SDPBackend::flash_attention;
  } else if (enable_gqa || dtype == at::kDouble) {
    backend = at::SDPBackend::math;
  }
  return static_cast<int64_t>(backend);
}

}  // namespace

// Called once, after torch was imported.
extern "C" void install() {
  static Guard guard;
  static Hooks hooks;
  // torch keeps one object of hooks, chosen when it was built. It gets our methods in place of its
  // own: the first word of an object with virtual methods points to their table.
  auto& hooks_of_torch = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&hooks_of_torch) = *reinterpret_cast<void**>(&hooks);
  const auto cuda = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[cuda].store(&guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
}
