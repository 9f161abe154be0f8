"""One training program, run with either optimizer, from the start or from either one's checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.optim import AdamW

import zero_opt
from test.support.harness import assert_bitwise, run_processes

WORLD_SIZE = 2
# Of one program. They take a few seconds, on a machine that others may be using.
TIMEOUT_S = 300
HYPERS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Outcome(NamedTuple):
    """What a program has trained: model parameters by name, and the optimizer's full state dict (on rank 0)."""

    params: dict[str, torch.Tensor]
    optimizer: dict[str, Any] | None


MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Program(Protocol):
    """Train, writing checkpoints into ``folder``, from the start or from a checkpoint of a run that wrote there."""

    def __call__(self, make: MakeOptimizer, folder: Path, resume_from: Path | None) -> Outcome: ...


def plain(params: Iterable[Any]) -> torch.optim.Optimizer:
    """What a program used before."""
    return AdamW(params, **HYPERS)


def sharded(params: Iterable[Any]) -> torch.optim.Optimizer:
    """The line that replaces it, under DDP."""
    return zero_opt.ShardedOptimizer(params, AdamW, reduction=zero_opt.AlreadyReduced(), **HYPERS)


def forgetful(params: Iterable[Any]) -> torch.optim.Optimizer:
    """That line without the reduction, which a client's DDP calls for."""
    return zero_opt.ShardedOptimizer(params, AdamW, **HYPERS)


def hooked(params: Iterable[Any]) -> torch.optim.Optimizer:
    """That line for a program that registers our communication hook with its DDP."""
    return zero_opt.ShardedOptimizer(params, AdamW, reduction=zero_opt.DDPHook(), **HYPERS)


def delayed(params: Iterable[Any]) -> torch.optim.Optimizer:
    """That line with the step in a process beside the trainer, landing one step later."""
    return zero_opt.ShardedOptimizer(
        params,
        AdamW,
        reduction=zero_opt.AlreadyReduced(),
        offload=zero_opt.WorkerOffload(delay=1),
        fused=True,
        **HYPERS,
    )


def outcome(model: torch.nn.Module, opt: torch.optim.Optimizer) -> Outcome:
    """What ``model`` and ``opt``, bare of what a client wraps them in, hold. All ranks must call it."""
    if isinstance(opt, zero_opt.ShardedOptimizer):
        opt.consolidate_state_dict(to=0)
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    state_dict = opt.state_dict() if dist.get_rank() == 0 else None
    if isinstance(opt, zero_opt.ShardedOptimizer):
        opt.close()
    return Outcome(params, state_dict)


def launch(
    program: Callable[..., Any], *args: Any, world_size: int = WORLD_SIZE, expect_errors: bool = False
) -> list[Any]:
    """Run ``program(*args)`` on every rank, in processes with the environment that torchrun gives them.

    Returns:
        Per rank what it returned, or its Failure.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_processes(
        world_size,
        _as_torchrun,
        store.port,
        program,
        args,
        timeout=TIMEOUT_S,
        expect_errors=expect_errors,
        backend=None,
    )


def _as_torchrun(rank: int, world_size: int, port: int, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="clients",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    # The clients', and torch's about them, are not ours to mend; what is said at a line of ours is.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=r"zero_opt(\.|$)")
    found = program(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def check(program: Program, folder: Path, checkpoint: str, steps: int, replacement: MakeOptimizer = sharded) -> None:
    """Compare, to the bit, a program's runs with ``replacement`` with its runs with ``plain``.

    Args:
        folder: where it makes one, for the checkpoints, per run: "plain", ``replacement``'s name, and others.
        checkpoint: of those that the program writes into its folder, the one in the middle of the run.
        steps: that a whole run takes.
    """
    makers = (plain, replacement)
    whole = {make.__name__: _run(program, make, folder / make.__name__) for make in makers}
    expected = whole["plain"]
    _require_trained(expected, steps)
    require_same(whole[replacement.__name__], expected, "uninterrupted")
    for saver, loader in product(makers, makers):
        name = f"{saver.__name__}_to_{loader.__name__}"
        resumed = _run(program, loader, folder / name, folder / saver.__name__ / checkpoint)
        _require_resumed(folder / name, checkpoint)
        require_same(resumed, expected, name)


def check_resumed(program: Program, folder: Path, checkpoint: str, steps: int, make: MakeOptimizer) -> None:
    """Compare, to the bit, a program's run that is resumed with one that is not; as :func:`check`."""
    expected = _run(program, make, folder / "whole")
    _require_trained(expected, steps)
    resumed = _run(program, make, folder / "resumed", folder / "whole" / checkpoint)
    _require_resumed(folder / "resumed", checkpoint)
    require_same(resumed, expected, "resumed")


def _run(program: Program, make: MakeOptimizer, folder: Path, resume_from: Path | None = None) -> list[Outcome]:
    folder.mkdir()
    return launch(program, make, folder, resume_from)


def _require_trained(found: list[Outcome], steps: int) -> None:
    state_dict = found[0].optimizer
    assert state_dict is not None
    taken = {int(state["step"]) for state in state_dict["state"].values()}
    assert taken == {steps}, f"took {taken} steps"
    assert len(state_dict["state"]) == sum(not name.startswith("ema.") for name in found[0].params)


def _require_resumed(folder: Path, checkpoint: str) -> None:
    """A run that began anew would end with the same bits, but it would have written this checkpoint again."""
    written = [path.name for path in folder.iterdir()]
    assert written
    assert checkpoint not in written


def require_same(found: list[Outcome], expected: list[Outcome], what: str) -> None:
    """Fail unless all ranks hold the same bits in both runs."""
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(ours.params, theirs.params, f"{what}: rank {rank}")
    assert_bitwise(found[0].optimizer, expected[0].optimizer, f"{what}: optimizer")
