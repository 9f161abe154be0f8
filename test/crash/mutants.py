"""Variants of the redo log that are wrong, each of which the sweep has to notice.

A mutant is the shipped redo_log.inl (or another file) with some of its text replaced. Most are right as long as nobody
is killed.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL, IN_REGISTERS = "kernels/redo_log.inl", "kernels/block_in_registers.inl"
CODES_IN_REGISTERS = "kernels/block8_in_registers.inl"
BEGIN = "  Staging staging;\n"
BEGUN = "  const std::int64_t begun = done;\n"
SUCCESSOR = "  if (done > 0 && done <= count) {\n"
SUCCESSOR_COPIES = "    copy_home(run_in_place(step.base, *block.run), block, lane.logs[(done + 1) % 2]);\n"
RUN = "    const UpdateRun run = run_in_place(step.base, *from);\n"
SCALARS = "    const StepScalars& scalars = step.scalars[from->scalars];\n"
NEXT_SCALARS = "    if (begun > 0) scalars.now = scalars.next;\n"
LOG_BLOCKS = "template <typename Stepper>\nvoid log_blocks_of("
BEFORE = "  std::int64_t nonfinite = done > 0 ? lane.logs[(done + 1) % 2].nonfinite : 0;\n"
LOOP = "  for (; done < end; at.next()) {\n"
LOG = "    LogBlock& log = lane.logs[done % 2];\n"
COMPUTE = "    nonfinite += at.step(log);\n"
COUNT = "    log.nonfinite = nonfinite;\n"
COMMIT = "    commit(lane, progress_word(sequence, ++done));\n"
HOME = "    at.home(log);\n"
RETURN = "  return count > 0 ? lane.logs[(count + 1) % 2].nonfinite : 0;\n"
REGISTER_MOMENT = "    arrays.exp_avg = log.exp_avg;\n"
REGISTER_REMAINDER = "    arrays.remainder = log.remainder;\n"
REGISTER_CODES = "    move_and_encode(home, next, base, base_sq, to);\n"
# Of compact forms: where arrays lie in the log, and how they go home from it.
LOGGED_MOMENT = "biased<void>(log.exp_avg, begin, moment, home.exp_avg)"
LOGGED_REMAINDER = "biased<std::int16_t>(log.remainder, begin, 2, home.remainder)"
LOGGED_BASE = "biased<std::uint16_t>(log.exp_avg_base, begin / kCutNumel, 2, home.exp_avg_base)"
MOMENT_HOME = "  copy_array(log.exp_avg, begin, n, moment, home.exp_avg);\n"
REMAINDER_HOME = "  copy_array(log.remainder, begin, n, 2, home.remainder);\n"
BASE_HOME = "  copy_array(log.exp_avg_base, first, count, 2, home.exp_avg_base);\n"
COMPLETED = "  control.completed.store(sequence, std::memory_order_release);\n"
LANES = "  share_out(lanes, head.numel > kAloneNumel ? threads : 1, work);\n"
DRAFTS_DONE = "    control.drafts_done.store(done, std::memory_order_release);\n"
MAKE_DRAFTS = "      batch.make(arena, mapped_bytes, threads);\n"
DRAFTED = "    stream_block(to, moments, {all.run, begin, end_of_block(all.end, begin)}, fresh);\n"
DRAFT_WIDTH = "moment = bytes_of(moments);\n"
DRAFT_BASE = "  copy_array(fresh.exp_avg_base, first, count, 2, to.exp_avg_base);\n"
DRAFT_MOMENT = "  stream_array(fresh.exp_avg, begin, n, moment, to.exp_avg);\n"
LAST_SCALE = "arena.drafts()[done - origin - 1].run.to.exp_avg_base"
DRAFT_TO = "    draft.run = {translated(given), offsets_of(given.to, given), scalars};\n"
DRAFT_ENDS = "range.last * kLogNumel < run.numel ? range.last * kLogNumel : run.numel;\n"


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        name: what is wrong.
        replacements: texts and what comes in their place.
        deaths: how many it takes to show; with 0, a step that nobody disturbs is wrong.
        file: path below native/.
        shape, scenario: of the sweep that notices.
    """

    name: str
    replacements: tuple[tuple[str, str], ...]
    deaths: int = 1
    file: str = PROTOCOL
    shape: str = "short"
    scenario: str = "bf16"

    def applied(self, source: str) -> str:
        """The mutated source. Raises ValueError unless every text is there exactly once."""
        for old, new in self.replacements:
            if source.count(old) != 1:
                raise ValueError(f"mutant {self.name!r} does not apply: {source.count(old)} times {old!r}")
            source = source.replace(old, new)
        return source


