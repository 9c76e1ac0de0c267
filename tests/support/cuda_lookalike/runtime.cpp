// A look-alike of the CUDA runtime on the host, for PyTorch's own CUDA code where there is no device.
//
// Loaded before libcudart it answers what PyTorch asks of a device: streams are threads, device memory is memory of the
// process, and copies run late, at the speed of a link. It is strict where CUDA is forgiving or a program dies: a copy
// that crosses the end of registered memory, memory that goes while a copy there is under way, and an event on a stream
// of another device are written to $CUDA_LOOKALIKE_FAULTS. No kernel runs here, except the one that spins:
// `kernels.py` computes them. What is not defined here is answered by libcudart, which finds no driver.
//
// See the CUDA Runtime API, and for the graph captures that a call of another thread ends, cudaThreadExchangeStream-
// CaptureMode there.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::lock_guard<std::mutex>;

constexpr int kMostDevices = 8;
constexpr double kCyclesPerSecond = 1.5e9;
constexpr std::size_t kPiece = 1 << 20;  // of a copy: copies of several streams take turns on the link

std::size_t Setting(const char* name, std::size_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : otherwise;
}

int Devices() {
  static const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  static const int count = static_cast<int>(Setting("CUDA_LOOKALIKE_DEVICES", 2));
  return visible != nullptr && *visible == '\0' ? 0 : std::min(count, kMostDevices);
}

std::size_t MemoryOfDevice() {
  static const std::size_t bytes = Setting("CUDA_LOOKALIKE_MEMORY", std::size_t{2} << 30);
  return bytes;
}

void Fault(const std::string& what) {
  static std::mutex guards;
  Lock lock(guards);
  const char* path = std::getenv("CUDA_LOOKALIKE_FAULTS");
  std::FILE* file = path == nullptr ? stderr : std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file, "%s\n", what.c_str());
  if (file != stderr) std::fclose(file);
}

std::atomic<int> device_error{cudaSuccess};  // sticky: a device that has failed runs nothing any more
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
std::atomic<bool> contexts[kMostDevices];  // of devices that this process has begun to use

cudaError_t Answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t Health() { return Answer(static_cast<cudaError_t>(device_error.load())); }

// -- graph captures ------------------------------------------------------------------------------------------

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::atomic<cudaStream_t> capturing{nullptr};
std::atomic<bool> capture_ended{false};  // by a call that CUDA does not allow meanwhile

// For calls that end a capture of any thread whose mode, and that of the caller, is global.
cudaError_t MayEndCapture() {
  if (capturing != nullptr && capture_mode == cudaStreamCaptureModeGlobal) {
    capture_ended = true;
    return Answer(cudaErrorStreamCaptureUnsupported);
  }
  return Health();
}

// -- memory --------------------------------------------------------------------------------------------------

enum class Kind { kPageable, kDevice, kRegistered, kPinned };

struct Range {
  std::uintptr_t start = 0;
  std::size_t size = 0;
  Kind kind = Kind::kPageable;
  int device = -1;
};

std::mutex guards_ranges;
std::map<std::uintptr_t, Range> ranges;
std::size_t used[kMostDevices];
std::size_t locked = 0;
std::vector<std::pair<std::uintptr_t, std::size_t>> under_way;  // copies to and from host memory

