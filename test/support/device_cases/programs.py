"""What else a program does with an optimizer, beside training: each returns what must have the same bits everywhere."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

import zero_opt
from test.support.device_cases.places import on_host
from test.support.device_cases.training import STEPS, Rank
from test.support.scenario import values
from test.support.tripwire import Failed, Tripwire


def scaled(rank: Rank) -> Any:
    """Train under GradScaler; in one step gradients overflow, on rank 0 alone where that is allowed."""
    scaler = torch.amp.GradScaler(rank.place.devices[0].type, init_scale=2.0**6, growth_interval=3)
    scales = []
    for step in range(STEPS + 2):
        loss = rank.loss(step)
        if step == 2 and (rank.rank == 0 or rank.case.reduction in ("AtStep", "AlreadyReduced")):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if rank.case.reduction == "AlreadyReduced":
            rank.reduce_by_hand()
        if rank.case.clip is not None:
            scaler.unscale_(rank.optimizer)
            rank.optimizer.clip_grad_norm_(rank.case.clip)
        scaler.step(rank.optimizer)
        scaler.update()
        rank.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [scales, rank.end()]


def clipped(rank: Rank) -> Any:
    """Train with clip_grad_norm_, and return the norms."""
    norms = []
    for step in range(STEPS):
        rank.backward(step)
        norms.append(rank.optimizer.clip_grad_norm_(0.5 if step % 2 else 1e6))
        rank.optimizer.step()
        rank.optimizer.zero_grad()
    return [on_host(norms), rank.end()]


def clipped_between(rank: Rank) -> Any:
    """Train with gradients of which the first ones are clipped before others are added to them."""
    seen = []
    for step in range(STEPS):
        rank.backward(step)
        seen.append(rank.optimizer.clip_grad_norm_(0.5))
        rank.backward(step)
        rank.optimizer.step()
        rank.optimizer.zero_grad()
    return [on_host(seen), rank.end()]


def written_in_place(rank: Rank) -> Any:
    """Train without zero_grad() on gradients that are written as a graph's replay does it, raising no version."""
    rank.backward(0)
    for step in range(STEPS):
        for index, param in enumerate(rank.params):
            assert param.grad is not None
            param.grad.data.copy_(rank.noise(index, step, 0))
        if rank.case.clip is not None:
            rank.optimizer.clip_grad_norm_(rank.case.clip)
        rank.optimizer.step()
    return rank.end()


def state_leaves(rank: Rank) -> Any:
    """Offload the state between two steps, save it there, and go on; once between two backwards of a step."""
    rank.step(0)
    rank.step(1)
    rank.optimizer.flush()
    rank.optimizer.offload_state()
    saved = rank.optimizer.state_dict() if rank.rank == 0 else None
    rank.optimizer.reload_state()
    rank.step(2)
    rank.backward(3)
    rank.optimizer.offload_state()
    rank.optimizer.reload_state()
    rank.backward(4)
    rank.optimizer.step()
    rank.optimizer.zero_grad()
    return [on_host(saved), rank.end()]


def one_rank_asks(rank: Rank) -> Any:
    """Rank 0, then rank 1, calls state_dict() alone, while the others are in their next backward."""
    found = []
    for step in range(STEPS):
        rank.step(step)
        if not rank.case.readable:
            rank.optimizer.flush()
        if rank.rank == step % rank.world_size:
            found.append(on_host(rank.optimizer.state_dict()))
    return [found, rank.end()]


def state_is_loaded(rank: Rank) -> Any:
    """Load the state of two steps into a new optimizer, whose parameters it fits, and go on."""
    rank.step(0)
    rank.step(1)
    rank.optimizer.flush()
    saved = rank.optimizer.state_dict()
    params = rank.snapshot()
    rank.optimizer.close()
    rank.make()
    rank.restore(params)
    rank.optimizer.load_state_dict(saved)
    seen = [rank.step(step) for step in (2, 3)]
    return [on_host(saved), on_host(seen), rank.end()]


def state_is_loaded_in_place(rank: Rank) -> Any:
    """Load an earlier state into the same optimizer right after a step."""
    rank.step(0)
    rank.optimizer.flush()
    saved = rank.optimizer.state_dict()
    rank.step(1)
    rank.optimizer.load_state_dict(saved)
    return [on_host(rank.step(2)), rank.end()]


def resharded(rank: Rank) -> Any:
    """Save at one world size as torch.distributed.checkpoint does, and load on ranks that train alone."""
    rank.step(0)
    rank.step(1)
    rank.optimizer.flush()
    saved, params = on_host(rank.optimizer.state_dict()), rank.snapshot()
    rank.optimizer.close()
    alone = _alone(rank)
    alone.restore(params)
    alone.optimizer.load_state_dict(saved)
    return [saved, on_host(alone.step(2)), alone.end()]