def _left_out(array: str, now: str) -> str:
    """What does ``now`` with an array's first element taken out, and puts it in afterwards."""
    return (
        f"    volatile std::uint16_t* const late = {array};\n"
        f"    const std::uint16_t value = *late;\n    *late = 0;\n{now}    *late = value;\n"
    )


# Of 8-bit and bf16 moments and split masters. The gradients of "compact" are none that the usual loops take.
COMPACT = (
    Mutant("codes are written home at once", ((LOGGED_MOMENT, "home.exp_avg"), (MOMENT_HOME, "")), scenario="compact"),
    Mutant(
        "a scale is written home before its codes are in the log",
        ((LOGGED_BASE, "home.exp_avg_base"), (BASE_HOME, "")),
        scenario="compact",
    ),
    Mutant(
        "a block is committed before its scale is in the log",
        ((COMMIT, _left_out("log.exp_avg_base", COMMIT)),),
        scenario="compact",
    ),
    Mutant(
        "a successor does not copy the scale of the committed block home",
        (
            (
                SUCCESSOR_COPIES,
                "    UpdateRun codes = run_in_place(step.base, *block.run);\n"
                "    codes.from.exp_avg_base = nullptr;\n"
                "    copy_home(codes, block, lane.logs[(done + 1) % 2]);\n",
            ),
        ),
        scenario="compact",
    ),
    Mutant(
        "a successor copies codes home as if they were fp32",
        (
            (
                SUCCESSOR_COPIES,
                "    UpdateRun wide = run_in_place(step.base, *block.run);\n"
                "    wide.moment_format = Format::kFloat32;\n"
                "    copy_home(wide, block, lane.logs[(done + 1) % 2]);\n",
            ),
        ),
        scenario="compact",
    ),
    Mutant(
        "the low half of a split master is written home at once",
        ((LOGGED_REMAINDER, "home.remainder"), (REMAINDER_HOME, "")),
        scenario="compact",
    ),
    Mutant(
        "the low half of a split master of the usual runs is not in the log",
        ((REGISTER_REMAINDER, "    arrays.remainder = reinterpret_cast<std::int16_t*>(log.max_exp_avg_sq);\n"),),
        file=IN_REGISTERS,
        scenario="split",
    ),
    Mutant(
        "a scale of the usual runs is written home at once",
        ((REGISTER_CODES, REGISTER_CODES + "    *home.exp_avg_base = base;\n"),),
        file=CODES_IN_REGISTERS,
        scenario="blocks",
    ),
    Mutant(
        "codes of the usual runs are written home at once",
        ((REGISTER_CODES, REGISTER_CODES + "    __builtin_memcpy(home.exp_avg, to.exp_avg, kCutNumel);\n"),),
        file=CODES_IN_REGISTERS,
        scenario="blocks",
    ),
    Mutant(
        "moments in bf16 are written home at once",
        ((LOGGED_MOMENT, "home.exp_avg"), (MOMENT_HOME, "")),
        scenario="halves",
    ),
    Mutant(
        "a draft keeps fp32 codes",
        ((DRAFT_WIDTH, "moment = bytes_of(Format::kFloat32);\n  (void)moments;\n"),),
        deaths=0,
        file="kernels/draft.inl",
        shape="drafted",
        scenario="compact",
    ),
    Mutant("a draft leaves its scales out", ((DRAFT_BASE, ""),), 0, "kernels/draft.inl", "drafted", "compact"),
    Mutant(
        "drafts are done before their last scale is there",
        (
            (
                DRAFTS_DONE,
                _left_out(f"reinterpret_cast<std::uint16_t*>(arena.base() + {LAST_SCALE})", DRAFTS_DONE),
            ),
        ),
        file="worker/draft_queue.cpp",
        shape="drafted",
        scenario="compact",
    ),
)
FULL = (
    Mutant("a block is committed before it is computed", ((COMPUTE + COUNT + COMMIT, COMMIT + COMPUTE + COUNT),)),
    Mutant("a block is committed before its count is in the log", ((COUNT + COMMIT, COMMIT + COUNT),)),
    Mutant(
        "a block is committed before the last one is home",
        (
            (LOOP, "  Stepper late = at;\n  const std::int64_t first = done;\n" + LOOP),
            (
                HOME + "  }\n",
                "    if (done > first + 1) late.home(lane.logs[done % 2]);\n"
                "    __builtin_memcpy(static_cast<void*>(&late), &at, sizeof(late));\n  }\n"
                "  if (done > first) late.home(lane.logs[(done + 1) % 2]);\n",
            ),
        ),
    ),
    Mutant(
        "the last block is said to be home before it is",
        ((HOME, "    if (done == end) commit(lane, progress_word(sequence, done + 1));\n" + HOME),),
    ),
    Mutant(
        "one log for all blocks",
        (
            (SUCCESSOR_COPIES, SUCCESSOR_COPIES.replace("(done + 1) % 2", "0")),
            (LOG, LOG.replace("done % 2", "0")),
            (BEFORE, BEFORE.replace("(done + 1) % 2", "0")),
            (RETURN, RETURN.replace("(count + 1) % 2", "0")),
        ),
    ),
    Mutant("a block goes home before it is committed", ((COMMIT + HOME, HOME + COMMIT),)),
    Mutant(
        "a moment is written home at once",
        (
            (LOGGED_MOMENT, "home.exp_avg"),
            (MOMENT_HOME, ""),
        ),
    ),
    Mutant(
        "a moment of the usual runs is written home at once",
        ((REGISTER_MOMENT, REGISTER_MOMENT.replace("log.", "home_arrays.")),),
        file=IN_REGISTERS,
    ),
    Mutant(
        "a moment of the usual runs is not in the log",
        ((REGISTER_MOMENT, REGISTER_MOMENT.replace("log.exp_avg", "log.max_exp_avg_sq")),),
        file=IN_REGISTERS,
    ),
    Mutant(
        "a successor begins a block early", ((SUCCESSOR, "  if (0 < done && done <= count) --done;\n" + SUCCESSOR),)
    ),
    Mutant("a successor begins a block late", ((SUCCESSOR, "  if (0 < done && done < count) ++done;\n" + SUCCESSOR),)),
    Mutant("a successor does not copy the committed block home", ((SUCCESSOR_COPIES, "    (void)block;\n"),)),
    Mutant(
        "a successor does not write out of its first run",
        (
            (BEGIN, BEGUN + BEGIN),
            (RUN, RUN.replace("const ", "") + "    if (0 < done && done == begun) run.out = nullptr;\n"),
        ),
    ),
    Mutant(
        "gradients that are not finite are counted again",
        (
            (BEFORE, BEFORE.replace("(done + 1) % 2", "0")),
            (COUNT, COUNT.replace("log.", "lane.logs[0].")),
            (RETURN, RETURN.replace("(count + 1) % 2", "0")),
        ),
    ),
    Mutant(
        "gradients that a dead worker counted are forgotten",
        ((SUCCESSOR, SUCCESSOR + "    lane.logs[(done + 1) % 2].nonfinite = 0;\n"),),
    ),
    Mutant("a run's last block never goes home", ((HOME, "    if (done < end) at.home(log);\n"),), deaths=0),
    Mutant(
        "the commit word is that of any step",
        (("word >> 32 == (sequence & 0xffffffffu)", "sequence != 0"),),
        deaths=0,
    ),
    Mutant(
        "a step is complete before it is made",
        ((COMPLETED, ""), (LANES, COMPLETED + LANES)),
        file="worker/logged_step.cpp",
    ),
    Mutant(
        "drafts are done before they are made",
        ((MAKE_DRAFTS, DRAFTS_DONE.replace("done,", "batch.last() + origin,") + MAKE_DRAFTS),),
        file="worker/draft_queue.cpp",
        shape="drafted",
    ),
    Mutant(
        "a draft goes home, too", ((DRAFTED, DRAFTED + "    at.home(fresh);\n"),), 0, "kernels/draft.inl", "drafted"
    ),
    Mutant(
        "a sum is added to what a dead worker has left of it",
        (("    squares[i] = kernels", "    squares[i] += kernels"),),
        file="worker/draft_queue.cpp",
        shape="drafted",
    ),
    Mutant(
        "a sum is left out by the lane that has its first block",
        (("(range.first + kSumBlocks - 1) / kSumBlocks", "(range.first + kSumBlocks) / kSumBlocks"),),
        deaths=0,
        file="worker/draft_queue.cpp",
        shape="drafted",
    ),
    Mutant(
        "a draft is made a block short",
        ((DRAFT_ENDS, DRAFT_ENDS.replace("range.last", "(range.last - (range.last > 1))")),),
        deaths=0,
        file="kernels/draft.inl",
        shape="drafted",
    ),
    Mutant(
        "a successor begins with the first log whatever the block",
        (
            (LOG_BLOCKS, "thread_local std::int64_t begun = 0, carried = 0;\n\n" + LOG_BLOCKS),
            (
                BEGIN,
                "  begun = done;\n"
                "  carried = 0 < done && done <= count ? lane.logs[(done + 1) % 2].nonfinite : 0;\n" + BEGIN,
            ),
            (
                BEFORE,
                "  std::int64_t nonfinite =\n"
                "      done == begun ? carried : lane.logs[(done + 1 - begun) % 2].nonfinite;\n",
            ),
            (LOG, LOG.replace("done % 2", "(done - begun) % 2")),
            (RETURN, RETURN.replace("count + 1", "begun < count ? count + 1 - begun : count + 1")),
        ),
        deaths=2,
    ),
)
# Of updates that have fewer arrays than Adam, and a first step unlike the others.
UPDATES = (
    Mutant("a sum is written home at once", ((LOGGED_MOMENT, "home.exp_avg"), (MOMENT_HOME, "")), scenario="adagrad"),
    Mutant(
        "a successor does not copy the momentum of the committed block home",
        (
            (
                SUCCESSOR_COPIES,
                "    UpdateRun moments = run_in_place(step.base, *block.run);\n"
                "    moments.from.exp_avg = nullptr;\n"
                "    copy_home(moments, block, lane.logs[(done + 1) % 2]);\n",
            ),
        ),
        scenario="sgd-bf16",
    ),
    Mutant("a draft leaves a moment out", ((DRAFT_MOMENT, ""),), 0, "kernels/draft.inl", "drafted", "lion"),
    Mutant(
        "a successor takes the first step for the next",
        (
            (BEGIN, BEGUN + BEGIN),
            (SCALARS, SCALARS.replace("const StepScalars&", "StepScalars") + NEXT_SCALARS),
        ),
        scenario="sgd-first",
    ),
    Mutant(
        "the bank that a draft writes has no place for a moment",
        ((DRAFT_TO, DRAFT_TO + "    draft.run.to.exp_avg = 0;\n"),),
        deaths=0,
        file="worker/control.cpp",
        shape="drafted",
        scenario="sgd-first",
    ),
)
MUTANTS = FULL + COMPACT + UPDATES