std::uintptr_t AddressOf(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

Range RangeOf(const void* memory) {
  Lock lock(guards_ranges);
  auto next = ranges.upper_bound(AddressOf(memory));
  if (next == ranges.begin()) return {};
  const Range& found = std::prev(next)->second;
  return AddressOf(memory) < found.start + found.size ? found : Range{};
}

// Whether the memory is within one range, or outside of all.
bool IsWhole(const void* memory, std::size_t size, const Range& range) {
  std::uintptr_t end = AddressOf(memory) + size;
  if (range.kind != Kind::kPageable) return end <= range.start + range.size;
  Lock lock(guards_ranges);
  auto next = ranges.upper_bound(AddressOf(memory));
  return next == ranges.end() || end <= next->second.start;
}

bool IsUnderWay(const Range& range) {
  return std::any_of(under_way.begin(), under_way.end(), [&](const auto& copy) {
    return copy.first < range.start + range.size && range.start < copy.first + copy.second;
  });
}

cudaError_t Make(void** memory, std::size_t size, Kind kind) {
  if (auto error = MayEndCapture()) return error;
  contexts[current_device] = true;
  Lock lock(guards_ranges);
  const bool of_device = kind == Kind::kDevice;
  if (of_device && used[current_device] + size > MemoryOfDevice()) return Answer(cudaErrorMemoryAllocation);
  void* made = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return Answer(cudaErrorMemoryAllocation);
  if (of_device) used[current_device] += size;
  ranges[AddressOf(made)] = {AddressOf(made), size, kind, current_device};
  *memory = made;
  return cudaSuccess;
}

// -- streams and events --------------------------------------------------------------------------------------

class Stream {
 public:
  explicit Stream(int device) : device_(device), thread_([this] { Run(); }) { thread_.detach(); }

  int device() const { return device_; }

  void Add(std::function<void()> work) {
    Lock lock(guards_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }

  bool IsIdle() {
    Lock lock(guards_);
    return work_.empty();
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(guards_);
    changed_.wait(lock, [this] { return work_.empty(); });
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(guards_);
    for (;;) {
      changed_.wait(lock, [this] { return !work_.empty(); });
      std::function<void()> next = work_.front();
      lock.unlock();
      next();
      lock.lock();
      work_.pop_front();
      changed_.notify_all();
    }
  }

  const int device_;
  std::mutex guards_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;  // the first is under way
  std::thread thread_;                      // last: it uses the others
};

std::mutex guards_streams;
std::vector<Stream*> streams;  // they live as long as the process, as their threads do
Stream* default_streams[kMostDevices];

Stream* NewStream() {
  contexts[current_device] = true;
  streams.push_back(new Stream(current_device));
  return streams.back();
}

Stream* StreamOf(cudaStream_t stream) {
  if (stream != nullptr) return reinterpret_cast<Stream*>(stream);
  Lock lock(guards_streams);
  if (default_streams[current_device] == nullptr) default_streams[current_device] = NewStream();
  return default_streams[current_device];
}

void WaitForStreams() {
  std::vector<Stream*> all;
  {
    Lock lock(guards_streams);
    all = streams;
  }
  for (Stream* each : all) each->Wait();
}

class Mark {
 public:
  void Set() {
    Lock lock(guards_);
    at_ = Clock::now();
    is_set_ = true;
    changed_.notify_all();
  }

  bool IsSet() {
    Lock lock(guards_);
    return is_set_;
  }

  Clock::time_point Wait() {
    std::unique_lock<std::mutex> lock(guards_);
    changed_.wait(lock, [this] { return is_set_; });
    return at_;
  }

 private:
  std::mutex guards_;
  std::condition_variable changed_;
  bool is_set_ = false;
  Clock::time_point at_;
};

struct Event {
  int device;
  std::mutex guards;
  std::shared_ptr<Mark> mark;  // of the last record

  std::shared_ptr<Mark> Last() {
    Lock lock(guards);
    return mark;
  }
};

Event* EventOf(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

// -- copies --------------------------------------------------------------------------------------------------

void Transfer(char* target, const char* source, std::size_t size, int device, int direction) {
  static std::mutex links[kMostDevices][2];
  static const double speed = static_cast<double>(Setting("CUDA_LOOKALIKE_SPEED", 0));  // bytes a second
  for (std::size_t done = 0; done < size; done += kPiece) {
    const std::size_t piece = std::min(kPiece, size - done);
    Lock lock(links[device][direction]);
    const auto end = Clock::now() + std::chrono::duration<double>(speed > 0 ? piece / speed : 0);
    std::memcpy(target + done, source + done, piece);
    std::this_thread::sleep_until(end);
  }
}

cudaError_t Copy(void* target, const void* source, std::size_t size, Stream* stream) {
  if (auto error = Health()) return error;
  if (size == 0) return cudaSuccess;
  const Range to = RangeOf(target), from = RangeOf(source);
  if (!IsWhole(target, size, to) || !IsWhole(source, size, from)) {
    Fault("a copy crosses the end of registered or device memory");
    return Answer(cudaErrorInvalidValue);
  }
  const bool out = from.kind == Kind::kDevice;
  const int device = out ? from.device : to.kind == Kind::kDevice ? to.device : stream->device();
  const void* host = out ? target : source;
  {
    Lock lock(guards_ranges);
    under_way.emplace_back(AddressOf(host), size);
  }
  stream->Add([=] {
    if (RangeOf(target).kind == to.kind && RangeOf(source).kind == from.kind) {
      Transfer(static_cast<char*>(target), static_cast<const char*>(source), size, device, out);
    } else {
      Fault("memory went before a copy there had ended");
    }
    Lock lock(guards_ranges);
    under_way.erase(std::find(under_way.begin(), under_way.end(), std::make_pair(AddressOf(host), size)));
  });
  if (to.kind == Kind::kPageable || from.kind == Kind::kPageable) stream->Wait();
  return cudaSuccess;
}

// -- kernels -------------------------------------------------------------------------------------------------

std::mutex guards_kernels;
std::unordered_map<const void*, std::string> kernels;

cudaError_t Launch(const void* kernel, void** arguments, cudaStream_t stream) {
  Lock lock(guards_kernels);
  const std::string& name = kernels[kernel];
  if (name.find("spin_kernel") == std::string::npos) {
    Fault("kernel " + name);
    return Answer(cudaErrorNotSupported);
  }
  const auto cycles = static_cast<double>(*static_cast<std::int64_t*>(arguments[0]));
  StreamOf(stream)->Add([=] { std::this_thread::sleep_for(std::chrono::duration<double>(cycles / kCyclesPerSecond)); });
  return cudaSuccess;
}

int NoDriverCall() { return cudaErrorNotSupported; }

}  // namespace

// From now on, every call that needs a device answers this; cudaSuccess mends it.
API void cuda_lookalike_fail(int error) { device_error = error; }

// -- devices -------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = Devices();
  return Devices() > 0 ? cudaSuccess : Answer(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= Devices()) return Answer(cudaErrorInvalidDevice);
  current_device = device;
  contexts[device] = true;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* about, int device) {
  if (device < 0 || device >= Devices()) return Answer(cudaErrorInvalidDevice);
  std::memset(about, 0, sizeof *about);
  std::snprintf(about->name, sizeof about->name, "look-alike %d", device);
  about->totalGlobalMem = MemoryOfDevice();
  about->major = 9;
  about->multiProcessorCount = 132;
  about->warpSize = 32;
  about->maxThreadsPerBlock = 1024;
  about->maxThreadsPerMultiProcessor = 2048;
  about->pciBusID = 16 + device;
  about->uuid.bytes[0] = static_cast<char>(device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

API cudaError_t cudaDeviceSynchronize() {
  if (auto error = MayEndCapture()) return error;
  WaitForStreams();
  return cudaSuccess;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    default: return "an error of the look-alike";
  }
}

API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// -- memory --------------------------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** memory, std::size_t size) { return Make(memory, size, Kind::kDevice); }

API cudaError_t cudaHostAlloc(void** memory, std::size_t size, unsigned) { return Make(memory, size, Kind::kPinned); }

API cudaError_t cudaFree(void* memory) {
  if (auto error = MayEndCapture()) return error;
  if (memory == nullptr) return cudaSuccess;
  WaitForStreams();
  const Range range = RangeOf(memory);
  Lock lock(guards_ranges);
  if (range.kind == Kind::kDevice) used[range.device] -= range.size;
  ranges.erase(range.start);
  ::munmap(memory, range.size);
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }

API cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  Lock lock(guards_ranges);
  *free = MemoryOfDevice() - used[current_device];
  *total = MemoryOfDevice();
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* about, const void* memory) {
  const Range range = RangeOf(memory);
  std::memset(about, 0, sizeof *about);
  about->type = range.kind == Kind::kPageable ? cudaMemoryTypeUnregistered
                : range.kind == Kind::kDevice ? cudaMemoryTypeDevice
                                              : cudaMemoryTypeHost;
  about->device = range.device;
  if (range.kind != Kind::kPageable) about->devicePointer = const_cast<void*>(memory);
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* memory, std::size_t size, unsigned) {
  static const std::size_t lockable = Setting("CUDA_LOOKALIKE_LOCKABLE", SIZE_MAX);
  if (auto error = MayEndCapture()) return error;
  contexts[current_device] = true;
  if (RangeOf(memory).kind != Kind::kPageable || !IsWhole(memory, size, {})) {
    return Answer(cudaErrorHostMemoryAlreadyRegistered);
  }
  Lock lock(guards_ranges);
  if (size > lockable - locked) return Answer(cudaErrorMemoryAllocation);
  for (std::size_t at = 0; at < size; at += 4096) {
    static_cast<void>(static_cast<volatile char*>(memory)[at]);  // SIGBUS where no memory is reserved
  }
  locked += size;
  ranges[AddressOf(memory)] = {AddressOf(memory), size, Kind::kRegistered, current_device};
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* memory) {
  if (auto error = MayEndCapture()) return error;
  const Range range = RangeOf(memory);
  if (range.kind != Kind::kRegistered || range.start != AddressOf(memory)) {
    return Answer(cudaErrorHostMemoryNotRegistered);
  }
  Lock lock(guards_ranges);
  if (IsUnderWay(range)) Fault("memory was unregistered before a copy there had ended");
  static_cast<void>(*static_cast<volatile char*>(memory));  // SIGSEGV where it was unmapped before
  locked -= range.size;
  ranges.erase(range.start);
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t size, cudaMemcpyKind, cudaStream_t on) {
  return Copy(target, source, size, StreamOf(on));
}

API cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, std::size_t size, cudaStream_t on) {
  return Copy(target, source, size, StreamOf(on));
}

API cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t size, cudaStream_t on) {
  if (auto error = Health()) return error;
  StreamOf(on)->Add([=] { std::memset(memory, value, size); });
  return cudaSuccess;
}

// -- streams -------------------------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  if (auto error = Health()) return error;
  Lock lock(guards_streams);
  *stream = reinterpret_cast<cudaStream_t>(NewStream());
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (auto error = MayEndCapture()) return error;
  StreamOf(stream)->Wait();
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (auto error = MayEndCapture()) return error;
  return StreamOf(stream)->IsIdle() ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (auto mark = EventOf(event)->Last()) StreamOf(stream)->Add([mark] { mark->Wait(); });
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  capture_ended = false;
  capturing = stream;
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  capturing = nullptr;
  *graph = reinterpret_cast<cudaGraph_t>(1);
  return capture_ended ? Answer(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool is = stream != nullptr && stream == capturing;
  *status = is ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t**,
#if CUDART_VERSION >= 13000
                                         const cudaGraphEdgeData**,
#endif
                                         std::size_t* dependencies) {
  if (id != nullptr) *id = 1;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = 0;
  return cudaStreamIsCapturing(stream, status);
}

// It has nothing in it, whatever it says: what is launched meanwhile runs at once, in `kernels.py`.
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, std::size_t* count) {
  *count = 1;
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t*, cudaGraph_t, unsigned long long) { return cudaSuccess; }