def _alone(rank: Rank) -> Rank:
    """Make a rank of the same case that has no others."""
    group = None
    if rank.world_size > 1:
        groups = [
            dist.new_group([r], backend=dist.get_backend_config(rank.place.group)) for r in range(rank.world_size)
        ]
        group = groups[rank.rank]
    return Rank(rank.case, replace(rank.place, group=group))


def checkpointed(rank: Rank, *, compact: bool = False) -> Any:
    """Save by torch.distributed.checkpoint into a folder, train on, load, train on."""
    rank.step(0)
    rank.step(1)
    rank.optimizer.flush()
    params = rank.snapshot()
    with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # at world size 1
        folders = [own]
        if rank.world_size > 1:
            dist.broadcast_object_list(folders, 0)
            dist.barrier()
        writer: dict[str, Any] = {"optimizer": zero_opt.sharded_state_dict(rank.optimizer, compact=compact)}
        dcp.save(writer, checkpoint_id=folders[0])
        rank.step(2)
        rank.optimizer.flush()
        reader: dict[str, Any] = {"optimizer": zero_opt.sharded_state_dict(rank.optimizer, compact=compact)}
        dcp.load(reader, checkpoint_id=folders[0])
        if rank.world_size > 1:
            dist.barrier()
    rank.restore(params)
    zero_opt.load_sharded_state_dict(rank.optimizer, reader["optimizer"])
    return [on_host(rank.step(3)), rank.end()]


def checkpointed_as_it_is(rank: Rank) -> Any:
    """Do as :func:`checkpointed` does, with compact state in its own form."""
    return checkpointed(rank, compact=True)


def uneven(rank: Rank) -> Any:
    """Train under Join; rank 1 has inputs for more steps."""
    joined: list[Any] = [rank.optimizer]
    if rank.model is not rank.layers and isinstance(rank.model, torch.nn.parallel.DistributedDataParallel):
        joined.insert(0, rank.model)
    with Join(joined):
        for step in range(2 + 2 * rank.rank):
            rank.loss(step).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
    return rank.end()


class _ByHand(Joinable):
    """The program's own reduction of gradients, in which a rank without inputs takes part with zeros."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def reduce(self) -> None:
        """Replace every gradient by its mean."""
        Join.notify_join_context(self)
        self._rank.reduce_by_hand()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank without inputs does."""
        return _Zeros(self._rank)

    @property
    def join_device(self) -> torch.device:
        """Where Join puts its own tensors."""
        return self._rank.place.devices[0] if self._rank.place.direct else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """Whose ranks join."""
        return self._rank.place.group


class _Zeros(JoinHook):
    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def main_hook(self) -> None:
        """Take part in one reduction."""
        for param in self._rank.params:
            self._rank.place.all_reduce_mean(torch.zeros_like(param))


def uneven_by_hand(rank: Rank) -> Any:
    """Train under Join with gradients that the program reduces."""
    by_hand = _ByHand(rank)
    with Join([by_hand, rank.optimizer]):
        for step in range(2 + 2 * rank.rank):
            rank.loss(step).backward()
            by_hand.reduce()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
    return rank.end()


def graph_replays(rank: Rank) -> Any:
    """Backward gives gradients in memory that is overwritten at once, as when CUDA graphs are replayed."""
    static = [torch.empty_like(param) for param in rank.params]
    for step in range(STEPS):
        outputs = [_Static.apply(*pair) for pair in zip(rank.params, static, strict=True)]
        for index, memory in enumerate(static):
            memory.copy_(rank.noise(index, step, 0))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        if rank.place.accelerated:  # in the order of the stream, so after who has read it; the host has no such order
            for memory in static:
                memory.fill_(torch.nan)
        rank.optimizer.step()
        rank.optimizer.zero_grad()
    return rank.end()


