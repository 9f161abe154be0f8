"""Variants of the redo log that are wrong, each of which the sweep has to notice.

A mutant is the shipped redo_log.inl (or another file) with some of its text replaced. Most are right as long as nobody
is killed.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL = "redo_log.inl"
BEGIN = "  Staging staging;\n"
BEGUN = "  const std::int64_t begun = done;\n"
SUCCESSOR = "  if (done > 0 && done <= count) {\n"
SUCCESSOR_COPIES = "    copy_home(run_in_place(step.base, *block.run), block, lane.logs[(done + 1) % 2]);\n"
LOG = "    LogBlock& log = lane.logs[done % 2];\n"
BEFORE = "    const std::int64_t before = done > 0 ? lane.logs[(done + 1) % 2].nonfinite : 0;\n"
COUNT = "    log.nonfinite = before + "
COMPUTE = COUNT + "step_block(scalars, run, block, log, staging);\n"
COMMIT = "    commit(lane, progress_word(step.sequence, done + 1));\n"
COPY_HOME = "    copy_home(run, block, log);\n"
END = "  end_streams();\n"
LAST = "  if (done == count) commit(lane, progress_word(step.sequence, count + 1));\n"
RETURN = "  return count > 0 ? lane.logs[(count + 1) % 2].nonfinite : 0;\n"
COMPLETED = "  control.completed.store(sequence, std::memory_order_release);\n"
LANES = "  if (head.numel > kAloneNumel) {\n"
DRAFTS_DONE = "    control.drafts_done.store(done, std::memory_order_release);\n"
MAKE_DRAFTS = "      batch.make(arena.base(), mapped_bytes, lanes);\n"


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        name: what is wrong.
        replacements: texts and what comes in their place.
        deaths: how many it takes to show; with 0, a step that nobody disturbs is wrong.
        file: of the native sources.
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
    Mutant("a block is committed before it is computed", ((COMMIT, ""), (COMPUTE, COMMIT + COMPUTE))),
    Mutant(
        "a block is committed before its count is in the log",
        (
            (COMMIT, ""),
            (COMPUTE, COMPUTE.replace(COUNT, "    const auto found = ") + COMMIT + COUNT + "found;\n"),
        ),
    ),
    Mutant(
        "a block is committed before the last one is home",
        (
            (BEGIN, BEGIN + "  AdamRun late_run = {};\n  Block late = {nullptr, 0, 0};\n"),
            (
                COPY_HOME,
                "    if (late.run != nullptr) copy_home(late_run, late, lane.logs[(done + 1) % 2]);\n"
                "    late_run = run;\n    late = block;\n",
            ),
            (END, "  if (late.run != nullptr) copy_home(late_run, late, lane.logs[(done + 1) % 2]);\n" + END),
        ),
    ),
    Mutant(
        "the last block is said to be home before it is",
        ((COPY_HOME, LAST.replace("  if (done", "    if (done + 1") + COPY_HOME),),
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
    Mutant("a block goes home before it is committed", ((COPY_HOME, ""), (COMMIT, COPY_HOME + COMMIT))),
    Mutant(
        "a moment is written home at once",
        (
            ("biased<void>(log.exp_avg, begin, moment, home.exp_avg)", "home.exp_avg"),
            ("  lanes.to.exp_avg = log.exp_avg;\n", "  lanes.to.exp_avg = lanes.from.exp_avg;\n"),
            ("  copy_array(log.exp_avg, begin, n, moment, home.exp_avg);\n", ""),
        ),
    ),
    Mutant(
        "a successor begins a block early", ((SUCCESSOR, "  if (0 < done && done <= count) --done;\n" + SUCCESSOR),)
    ),
    Mutant("a successor begins a block late", ((SUCCESSOR, "  if (0 < done && done < count) ++done;\n" + SUCCESSOR),)),
    Mutant("a successor does not copy the committed block home", ((SUCCESSOR_COPIES, "    (void)block;\n"),)),
    Mutant(
        "a successor does not write out of its first block",
        (
            (BEGIN, BEGUN + BEGIN),
            (LOG, LOG + "    run.out = 0 < done && done == begun ? nullptr : at<void>(step.base, block.run->out);\n"),
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
        (
            (BEGIN, BEGIN + "  std::int64_t all = 0;\n"),
            (COUNT, "    all += "),
            (RETURN, "  return all;\n"),
        ),
    ),
    Mutant(
        "a lane's last block never goes home",
        ((COPY_HOME, COPY_HOME.replace("copy_home", "if (done + 1 < count) copy_home")),),
        deaths=0,
    ),
    Mutant(
        "the commit word is that of any step",
        (("word >> 32 == (sequence & 0xffffffffu)", "sequence != 0"),),
        deaths=0,
    ),
    Mutant(
        "a step is complete before it is made",
        ((COMPLETED, ""), (LANES, COMPLETED + LANES)),
        file="logged_step.cpp",
    ),
    Mutant(
        "drafts are done before they are made",
        ((MAKE_DRAFTS, DRAFTS_DONE.replace("done,", "batch.last() + origin,") + MAKE_DRAFTS),),
        file="draft_queue.cpp",
        shape="drafted",
    ),
    Mutant(
        "a draft writes a moment where it reads it, too",
        (
            (
                "    stream_block(to, run.moment_format, block, fresh);\n",
                "    stream_block(to, run.moment_format, block, fresh);\n"
                "    stream_array(fresh.exp_avg, block.begin, block.end - block.begin, 4, run.from.exp_avg);\n",
            ),
        ),
        deaths=0,
        file="draft.inl",
        shape="drafted",
    ),
    Mutant(
        "a sum is added to what a dead worker has left of it",
        (("    squares[i] = kernels", "    squares[i] += kernels"),),
        file="draft_queue.cpp",
        shape="drafted",
    ),
    Mutant(
        "a sum is left out by the lane that has its first block",
        (("(range.first + kSumBlocks - 1) / kSumBlocks", "(range.first + kSumBlocks) / kSumBlocks"),),
        deaths=0,
        file="draft_queue.cpp",
        shape="drafted",
    ),
    Mutant(
        "a draft is made a block short",
        (("number < range.last; ++number", "number + (range.last > 1) < range.last; ++number"),),
        deaths=0,
        file="draft.inl",
        shape="drafted",
    ),
    Mutant(
        "a successor begins with the first log whatever the block",
        (
            (
                BEGIN,
                BEGUN
                + "  const auto carried = 0 < done && done <= count ? lane.logs[(done + 1) % 2].nonfinite : 0;\n"
                + BEGIN,
            ),
            (LOG, LOG.replace("done % 2", "(done - begun) % 2")),
            (
                BEFORE,
                "    const auto before = done == begun ? carried : lane.logs[(done + 1 - begun) % 2].nonfinite;\n",
            ),
            (RETURN, RETURN.replace("count + 1", "begun < count ? count + 1 - begun : count + 1")),
        ),
        deaths=2,
    ),
)