API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

// -- events --------------------------------------------------------------------------------------------------

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (auto error = Health()) return error;
  contexts[current_device] = true;
  *event = reinterpret_cast<cudaEvent_t>(new Event{current_device, {}, {}});
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete EventOf(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  if (auto error = Health()) return error;
  Stream* at = StreamOf(stream);
  if (at->device() != EventOf(event)->device) {
    Fault("an event of one device was recorded on a stream of another");
    return Answer(cudaErrorInvalidResourceHandle);
  }
  auto mark = std::make_shared<Mark>();
  {
    Lock lock(EventOf(event)->guards);
    EventOf(event)->mark = mark;
  }
  at->Add([mark] { mark->Set(); });
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (auto error = MayEndCapture()) return error;
  auto mark = EventOf(event)->Last();
  return mark == nullptr || mark->IsSet() ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto error = MayEndCapture()) return error;
  if (auto mark = EventOf(event)->Last()) mark->Wait();
  return Health();
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const auto took = EventOf(end)->Last()->Wait() - EventOf(begin)->Last()->Wait();
  *milliseconds = std::chrono::duration<float, std::milli>(took).count();
  return cudaSuccess;
}

// -- kernels -------------------------------------------------------------------------------------------------

API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}

API void __cudaUnregisterFatBinary(void**) {}

API void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  Lock lock(guards_kernels);
  kernels[kernel] = name;
}

API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, std::size_t, cudaStream_t stream) {
  return Launch(kernel, arguments, stream);
}

API cudaError_t __cudaGetKernel(void** handle, const void* kernel) {
  *handle = const_cast<void*>(kernel);
  return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(void* kernel, dim3, dim3, void** arguments, std::size_t, cudaStream_t stream) {
  return Launch(kernel, arguments, stream);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* about, const void*) {
  std::memset(about, 0, sizeof *about);
  about->maxThreadsPerBlock = 1024;
  about->binaryVersion = 90;
  about->ptxVersion = 90;
  return cudaSuccess;
}

// -- the driver's own interface ------------------------------------------------------------------------------

API int cuThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return cudaThreadExchangeStreamCaptureMode(mode);
}

API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  *active = contexts[device];
  return 0;
}

API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = ::dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = reinterpret_cast<void*>(NoDriverCall);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