class _Static(torch.autograd.Function):
    """A part of a graph: the gradient of its input is always in the same memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        ctx.memory = memory
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.memory.detach(), None


def failed_backward(rank: Rank) -> Any:
    """The backward of rank 1 fails halfway; all call zero_grad() and repeat it."""
    return _with_failures(rank, (rank.world_size - 1,), again=True)


def failed_everywhere(rank: Rank) -> Any:
    """The backward of every rank fails."""
    return _with_failures(rank, range(rank.world_size), again=True)


def failed_and_dropped(rank: Rank) -> Any:
    """The backward of rank 0 fails, and nobody repeats it: the next window follows at once."""
    return _with_failures(rank, (0,), again=False)


def _with_failures(rank: Rank, who: Any, *, again: bool) -> Any:
    for step in range(STEPS):
        if step in (1, 2):
            for turn in range(2 if again else 1):
                _fail(rank, step + 20 + turn, armed=rank.rank in who)
                rank.optimizer.zero_grad()
        rank.step(step)
    return rank.end()


def _fail(rank: Rank, step: int, *, armed: bool) -> None:
    """Run a backward that raises when half of the gradients have come, on the ranks that are armed."""
    middle = rank.layers[len(rank.params) // 2]
    handle = middle.register_forward_hook(lambda module, args, out: Tripwire.apply(out)) if armed else None
    try:
        with contextlib.suppress(Failed):
            rank.loss(step).backward()
    finally:
        if handle is not None:
            handle.remove()


def refused_step(rank: Rank) -> Any:
    """A step after a failed backward is refused on every rank; zero_grad(), and training goes on."""
    rank.step(0)
    _fail(rank, 20, armed=rank.rank == rank.world_size - 1)
    try:
        rank.optimizer.step()
    except zero_opt.StepDesync:
        refused = True
    else:
        refused = False
    rank.optimizer.zero_grad()
    return [refused, on_host(rank.step(1)), rank.end()]


def edited(rank: Rank) -> Any:
    """The user changes parameters and hyperparameters between steps."""
    for step in range(STEPS):
        rank.step(step)
        rank.optimizer.flush()
        if step == 1:
            with torch.no_grad():
                rank.params[0].mul_(0.5)
        rank.optimizer.param_groups[1]["lr"] *= 0.5
    return rank.end()


def edited_and_saved(rank: Rank) -> Any:
    """The user changes a parameter; saves, loads that, saves again; changes it and replaces its state."""
    seen = []
    rank.step(0)
    for step in (1, 2):
        with torch.no_grad():
            rank.params[0].mul_(0.5)
        saved = rank.optimizer.state_dict()
        seen.append(on_host(saved))
        if step == 2:
            rank.optimizer.load_state_dict(saved)
        seen += [on_host(rank.step(step)), on_host(rank.optimizer.state_dict())]
    with torch.no_grad():
        rank.params[0].mul_(0.5)
    entry = rank.optimizer.state_dict()["state"][0]
    rank.optimizer.state[rank.params[0]] = entry
    return [seen, on_host(rank.step(3)), rank.end()]


def groups_are_added(rank: Rank) -> Any:
    """A param group is added between two steps."""
    rank.step(0)
    device = rank.place.devices[0]
    extra = torch.nn.Parameter(torch.ones(96, device=device, dtype=rank.case.dtype))
    rank.optimizer.add_param_group({"params": [extra], "lr": 0.25})
    for step in (1, 2):
        (rank.loss(step) + (extra * (1 + rank.rank)).float().sum()).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()
    return [on_host(extra), rank.end()]


def evaluated(rank: Rank) -> Any:
    """Evaluate between steps, save the model's state dict, and run forwards whose parameters arrive late."""
    seen = []
    for step in range(STEPS):
        rank.step(step)
        rank.model.eval()
        with torch.no_grad():
            for index, layer in enumerate(rank.layers):
                seen.append(layer(torch.zeros((), device=rank.place.device(index)), rank.params[index].detach()))
        rank.model.train()
        if step % 2:
            seen.append(rank.model.state_dict())
            seen[-1] = {key: value.clone() for key, value in seen[-1].items()}
    return [on_host([value for value in seen if isinstance(value, dict)]), rank.end()]


def two_optimizers(rank: Rank) -> Any:
    """Two optimizers are trained in turn, as those of two models."""
    other = Rank(rank.case, rank.place)
    for step in range(STEPS):
        loss = rank.loss(step) + other.loss(step + 10)
        loss.backward()
        for each in (rank, other):
            each.optimizer.step()
            each.optimizer.zero_grad()
    return [rank.end(), other.end()]


def sparse(rank: Rank) -> Any:
    """A table beside the model has sparse gradients, of other rows on every rank."""
    device = rank.place.device(0)
    table = nn.Embedding(12, 5, sparse=True)
    with torch.no_grad():
        table.weight.copy_(values(93, 0, 0, 0, (12, 5)))
    table.to(device)
    reduction = zero_opt.AtStep(exchange=rank.place.exchange)
    optimizer = zero_opt.ShardedOptimizer(
        table.parameters(), torch.optim.SparseAdam, rank.place.group, lr=0.1, reduction=reduction
    )
    for step in range(STEPS):
        rows = torch.tensor([step, rank.rank + 5, step + 7, step], device=device)
        table(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rank.step(step)
    ended = on_host([table.weight.detach()])
    optimizer.close()
    return [ended, rank.end()]


def other_collectives(rank: Rank) -> Any:
    """The program has collectives of its own in the middle of backward, as SyncBatchNorm and tensor parallelism do."""
    found = []

    def reduce(grad: Tensor) -> None:
        copy = grad.detach().clone()
        rank.place.all_reduce_mean(copy)
        found.append(copy)

    hooks = [param.register_hook(reduce) for param in rank.params[1::3]]
    for step in range(STEPS):
        rank.step(step)
    for hook in hooks:
        hook.remove()
    return [on_host(found), rank.end()]
