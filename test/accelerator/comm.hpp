// A communicator with NCCL's semantics, over gloo: its collectives run on a stream of its own, in the order
// of the calls, and return at once; wait() makes the current stream wait.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "kernels.hpp"

namespace sim {

// A communicator as its kernels see it: gloo, the order of the calls, and how it ended.
class Link {
 public:
  const int rank, size;
  Link(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : rank(rank), size(size), gloo_(std::move(gloo)) {}

  // Run a kernel that talks to the other ranks. What it was to write is NaN if it cannot.
  void run(const char* what, const std::vector<Tensor>& outputs, const std::function<void()>& call) {
    try {
      check();
      call();
    } catch (const std::exception& error) {
      end(std::string(what) + ": " + error.what());
      for (const Tensor& tensor : outputs) memset(tensor.mutable_data_ptr(), kPoison, tensor.nbytes());
    }
  }
  // Wait for what gloo does, unless the communicator is aborted. Gloo then keeps waiting, with memory of its
  // own.
  void await(const c10::intrusive_ptr<c10d::Work>& work) {
    auto done = std::make_shared<std::atomic<bool>>(false);
    auto self = shared_;
    work->getFuture()->addCallback([done, self](c10::ivalue::Future&) {
      std::lock_guard lock(self->mutex);
      *done = true;
      self->changed.notify_all();
    });
    {
      std::unique_lock lock(shared_->mutex);
      shared_->changed.wait(lock, [&] { return *done || !shared_->ended.empty(); });
      if (!*done) {
        // Gloo's destructor would wait for its thread, which waits for a peer that may be lost.
        new c10::intrusive_ptr<c10d::Backend>(gloo_);
        TORCH_CHECK(false, shared_->ended);
      }
    }
    work->wait();
  }
  // Send and receive block in gloo itself: what aborts them is their own abort().
  void await_peer(const c10::intrusive_ptr<c10d::Work>& work) {
    {
      std::lock_guard lock(shared_->mutex);
      peer_work_ = work;
    }
    check();
    work->wait();
    std::lock_guard lock(shared_->mutex);
    peer_work_.reset();
  }
  void end(const std::string& reason) {
    c10::intrusive_ptr<c10d::Work> peer_work;
    {
      std::lock_guard lock(shared_->mutex);
      if (!shared_->ended.empty()) return;
      shared_->ended = reason;
      shared_->changed.notify_all();
      peer_work.swap(peer_work_);
    }
    if (peer_work) peer_work->abort();
  }
  std::string ended() {
    std::lock_guard lock(shared_->mutex);
    return shared_->ended;
  }
  void check() {
    auto reason = ended();
    if (!reason.empty()) C10_THROW_ERROR(DistBackendError, "simcomm: " + reason);
  }
  c10d::Backend& gloo() { return *gloo_; }

  static Tensor bytes_of(const Tensor& of) {  // of memory that gloo may have for as long as it likes
    Tensor own = of.clone(at::MemoryFormat::Contiguous);
    return at::from_blob(
        own.data_ptr(), {int64_t(own.nbytes())}, [own](void*) {}, at::TensorOptions(at::kByte));
  }
  static void put(const Tensor& bytes, const Tensor& to) {
    memcpy(to.mutable_data_ptr(), bytes.const_data_ptr(), to.nbytes());
  }
  // Each rank's tensor, in the order of the ranks. `what` must be the same on all.
  std::vector<Tensor> gathered(const Tensor& mine, int kind, int detail) {
    agree(kind, mine, detail);
    std::vector<Tensor> all;
    for (const Tensor& bytes : gathered_bytes(bytes_of(mine)))
      all.push_back(at::from_blob(bytes.data_ptr(), mine.sizes(), [bytes](void*) {}, mine.options()));
    return all;
  }
  // NCCL would hang, or give one rank's half of another collective: here the communicator fails.
  void agree(int kind, const Tensor& like, int detail) {
    Tensor mine =
        at::tensor({int64_t(kind), like.numel(), int64_t(like.scalar_type()), int64_t(detail)}, at::kLong);
    auto all = gathered_bytes(bytes_of(mine));
    for (int other = 0; other < size; other++) {
      const auto* theirs = static_cast<const int64_t*>(all[other].const_data_ptr());
      const auto* ours = mine.const_data_ptr<int64_t>();
      if (std::equal(ours, ours + 4, theirs)) continue;
      auto text = [](const int64_t* of) {
        return "collective " + std::to_string(of[0]) + " of " + std::to_string(of[1]) + " elements of type " +
               c10::toString(at::ScalarType(of[2])) + " with option " + std::to_string(of[3]);
      };
      std::string mismatch = "the ranks' collectives do not match: rank " + std::to_string(rank) + " calls " +
                             text(ours) + ", rank " + std::to_string(other) + " " + text(theirs);
      {
        Locked lock(world());
        report("mismatch: " + mismatch);
      }
      TORCH_CHECK(false, mismatch);
    }
  }
  // The sum over the ranks, in their order, rounded after each as NCCL does; of an average, each is scaled
  // first.
  Tensor reduced(const Tensor& mine, c10d::ReduceOp::RedOpType op, int kind, int detail) {
    Tensor scaled = op == c10d::ReduceOp::AVG ? mine * (1.0 / size) : mine;
    auto all = gathered(scaled, kind, detail * 16 + op);
    Tensor sum = all[0].clone();
    for (int other = 1; other < size; other++) sum.add_(all[other]);
    return sum;
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::string ended;  // why
  };
  std::vector<Tensor> gathered_bytes(const Tensor& mine) {
    std::vector<std::vector<Tensor>> outputs(1);
    for (int other = 0; other < size; other++) outputs[0].push_back(at::empty_like(mine));
    std::vector<Tensor> inputs{mine};
    await(gloo_->allgather(outputs, inputs));
    return outputs[0];
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Work> peer_work_;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};
using LinkPtr = std::shared_ptr<Link>;

using Held = std::shared_ptr<std::vector<Tensor>>;

struct CommWork final : c10d::Work {
  MarkPtr done;
  c10::Stream stream;  // of the communicator
  Held held;           // as NCCL's until wait()
  std::vector<Tensor> outputs;
  LinkPtr link;
  uint64_t number;
  bool host_waits;  // for a barrier
  CommWork(MarkPtr done, c10::Stream stream, Held held, std::vector<Tensor> outputs, LinkPtr link,
           c10d::OpType type, uint64_t number)
      : Work(link->rank, type),
        done(done),
        stream(stream),
        held(held),
        outputs(outputs),
        link(link),
        number(number),
        host_waits(type == c10d::OpType::BARRIER) {}
  bool isCompleted() override { return host_asks(done); }
  bool isSuccess() const override { return link->ended().empty(); }
  std::exception_ptr exception() const override {
    auto reason = link->ended();
    return reason.empty() ? nullptr : std::make_exception_ptr(std::runtime_error("simcomm: " + reason));
  }
  std::vector<Tensor> result() override { return outputs; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (host_waits) host_wait(done);
    return true;
  }
  void synchronize() override {
    {
      Locked lock(world());
      here(stream.device()).await(done);
    }
    std::vector<Tensor> released;
    std::swap(released, *held);
  }
  void blockCurrentStream() override { synchronize(); }
  uint64_t getSequencenumber() const override { return number; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {  // complete, on the communicator's stream
    auto type = c10::ListType::create(c10::TensorType::get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{stream.device()});
    auto before = Guard().exchangeStream(stream);
    future->markCompleted(c10::IValue(outputs));
    Guard().exchangeStream(before);
    return future;
  }
};

}  // namespace sim
