// Kills a worker after every instruction of a step, and recovers from what each leaves.
//
// A child makes the step in shared memory, one instruction at a time. What it has stored when it stops is what a
// SIGKILL there would leave, so after each instruction a copy of the memory is taken, the step finished in the copy by
// the same code, and the result compared with a step in one go. For some of those copies a second child is traced
// through the recovery likewise.
//
// Usage: sweep ISA SCENARIO SHAPE LANES EVERY NESTED_EVERY [first]
// Every EVERY-th instruction is looked at, and the recovery from every NESTED_EVERY-th of the images found is swept (0:
// of none). With "first" the sweep ends at the first divergence. Prints one line of JSON; the status is 1 if anything
// diverged, 4 if processes cannot be traced here.
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "scenario.hpp"

namespace {

using crash::Arena;
using crash::Case;

// A step that takes more instructions than this does not end.
constexpr std::uint64_t kMost = 50'000'000;

struct CannotTrace {};

struct Counts {
  std::uint64_t points = 0, images = 0, divergent = 0;
};

// A process that makes the step in an arena, stopped after every instruction of it.
class Traced {
 public:
  Traced(const Case& step, const Arena& arena) : pid_(fork()) {
    if (pid_ < 0) throw std::runtime_error("fork");
    if (pid_ == 0) {
      if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(2);
      stop_here();
      step.finish(arena.base());
      syscall(SYS_exit_group, 0);
    }
    wait();
    if (!stopped_) throw CannotTrace();
  }
  ~Traced() {
    if (!stopped_) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, &status_, 0);
  }
  Traced(const Traced&) = delete;
  Traced& operator=(const Traced&) = delete;

  // False when the step is over.
  bool advance() {
    if (ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr) != 0) throw std::runtime_error("PTRACE_SINGLESTEP");
    wait();
    if (!stopped_ && status_ != 0) throw std::runtime_error("a step ended with status " + std::to_string(status_));
    return stopped_;
  }

 private:
  static void stop_here() { raise(SIGTRAP); }

  void wait() {
    if (waitpid(pid_, &status_, 0) != pid_) throw std::runtime_error("waitpid");
    stopped_ = WIFSTOPPED(status_);
    if (stopped_ && WSTOPSIG(status_) != SIGTRAP) {
      throw std::runtime_error("a step got signal " + std::to_string(WSTOPSIG(status_)));
    }
  }

  pid_t pid_;
  int status_ = 0;
  bool stopped_ = false;
};

class Sweep {
 public:
  Sweep(const Case& step, std::uint64_t every, std::uint64_t nested_every, bool only_first)
      : step_(step),
        every_(every),
        nested_every_(nested_every),
        only_first_(only_first),
        scratch_(step.bytes()),
        inner_(step.bytes()) {}

  void run() {
    Arena outer(step_.bytes());
    outer.load(step_.begun());
    each_image(outer, first_, [&](const Arena& seen) {
      if (nested_every_ == 0 || first_.images % nested_every_ != 0 || over()) return;
      inner_.load(seen);
      each_image(inner_, nested_, [](const Arena&) {});
    });
  }

  // Whether a step in one go comes out right.
  bool undisturbed() {
    scratch_.load(step_.begun());
    step_.finish(scratch_.base());
    std::string what;
    return step_.finished(scratch_.base(), what);
  }

  const Counts& first() const { return first_; }
  const Counts& nested() const { return nested_; }
  bool diverged() const { return first_.divergent + nested_.divergent != 0; }

 private:
  bool over() const { return only_first_ && diverged(); }

  // Traces the step in an arena through to its end; calls visit(copy of the arena) for each content it has.
  template <typename Visit>
  void each_image(const Arena& arena, Counts& counts, const Visit& visit) {
    Arena seen(arena.bytes());
    Traced child(step_, arena);
    bool running = true;
    for (std::uint64_t point = 0; running && !over(); ++point) {
      if (point == kMost) throw std::runtime_error("a step does not end");
      if (point % every_ == 0) {
        ++counts.points;
        if (point == 0 || std::memcmp(seen.base(), arena.base(), arena.bytes()) != 0) {
          seen.load(arena);
          ++counts.images;
          recover(seen, counts, point);
          visit(seen);
        }
      }
      running = child.advance();
    }
    std::string what;
    if (!running && !step_.finished(arena.base(), what)) report(counts, what, "at the end");
  }

  void recover(const Arena& image, Counts& counts, std::uint64_t point) {
    scratch_.load(image);
    step_.finish(scratch_.base());
    std::string what;
    if (!step_.finished(scratch_.base(), what)) report(counts, what, "instruction " + std::to_string(point));
  }

  void report(Counts& counts, const std::string& what, const std::string& where) {
    if (counts.divergent++ < 3) std::fprintf(stderr, "divergent at %s: %s\n", where.c_str(), what.c_str());
  }

  const Case& step_;
  const std::uint64_t every_, nested_every_;
  const bool only_first_;
  Arena scratch_, inner_;
  Counts first_, nested_;
};

void print(const Counts& counts, const char* name) {
  std::printf("\"%s\": {\"points\": %llu, \"images\": %llu, \"divergent\": %llu}, ", name,
              static_cast<unsigned long long>(counts.points), static_cast<unsigned long long>(counts.images),
              static_cast<unsigned long long>(counts.divergent));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr, "usage: %s ISA SCENARIO SHAPE LANES EVERY NESTED_EVERY [first]\n", argv[0]);
    return 2;
  }
  try {
    const Case step(crash::scenario_named(argv[2], argv[3], std::strtoull(argv[4], nullptr, 10)), argv[1]);
    const bool only_first = argc > 7 && std::strcmp(argv[7], "first") == 0;
    Sweep sweep(step, std::strtoull(argv[5], nullptr, 10), std::strtoull(argv[6], nullptr, 10), only_first);
    const bool undisturbed = sweep.undisturbed();
    sweep.run();
    std::printf("{\"undisturbed\": %s, ", undisturbed ? "true" : "false");
    print(sweep.first(), "first");
    print(sweep.nested(), "nested");
    std::printf("\"blocks\": %llu}\n", static_cast<unsigned long long>(step.blocks()));
    return undisturbed && !sweep.diverged() ? 0 : 1;
  } catch (const CannotTrace&) {
    std::fprintf(stderr, "processes cannot be traced here\n");
    return 4;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
