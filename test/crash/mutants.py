"""Variants of the redo log that are wrong, each of which the sweep has to notice.

A mutant is the shipped redo_log.cpp with some of its text replaced. Most are right as long as nobody is killed.
"""

from __future__ import annotations

from dataclasses import dataclass

COMMIT = "    commit(lane, progress_word(step.sequence, done + 1));\n"
COPY_HOME = "    if (done > 0) copy_home(step, block_of(step, range.first + done - 1), last);\n"
COMPUTE_BEGINS = "    if (done < count) {\n"
COMPUTE = "      const std::int64_t found = compute(step, block_of(step, range.first + done), next);\n"
COUNT = "      next.nonfinite = found + (done > 0 ? last.nonfinite : 0);\n"
RETURN = "  return count > 0 ? lane.logs[(count - 1) % 2].nonfinite : 0;\n"
LOOP = "  for (; done <= count; ++done) {\n"
COMPLETED = "  control.completed.store(sequence, std::memory_order_release);\n"
LANES = "  if (head.numel > kAloneNumel) {\n"
BEGUN = "  const std::int64_t begun = done;\n"


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        name: what is wrong.
        replacements: texts and what comes in their place.
        deaths: how many it takes to show; with 0, a step that nobody disturbs is wrong.
    """

    name: str
    replacements: tuple[tuple[str, str], ...]
    deaths: int = 1

    def applied(self, source: str) -> str:
        """The mutated source. Raises ValueError unless every text is there exactly once."""
        for old, new in self.replacements:
            if source.count(old) != 1:
                raise ValueError(f"mutant {self.name!r} does not apply: {source.count(old)} times {old!r}")
            source = source.replace(old, new)
        return source


def _moved(text: str, before: str, name: str) -> Mutant:
    return Mutant(name, ((text, ""), (before, text + before)))


MUTANTS = (
    _moved(COMMIT, COMPUTE_BEGINS, "a block is committed before it is computed"),
    _moved(COMMIT, COUNT, "a block is committed before its count is in the log"),
    Mutant("a block is committed before the last one is home", ((COPY_HOME, ""), (COMMIT, COMMIT + COPY_HOME))),
    Mutant(
        "the last block is committed as home before it is",
        ((COPY_HOME, COPY_HOME.replace("done > 0", "done > 0 && done < count")), (COMMIT, COMMIT + COPY_HOME)),
    ),
    Mutant(
        "one log for all blocks",
        (
            ("lane.logs[(done + 1) % 2]", "lane.logs[0]"),
            ("lane.logs[done % 2]", "lane.logs[0]"),
            (RETURN, "  return lane.logs[0].nonfinite;\n"),
        ),
    ),
    Mutant(
        "a block goes home before it is committed",
        ((COUNT, COUNT + "      copy_home(step, block_of(step, range.first + done), next);\n"),),
    ),
    Mutant(
        "a moment is written home at once",
        (
            ("biased<void>(log.exp_avg, begin, moment, home.exp_avg)", "at<void>(base, home.exp_avg)"),
            ("AdamArrays log_of(", "AdamArrays log_of(char* base, "),
            ("log_of(block, log),", "log_of(step.base, block, log),"),
            ("array(arrays.exp_avg, log.exp_avg, moment);\n", ""),
        ),
    ),
    Mutant("a successor begins a block early", ((LOOP, "  if (0 < done && done <= count) --done;\n" + LOOP),)),
    Mutant("a successor begins a block late", ((LOOP, "  if (0 < done && done < count) ++done;\n" + LOOP),)),
    Mutant(
        "a successor does not copy the committed block home",
        ((LOOP, BEGUN + LOOP), (COPY_HOME, COPY_HOME.replace("done > 0", "done > begun"))),
    ),
    Mutant(
        "a successor does not write out of its first block",
        (
            ("std::int64_t compute(", "std::int64_t compute(bool out, "),
            ("at<void>(step.base, run.out)", "at<void>(step.base, out ? run.out : 0)"),
            (LOOP, BEGUN + LOOP),
            (COMPUTE, COMPUTE.replace("compute(", "compute(done == 0 || done != begun, ")),
        ),
    ),
    Mutant(
        "gradients that are not finite are counted again",
        (
            (COUNT, "      lane.logs[0].nonfinite = found + (done > 0 ? lane.logs[0].nonfinite : 0);\n"),
            (RETURN, "  return count > 0 ? lane.logs[0].nonfinite : 0;\n"),
        ),
    ),
    Mutant(
        "gradients that a dead worker counted are forgotten",
        (
            (LOOP, "  std::int64_t all = 0;\n" + LOOP),
            (COUNT, "      all += found;\n"),
            (RETURN, "  return all;\n"),
        ),
    ),
    Mutant("a lane's last block never goes home", ((LOOP, LOOP.replace("<=", "<")),), deaths=0),
    Mutant(
        "the commit word is that of any step",
        (("word >> 32 == (sequence & 0xffffffffu)", "sequence != 0"),),
        deaths=0,
    ),
    Mutant("a step is complete before it is made", ((COMPLETED, ""), (LANES, COMPLETED + LANES))),
    Mutant(
        "a successor begins with the first log whatever the block",
        (
            ("lane.logs[(done + 1) % 2]", "lane.logs[(done + 1 - begun) % 2]"),
            ("lane.logs[done % 2]", "lane.logs[(done - begun) % 2]"),
            (LOOP, BEGUN + "  if (0 < done && done <= count) lane.logs[1] = lane.logs[(done + 1) % 2];\n" + LOOP),
            (RETURN, RETURN.replace("(count - 1)", "(begun <= count ? count + 1 - begun : count - 1)")),
        ),
        deaths=2,
    ),
)
