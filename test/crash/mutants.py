"""Variants of the redo log that are wrong, each of which the sweep has to notice.

A mutant is the shipped redo_log.inl (or another file) with some of its text replaced. Most are right as long as nobody
is killed.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL, IN_REGISTERS = "kernels/redo_log.inl", "kernels/block_in_registers.inl"
BEGIN = "  Staging staging;\n"
BEGUN = "  const std::int64_t begun = done;\n"
SUCCESSOR = "  if (done > 0 && done <= count) {\n"
SUCCESSOR_COPIES = "    copy_home(run_in_place(step.base, *block.run), block, lane.logs[(done + 1) % 2]);\n"
RUN = "    const AdamRun run = run_in_place(step.base, *from);\n"
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
COMPLETED = "  control.completed.store(sequence, std::memory_order_release);\n"
LANES = "  share_out(lanes, head.numel > kAloneNumel ? threads : 1, work);\n"
DRAFTS_DONE = "    control.drafts_done.store(done, std::memory_order_release);\n"
MAKE_DRAFTS = "      batch.make(arena, mapped_bytes, threads);\n"
DRAFTED = "    stream_block(to, moments, {all.run, begin, end_of_block(all.end, begin)}, fresh);\n"
DRAFT_ENDS = "range.last * kLogNumel < run.numel ? range.last * kLogNumel : run.numel;\n"


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        name: what is wrong.
        replacements: texts and what comes in their place.
        deaths: how many it takes to show; with 0, a step that nobody disturbs is wrong.
        file: path below native/.
        shape: of the sweep that notices.
    """

    name: str
    replacements: tuple[tuple[str, str], ...]
    deaths: int = 1
    file: str = PROTOCOL
    shape: str = "short"

    def applied(self, source: str) -> str:
        """The mutated source. Raises ValueError unless every text is there exactly once."""
        for old, new in self.replacements:
            if source.count(old) != 1:
                raise ValueError(f"mutant {self.name!r} does not apply: {source.count(old)} times {old!r}")
            source = source.replace(old, new)
        return source


MUTANTS = (
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
            ("biased<void>(log.exp_avg, begin, moment, home.exp_avg)", "home.exp_avg"),
            ("  copy_array(log.exp_avg, begin, n, moment, home.exp_avg);\n", ""),
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
