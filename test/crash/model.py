"""Trainer, worker and the arena between them, as a machine of which every state can be visited.

An action stands for a piece of native/kernels/redo_log.hpp, native/worker/worker.cpp, native/worker/control.cpp
or zero_opt/placement/worker/process.py, and is named after it. Memory is what matters of the arena: the words, and for
each block of state the number of steps applied to it, or that it is half written. Every action leaves the memory as a
process would that died right after it. Polls that find nothing are no actions; since none waits without a bound, what a
process polls for it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TORN = -1


class Memory(NamedTuple):
    """What both map. By lane: ``words`` (sequence, committed blocks), ``logs`` (two of (version, count) or None for
    half written), ``homes`` (a version, or TORN, for each block)."""

    submitted: int
    completed: int
    nonfinite: int
    stop: bool
    size: int
    words: tuple[tuple[int, int], ...]
    logs: tuple[tuple[tuple[int, int] | None, ...], ...]
    homes: tuple[tuple[int, ...], ...]


class Worker(NamedTuple):
    """A process. ``stage``: born, locked, lanes (in finish_step), counted, idle, gone. ``lanes``: where each one is."""

    stage: str
    mapped: int = 0
    sequence: int = 0
    lanes: tuple[str, ...] = ()
    ready: bool = False
    stopped: bool = False
    killed: bool = False


class Trainer(NamedTuple):
    """``phase``: idle, starting, waiting, failed (an error was raised; to be tried again), extending, closed, dead.

    ``ending`` is why its worker is being killed and reaped: nothing else goes on meanwhile.
    """

    phase: str
    ending: str = ""
    fruitless: int = 0
    at_death: tuple[tuple[int, int], ...] = ()


class Budget(NamedTuple):
    """How often something may still happen that nobody asked for."""

    kills: int
    stops: int
    impatience: int
    growths: int
    stop_requests: int
    trainer_deaths: int


class State(NamedTuple):
    """``old`` is a predecessor that has not been seen to its end; there is none as long as the trainer reaps."""

    memory: Memory
    trainer: Trainer
    worker: Worker | None
    old: Worker | None
    budget: Budget


Step = tuple[str, State]


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        lanes, blocks: lanes, and blocks of each.
        steps: how many the trainer makes.
        max_deaths: as of WorkerOffload.
        budget: what may go wrong.
        broken: what is left out (reap, lock, log: there is one only) or wrong (early commit, early completion).
    """

    lanes: int
    blocks: int
    steps: int
    max_deaths: int
    budget: Budget
    broken: frozenset[str] = frozenset()

    def initial(self) -> State:
        lanes = range(self.lanes)
        memory = Memory(
            0,
            0,
            0,
            False,
            1,
            tuple((0, 0) for _ in lanes),
            tuple((None, None) for _ in lanes),
            tuple((0,) * self.blocks for _ in lanes),
        )
        return State(memory, Trainer("idle"), None, None, self.budget)

    def successors(self, state: State) -> Iterator[Step]:
        """Every action that is possible, and what it leads to."""
        if state.trainer.phase not in ("closed", "dead"):
            yield from self._trainer(state)
        for name in ("worker", "old"):
            worker: Worker | None = getattr(state, name)
            if worker is not None and worker.stage != "gone":
                for action, memory, successor in self._worker(state, worker):
                    yield action, state._replace(memory=memory, **{name: successor})
                yield from self._environment(state, name, worker)
        if state.budget.trainer_deaths and state.trainer.phase not in ("closed", "dead"):
            budget = state.budget._replace(trainer_deaths=state.budget.trainer_deaths - 1)
            yield "SIGKILL to the trainer", state._replace(trainer=Trainer("dead"), budget=budget)

    # -- what happens to processes ------------------------------------------------------------------------------------

    def _environment(self, state: State, name: str, worker: Worker) -> Iterator[Step]:
        budget = state.budget
        if worker.killed:
            yield "the kernel ends the worker", state._replace(**{name: worker._replace(stage="gone")})
        elif budget.kills:
            less = budget._replace(kills=budget.kills - 1)
            yield "SIGKILL", state._replace(budget=less, **{name: worker._replace(killed=True)})
        if worker.stopped:
            yield "SIGCONT", state._replace(**{name: worker._replace(stopped=False)})
        elif budget.stops and not worker.killed:
            less = budget._replace(stops=budget.stops - 1)
            yield "SIGSTOP", state._replace(budget=less, **{name: worker._replace(stopped=True)})
        if state.trainer.phase in ("closed", "dead") and not worker.stopped:
            yield "watch: the trainer is gone", state._replace(**{name: worker._replace(stage="gone")})

    # -- zero_opt/placement/worker/process.py -------------------------------------------------------------------------

    def _trainer(self, state: State) -> Iterator[Step]:
        if state.trainer.ending:
            yield from self._reaping(state)
        else:
            phases = {"idle": self._idle, "extending": self._extending, "starting": self._starting}
            yield from phases.get(state.trainer.phase, self._waiting)(state)

    def _idle(self, state: State) -> Iterator[Step]:
        memory, trainer, budget = state.memory, state.trainer, state.budget
        if memory.submitted == self.steps:
            yield "close", self._end(state, "close")
            return
        if state.worker is None:
            yield "start", self._spawned(state, trainer._replace(phase="starting"))
        yield (
            "submit",
            state._replace(
                memory=memory._replace(submitted=memory.submitted + 1), trainer=trainer._replace(phase="waiting")
            ),
        )
        if budget.growths:
            less = state._replace(budget=budget._replace(growths=budget.growths - 1))
            yield "extend", self._end(less, "extend")
        if budget.stop_requests and state.worker is not None:
            less = state._replace(budget=budget._replace(stop_requests=budget.stop_requests - 1))
            yield "Control.stop", less._replace(memory=memory._replace(stop=True))

    def _extending(self, state: State) -> Iterator[Step]:
        yield (
            "extend: grow",
            self._spawned(
                state._replace(memory=state.memory._replace(size=state.memory.size + 1)),
                state.trainer._replace(phase="starting"),
            ),
        )

    def _starting(self, state: State) -> Iterator[Step]:
        assert state.worker is not None
        if state.worker.ready:
            yield "start: ready", state._replace(trainer=state.trainer._replace(phase="idle"))
        if state.worker.stage == "gone" or state.worker.stopped:
            yield "start: WorkerFailed", self._end(state, "start")

    def _waiting(self, state: State) -> Iterator[Step]:
        """Also "failed": wait() is called again, by flush()."""
        trainer, worker, budget = state.trainer, state.worker, state.budget
        if state.memory.completed == state.memory.submitted:
            yield "wait: done", state._replace(trainer=trainer._replace(phase="idle"))
            return
        if worker is None:
            yield "wait: _spawn", self._spawned(state, trainer._replace(phase="waiting"))
        elif worker.stage == "gone":
            yield "wait: dead", self._end(state, "wait")
        elif worker.stopped:
            yield "wait: hang_timeout", self._end(state, "wait")
        elif budget.impatience:
            less = state._replace(budget=budget._replace(impatience=budget.impatience - 1))
            yield "wait: hang_timeout of one that is slow", self._end(less, "wait")

    def _end(self, state: State, why: str) -> State:
        """_Child.end: kills, then waits."""
        worker = state.worker and state.worker._replace(killed=True)
        return state._replace(worker=worker, trainer=state.trainer._replace(ending=why))

    def _reaping(self, state: State) -> Iterator[Step]:
        worker = state.worker
        if worker is None or worker.stage == "gone":
            yield "end: reaped", self._ended(state._replace(worker=None))
        elif "reap" in self.broken and state.old is None:
            yield "end: not reaped", self._ended(state._replace(worker=None, old=worker))

    def _ended(self, state: State) -> State:
        trainer = state.trainer._replace(ending="")
        phases = {"close": "closed", "extend": "extending", "start": "idle"}
        if state.trainer.ending in phases:
            return state._replace(trainer=trainer._replace(phase=phases[state.trainer.ending]))
        words = state.memory.words
        fruitless = trainer.fruitless + 1 if words == trainer.at_death else 1
        if fruitless >= self.max_deaths:  # WorkerDied
            return state._replace(trainer=Trainer("failed", at_death=words))
        return self._spawned(state, Trainer("waiting", fruitless=fruitless, at_death=words))

    def _spawned(self, state: State, trainer: Trainer) -> State:
        return state._replace(worker=Worker("born"), trainer=trainer)

    # -- native/worker/worker.cpp -------------------------------------------------------------------------------------

    def _worker(self, state: State, worker: Worker) -> Iterator[tuple[str, Memory, Worker]]:
        """Also of one that has been killed: its threads go on until they are gone."""
        memory = state.memory
        if worker.stopped:
            return
        if worker.stage == "born":
            others = [w for w in (state.worker, state.old) if w is not worker and w and w.stage not in ("born", "gone")]
            if not others or "lock" in self.broken:
                locked = worker._replace(stage="locked", mapped=memory.size)
                yield "lock_arena", memory._replace(stop=False), locked
        elif worker.stage in ("locked", "idle"):
            yield from self._serve(memory, worker)
        elif worker.stage == "lanes":
            yield from self._finish_step(memory, worker)
        elif worker.stage == "counted":
            yield "finish_step: completed", memory._replace(completed=worker.sequence), self._finished(worker)

    def _serve(self, memory: Memory, worker: Worker) -> Iterator[tuple[str, Memory, Worker]]:
        if memory.submitted != memory.completed:
            if worker.mapped != memory.size:
                raise AssertionError("a worker that has not mapped all of the arena got a step")
            lanes = ("new",) * self.lanes
            begun = worker._replace(stage="lanes", sequence=memory.submitted, lanes=lanes)
            if "early completion" in self.broken:
                memory = memory._replace(completed=memory.submitted)
            yield "finish_step", memory, begun
        elif not worker.ready:
            yield "serve: ready", memory, self._finished(worker)
        elif memory.stop:
            yield "serve: stop", memory, worker._replace(stage="gone")

    def _finished(self, worker: Worker) -> Worker:
        return worker._replace(stage="idle", lanes=(), ready=True)

    # -- native/kernels/redo_log --------------------------------------------------------------------------------------

    def _finish_step(self, memory: Memory, worker: Worker) -> Iterator[tuple[str, Memory, Worker]]:
        over = True
        for lane in range(self.lanes):
            for action, after, where in self._run_lane(memory, worker, lane):
                over = False
                lanes = (*worker.lanes[:lane], where, *worker.lanes[lane + 1 :])
                yield f"run_lane {lane}: {action}", after, worker._replace(lanes=lanes)
        if over:
            # A log that is not whole counts as one that holds nothing: finished() notices.
            last = [logs[(self.blocks - 1) % 2 if "log" not in self.broken else 0] for logs in memory.logs]
            counted = memory._replace(nonfinite=sum(log[1] for log in last if log is not None))
            yield "finish_step: nonfinite", counted, worker._replace(stage="counted")

    def _run_lane(self, memory: Memory, worker: Worker, lane: int) -> Iterator[tuple[str, Memory, str]]:
        where, (sequence, committed) = worker.lanes[lane], memory.words[lane]
        done = committed if sequence == worker.sequence else 0
        if where == "new" and not 0 < done <= self.blocks:
            where = "home"
        if where in ("new", "committed"):
            yield "copy_home begins", self._home(memory, lane, done - 1, TORN), "copying"
        elif where == "copying":
            log = memory.logs[lane][self._turn(done - 1)]
            yield "copy_home ends", self._home(memory, lane, done - 1, TORN if log is None else log[0]), "home"
        elif where == "home" and done < self.blocks:
            after = self._log(memory, lane, done, None)
            if "early commit" in self.broken:
                after = self._commit(after, worker.sequence, lane, done + 1)
            yield "adam begins", after, "computing"
        elif where == "computing":
            block = done - 1 if "early commit" in self.broken else done
            yield "adam ends", self._log(memory, lane, block, self._computed(memory, lane, block)), "computed"
        elif where == "computed":
            committed = done if "early commit" in self.broken else done + 1
            yield "commit", self._commit(memory, worker.sequence, lane, committed), "committed"
        elif where == "home" and done == self.blocks:
            yield "commit the lane", self._commit(memory, worker.sequence, lane, done + 1), "home"

    def _computed(self, memory: Memory, lane: int, block: int) -> tuple[int, int]:
        """What goes into the log: the version after the one at home, and the count of the log before and one more."""
        version = memory.homes[lane][block]
        before = memory.logs[lane][self._turn(block - 1)] if block > 0 else (0, 0)
        count = 1 + before[1] if before is not None else TORN
        return (version + 1 if version != TORN else TORN), count

    def _turn(self, block: int) -> int:
        return 0 if "log" in self.broken else block % 2

    def _home(self, memory: Memory, lane: int, block: int, version: int) -> Memory:
        home = memory.homes[lane]
        home = (*home[:block], version, *home[block + 1 :])
        return memory._replace(homes=(*memory.homes[:lane], home, *memory.homes[lane + 1 :]))

    def _log(self, memory: Memory, lane: int, block: int, value: tuple[int, int] | None) -> Memory:
        logs = list(memory.logs[lane])
        logs[self._turn(block)] = value
        return memory._replace(logs=(*memory.logs[:lane], tuple(logs), *memory.logs[lane + 1 :]))

    def _commit(self, memory: Memory, sequence: int, lane: int, committed: int) -> Memory:
        words = (*memory.words[:lane], (sequence, committed), *memory.words[lane + 1 :])
        return memory._replace(words=words)

    # -- what has to hold ---------------------------------------------------------------------------------------------

    def wrong(self, state: State) -> str:
        """What must not be in a state; empty if all is well."""
        memory = state.memory
        writing = [w for w in (state.worker, state.old) if w and w.stage in ("lanes", "counted")]
        if len(writing) > 1:
            return "two workers write at once"
        if memory.completed == memory.submitted and not self._applied(memory, memory.completed):
            return "a step is said to be complete that is not applied once to every block"
        if memory.completed not in (memory.submitted, memory.submitted - 1):
            return "a step is skipped"
        versions = {version for home in memory.homes for version in home}
        if not versions <= {TORN, memory.submitted, memory.submitted - 1}:
            return "a step is applied twice"
        return ""

    def _applied(self, memory: Memory, steps: int) -> bool:
        counted = memory.nonfinite == (self.lanes * self.blocks if steps else 0)
        return counted and all(version == steps for home in memory.homes for version in home)

    def over(self, state: State) -> bool:
        """Whether nothing need happen any more."""
        alone = all(worker is None or worker.stage == "gone" for worker in (state.worker, state.old))
        made = state.memory.completed == self.steps
        return alone and (state.trainer.phase == "dead" or (state.trainer.phase == "closed" and made))
