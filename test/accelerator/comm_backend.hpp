// The communicator's collectives, as c10d calls them.
#pragma once
#include "comm.hpp"

namespace sim {

class Comm final : public c10d::Backend {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;
  using Type = c10d::OpType;
  using Tensors = std::vector<Tensor>;

  Comm(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size),
        link_(std::make_shared<Link>(gloo, rank, size)),
        timeout_(gloo->getBackendOptions()->timeout) {
    static std::atomic<int> made{0};
    number_ = kFirstOfComms + made++;
  }
  ~Comm() override {
    Locked lock(world());
    for (int device = 0; device < kDevices; device++) {
      auto found = streams().find({device, number_});
      if (found == streams().end()) continue;
      found->second->close();
      streams().erase(found);
    }
  }
  const std::string getBackendName() const override { return "simcomm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<c10d::Backend::Options>("simcomm", timeout_);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout, link_->gloo().setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  c10d::ErrorType getError() override {
    return link_->ended().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
  }

  // End what is under way: its stream no longer waits for peers, and streams that wait for it go on.
  void abort() override { link_->end("the communicator was aborted"); }
  // As NCCL's, shutdown waits for the communicator's own kernels, peers' part in them included.
  void shutdown() override {
    std::vector<MarkPtr> marks;
    {
      Locked lock(world());
      for (auto& [key, stream] : streams())
        if (key.second == number_) marks.push_back(stream->mark());
    }
    for (auto& mark : marks) host_wait(mark);
    link_->end("the communicator was shut down");
  }

  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto op = reduce_op(options.reduceOp, tensors);
    return each(
        Type::ALLREDUCE, tensors, tensors, options.asyncOp,
        [op](Link& link, const Tensor& to, const Tensor& from) { to.copy_(link.reduced(from, op, 1, 0)); });
  }
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto op = reduce_op(options.reduceOp, tensors);
    int root = int(options.rootRank);
    return each(Type::REDUCE, tensors, tensors, options.asyncOp,
                [op, root](Link& link, const Tensor& to, const Tensor& from) {
                  Tensor sum = link.reduced(from, op, 2, root);
                  if (link.rank == root) to.copy_(sum);
                });
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    int root = int(options.rootRank);
    return each(Type::BROADCAST, tensors, tensors, options.asyncOp,
                [root](Link& link, const Tensor& to, const Tensor& from) {
                  Tensor sent = link.gathered(from, 3, root)[root];
                  if (link.rank != root) to.copy_(sent);
                });
  }
  Works _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Tensors outs{out}, ins{in};
    return reduce_scatter_tensor_coalesced(outs, ins, options);
  }
  Works reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                        const c10d::ReduceScatterOptions& options) override {
    auto op = reduce_op(options.reduceOp, ins);
    for (size_t i = 0; i < ins.size(); i++) check_sizes(ins[i], outs[i]);
    return each(Type::_REDUCE_SCATTER_BASE, outs, ins, options.asyncOp,
                [op](Link& link, const Tensor& to, const Tensor& from) {
                  Tensor sum = link.reduced(from, op, 4, 0).view(-1);
                  to.copy_(sum.narrow(0, link.rank * to.numel(), to.numel()).view(to.sizes()));
                });
  }
  Works reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                       const c10d::ReduceScatterOptions& options) override {
    auto op = reduce_op(options.reduceOp, ins.at(0));
    check_parts(ins.at(0), outs.at(0));
    return enqueue(Type::REDUCE_SCATTER, outs, ins[0], options.asyncOp,
                   [op](Link& link, Tensors& to, Tensors& from) {
                     to[0].copy_(link.reduced(at::stack(from), op, 5, 0)[link.rank]);
                   });
  }
  Works _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    Tensors outs{out}, ins{in};
    return allgather_into_tensor_coalesced(outs, ins, options);
  }
  Works allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                        const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < ins.size(); i++) check_sizes(outs[i], ins[i]);
    return each(Type::_ALLGATHER_BASE, outs, ins, options.asyncOp,
                [](Link& link, const Tensor& to, const Tensor& from) {
                  to.view(-1).copy_(at::cat(link.gathered(from.reshape({-1}), 6, 0)));
                });
  }
  Works allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    check_parts(outs.at(0), ins.at(0));
    return enqueue(Type::ALLGATHER, outs[0], ins, options.asyncOp,
                   [](Link& link, Tensors& to, Tensors& from) {
                     auto all = link.gathered(from[0], 7, 0);
                     for (size_t i = 0; i < to.size(); i++) to[i].copy_(all[i].view(to[i].sizes()));
                   });
  }
  Works gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) override {
    Tensors out = getRank() == options.rootRank ? outs.at(0) : Tensors();
    if (!out.empty()) check_parts(out, ins.at(0));
    int root = int(options.rootRank);
    return enqueue(Type::GATHER, out, ins, options.asyncOp, [root](Link& link, Tensors& to, Tensors& from) {
      auto all = link.gathered(from[0], 8, root);
      for (size_t i = 0; i < to.size(); i++) to[i].copy_(all[i]);
    });
  }
  Works scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    Tensors in = getRank() == options.rootRank ? ins.at(0) : Tensors();
    if (!in.empty()) check_parts(in, outs.at(0));
    int root = int(options.rootRank);
    return enqueue(Type::SCATTER, outs, in, options.asyncOp, [root](Link& link, Tensors& to, Tensors& from) {
      Tensor parts = from.empty() ? at::stack(Tensors(link.size, to[0])) : at::stack(from);
      to[0].copy_(link.gathered(parts, 9, root)[root][link.rank]);
    });
  }
  Works alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits,
                      std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) override {
    Tensors outs{out}, ins{in};
    auto scaled = [](std::vector<int64_t> splits, const Tensor& of) {
      int64_t row = of.dim() && of.size(0) ? int64_t(of.nbytes()) / of.size(0) : of.element_size();
      for (auto& split : splits) split *= row;
      return splits;
    };
    return enqueue(
        Type::ALLTOALL_BASE, outs, ins, options.asyncOp,
        [os = scaled(out_splits, out), is = scaled(in_splits, in)](Link& link, Tensors& to, Tensors& from) {
          Tensor sent = Link::bytes_of(from[0]), received = at::empty({int64_t(to[0].nbytes())}, at::kByte);
          auto os_ = os, is_ = is;
          link.await(link.gloo().alltoall_base(received, sent, os_, is_));
          Link::put(received, to[0]);
        });
  }
  Works send(Tensors& tensors, int to, int tag) override {
    return enqueue(Type::SEND, {}, tensors, true, [to, tag](Link& link, Tensors&, Tensors& from) {
      Tensors bytes{Link::bytes_of(from[0])};
      link.await_peer(link.gloo().send(bytes, to, tag));
    });
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    return enqueue(Type::RECV, tensors, {}, true, [from, tag](Link& link, Tensors& to, Tensors&) {
      Tensors bytes{at::empty({int64_t(to[0].nbytes())}, at::kByte)};
      link.await_peer(link.gloo().recv(bytes, from, tag));
      Link::put(bytes[0], to[0]);
    });
  }
  Works barrier(const c10d::BarrierOptions&) override {
    Tensors one{at::zeros({1}, at::TensorOptions(Guard().getDevice()))};
    return enqueue(Type::BARRIER, one, one, true,
                   [](Link& link, Tensors&, Tensors& from) { link.gathered(from[0], 10, 0); });
  }

 private:
  using Kernel = std::function<void(Link&, Tensors& to, Tensors& from)>;

  static c10d::ReduceOp::RedOpType reduce_op(const c10d::ReduceOp& op, const Tensors& tensors) {
    TORCH_CHECK(op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG,
                "simcomm: only ReduceOp.SUM and ReduceOp.AVG, not number ", int(op.op_));
    for (const Tensor& tensor : tensors)
      TORCH_CHECK(op.op_ == c10d::ReduceOp::SUM || tensor.is_floating_point(), "simcomm: no ReduceOp.AVG of ",
                  tensor.scalar_type());
    return op.op_;
  }
  void check_sizes(const Tensor& whole, const Tensor& part) const {
    TORCH_CHECK(whole.numel() == part.numel() * getSize() && whole.scalar_type() == part.scalar_type(),
                "simcomm: the whole must be world_size times the size of a rank's part, of the same dtype");
  }
  void check_parts(const Tensors& parts, const Tensor& like) const {
    TORCH_CHECK(parts.size() == size_t(getSize()), "simcomm: one tensor for each rank");
    for (const Tensor& part : parts)
      TORCH_CHECK(part.numel() == like.numel() && part.scalar_type() == like.scalar_type(),
                  "simcomm: tensors of one size and dtype");
  }
  template <typename F>
  Works each(Type type, const Tensors& outs, const Tensors& ins, bool async, F call) {
    return enqueue(type, outs, ins, async, [call](Link& link, Tensors& to, Tensors& from) {
      for (size_t i = 0; i < to.size(); i++) call(link, to[i], from[i]);
    });
  }
  static c10::Device check_tensors(const Tensors& tensors) {
    TORCH_CHECK(!tensors.empty(), "simcomm: no tensors");
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.is_privateuseone(), "simcomm: tensors must be on the device, not ", tensor.device());
      TORCH_CHECK(tensor.device() == tensors[0].device(), "simcomm: tensors on two devices");
      TORCH_CHECK(tensor.is_contiguous(), "simcomm: Tensors must be contiguous");
      TORCH_CHECK(!tensor.is_complex(), "simcomm: dtype ", tensor.scalar_type(),
                  " is not supported, as in NCCL");
      TORCH_CHECK(!tensor.is_sparse(), "simcomm: Tensors must be dense");
    }
    return tensors[0].device();
  }
  Works enqueue(Type type, const Tensors& outs, const Tensors& ins, bool async, Kernel kernel) {
    Failure::one().check();
    link_->check();
    Origin origin;
    auto held = std::make_shared<Tensors>(ins);
    held->insert(held->end(), outs.begin(), outs.end());
    c10::Device device = check_tensors(*held);
    Uses uses;
    Tensors to, from;
    for (const Tensor& tensor : ins) add_ranges(tensor, uses.reads), from.push_back(lowered(tensor));
    for (const Tensor& tensor : outs) add_ranges(tensor, uses.writes), to.push_back(lowered(tensor));
    auto name = c10d::opTypeToString(type);
    MarkPtr done;
    std::vector<Shelved> over;  // dies after the lock is released
    {
      Locked lock(world());
      Stream& stream = stream_of(device.index(), number_);
      stream.await(here(device).mark());
      // All ranks call gloo in one order, also where a rank's calls are on two devices.
      if (last_ && last_device_ != device.index()) stream.add([last = last_] { last->wait(); });
      stream.launch(name, uses, [link = link_, name, to, from, kernel]() mutable {
        link->run(name.c_str(), to, [&] { kernel(*link, to, from); });
      });
      last_ = done = stream.mark(), last_device_ = device.index();
      if (!async) here(device).await(done);  // NCCL runs it on the current stream
      unshelve(over);
      if (async) shelf_.push_back({done, held, {stream.agent, stream.clock.ticks[stream.agent], nullptr}});
    }
    auto work =
        c10::make_intrusive<CommWork>(done, Guard::named(device, number_), held, outs, link_, type, ++calls_);
    if (!async) held->clear();
    return work;
  }
  // Tensors of a work that nobody waits for live until its kernel is over, which the communicator's watchdog
  // sees.
  struct Shelved {
    MarkPtr done;
    Held held;
    Access kernel;
  };
  void unshelve(std::vector<Shelved>& over) {
    std::erase_if(shelf_, [&](Shelved& one) {
      if (!one.done->is_reached()) return false;
      Clock kernel;
      kernel.ticks.resize(one.kernel.agent + 1);
      kernel.ticks[one.kernel.agent] = one.kernel.tick;
      std::vector<Range> ranges;
      for (const Tensor& tensor : *one.held) add_ranges(tensor, ranges);
      for (const Range& range : ranges) accesses().forget(range, kernel);
      over.push_back(std::move(one));
      return true;
    });
  }

  LinkPtr link_;
  std::chrono::milliseconds timeout_;
  int64_t number_;
  std::atomic<uint64_t> calls_{0};
  MarkPtr last_;
  int last_device_ = -1;
  std::vector<Shelved> shelf_;
};

}  // namespace sim
