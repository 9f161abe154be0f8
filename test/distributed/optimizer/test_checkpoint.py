"""The functions of ``torch.distributed.checkpoint.state_dict`` with a sharded optimizer, as with a plain one."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import zero_opt
from test.support import fsdp_models
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB

LONG = 300
STEPS = 3

OPTIONS = {
    "default": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 8)
    return model


def _groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """The same gradients on every rank, so that the mean of two is that of one."""
    data = torch.randn(4, 30, generator=torch.Generator().manual_seed(seed))
    model(data).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _sharded(model: nn.Module) -> zero_opt.ShardedOptimizer:
    return zero_opt.ShardedOptimizer(_groups(model), torch.optim.AdamW, reduction=zero_opt.Overlapped(BUCKET_MB))


def _counted(optimizer: torch.optim.Optimizer) -> list[int]:
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps


def _plain(trained: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    optimizer = torch.optim.AdamW(_groups(model))
    for seed in range(trained):
        _step(model, optimizer, seed)
    return model, optimizer


def _get(rank: int, world_size: int, options: str, consolidated: bool) -> Any:
    model = _model()
    optimizer = _sharded(model)
    for seed in range(STEPS):
        _step(model, optimizer, seed)
    if consolidated:
        optimizer.consolidate_state_dict(to=1)
    steps = _counted(optimizer)
    got = get_optimizer_state_dict(model, optimizer, options=OPTIONS[options])
    both = get_state_dict(model, optimizer, options=OPTIONS[options])[1]
    assert not steps
    optimizer.close()
    return copy.deepcopy((got, both))


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_what_every_rank_gets_is_what_a_plain_optimizer_gives(options: str, consolidated: bool) -> None:
    plain_model, plain = _plain(STEPS)
    same_on_one = StateDictOptions(flatten_optimizer_state_dict=options == "flat")
    wanted = get_optimizer_state_dict(plain_model, plain, options=same_on_one)
    found = run_processes(2, _get, options, consolidated)
    for rank in (0, 1) if options != "full" else (0,):  # with cpu_offload, full state is on rank 0 alone
        assert_bitwise(found[rank], (wanted, wanted), f"rank {rank}")


def _get_of_one_param(rank: int, world_size: int) -> Any:
    model = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps = _counted(optimizer)
    got = get_optimizer_state_dict(model, optimizer)
    assert not steps
    optimizer.close()
    return copy.deepcopy(got)


def test_ranks_that_own_nothing_are_not_stepped() -> None:
    found = run_processes(3, _get_of_one_param)
    assert found[0]["state"]["weight"]["exp_avg"].shape == (4, 8)
    assert_bitwise(found[1], found[0])
    assert_bitwise(found[2], found[0])


def _resume(rank: int, world_size: int, folder: str, fresh: bool) -> Any:
    """Save, load into an optimizer, go on."""
    model = _model()
    optimizer = _sharded(model)
    for seed in range(STEPS):
        _step(model, optimizer, seed)
    model_state, state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "opt": state}, checkpoint_id=folder)
    if fresh:
        optimizer.close()
        model = _model()
        optimizer = _sharded(model)
    else:
        _step(model, optimizer, 99)
    model_state, state = get_state_dict(model, optimizer)
    loaded = {"model": model_state, "opt": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["opt"])
    for seed in range(STEPS, 2 * STEPS):
        _step(model, optimizer, seed)
    optimizer.consolidate_state_dict(to=0)
    full = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()], full


@pytest.mark.parametrize("fresh", [True, False])
def test_training_goes_on_from_what_was_set(fresh: bool, tmp_path: Path) -> None:
    model, plain = _plain(2 * STEPS)
    found = run_processes(2, _resume, str(tmp_path), fresh)
    for params, _ in found:
        assert_bitwise(params, [param.detach() for param in model.parameters()])
    assert_bitwise(found[0][1]["state"], plain.state_dict()["state"])


def _set_in_a_fresh_one(rank: int, world_size: int) -> Any:
    def make(model: nn.Module) -> zero_opt.ShardedOptimizer:
        return zero_opt.ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.1, fused=True, offload=zero_opt.WorkerOffload(delay=1)
        )

    model = _model()
    optimizer = make(model)
    for seed in range(STEPS):
        _step(model, optimizer, seed)
    optimizer.flush()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    optimizer.close()
    resumed = _model()
    resumed.load_state_dict(model.state_dict())
    optimizer = make(resumed)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_opt").addHandler(handler)
    set_optimizer_state_dict(resumed, optimizer, saved)
    assert not said
    unchanged = [param.detach().clone() for param in resumed.parameters()]
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in model.parameters()], unchanged, saved["state"], state


def test_state_is_set_in_a_fresh_optimizer_whose_steps_are_late() -> None:
    """torch steps a fresh optimizer once, with learning rate 0."""
    for expected, found, saved, state in run_processes(2, _set_in_a_fresh_one):
        assert_bitwise(found, expected)
        if state is not None:
            assert_bitwise(list(state.values()), list(saved.values()))


def _get_of_a_fresh_one(rank: int, world_size: int) -> Any:
    model = _model()
    optimizer = _sharded(model)
    steps = _counted(optimizer)
    got = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    optimizer.close()
    return got, len(steps), [param.detach() for param in model.parameters()]


def test_state_of_a_fresh_optimizer_is_what_torchs_step_with_zeros_makes_of_a_plain_one() -> None:
    model, plain = _plain(0)
    steps = _counted(plain)
    wanted = get_optimizer_state_dict(model, plain)
    assert all(state["step"] == 1 for state in wanted["state"].values())  # type: ignore[union-attr, index]
    for found in run_processes(2, _get_of_a_fresh_one):
        assert_bitwise(found, (wanted, len(steps), [param.detach() for param in _model().parameters()]))


def _set_full(rank: int, world_size: int, given: Any, broadcast: bool) -> Any:
    model = _model()
    optimizer = _sharded(model)
    _step(model, optimizer, 99)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_optimizer_state_dict(model, optimizer, {} if broadcast and rank else given, options=options)
    optimizer.consolidate_state_dict(to=0)
    full = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return full


@pytest.mark.parametrize("broadcast", [False, True])
def test_full_state_of_a_plain_optimizer_can_be_set(broadcast: bool) -> None:
    model, plain = _plain(STEPS)
    given: dict[str, Any] = get_optimizer_state_dict(model, plain)  # type: ignore[assignment]
    found = run_processes(2, _set_full, given, broadcast)[0]
    state: dict[int, dict[str, Tensor]] = found["state"]
    assert_bitwise(state, plain.state_dict()["state"])


# ---------------------------------------------------------------------------------------------------------------------
# dcp.save and dcp.load given the optimizer itself


@zero_opt.register_elementwise
class Counting(torch.optim.SGD):
    """Keeps a Python number per parameter, which torch saves apart from tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    count = self.state[param].get("count", 0) + 1
                    self.state[param]["count"] = count
                    param.data.mul_(1 - 0.01 * count)


class Unknown(torch.optim.AdamW):
    """A class of the user's, which nothing is known of."""


class App:
    """What the user has made Stateful: calls ``state_dict`` of what it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict["optimizer"])


MASTERS = zero_opt.MixedPrecision(master_dtype=torch.float32)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Counting": (Counting, {"lr": 0.1, "momentum": 0.9}),
    "masters": (torch.optim.AdamW, {"fused": True, "precision": MASTERS}),
    "host": (torch.optim.AdamW, {"fused": True, "offload": zero_opt.CPUOffload()}),
    "worker": (zero_opt.CPUAdamW, {"offload": zero_opt.WorkerOffload()}),
}


def _ours(model: nn.Module, kind: str, saved: bool = False) -> zero_opt.ShardedOptimizer:
    cls, options = KINDS[kind]
    groups = _groups(model)
    if not saved:  # which is loaded
        groups[0]["lr"] = 0.5
    return zero_opt.ShardedOptimizer(groups, cls, reduction=zero_opt.Overlapped(BUCKET_MB), **options)


def _kept(model: nn.Module, optimizer: zero_opt.ShardedOptimizer) -> Any:
    optimizer.consolidate_state_dict(to=0)
    full = optimizer.state_dict() if optimizer._group.rank == 0 else None
    return [param.detach().clone() for param in model.parameters()], full


def _dtype(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == "masters" else torch.float32


def _batch(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    dtype = next(model.parameters()).dtype
    data = torch.randn(4, 30, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(data).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _save_itself(rank: int, world_size: int, folder: str, kind: str, wrap: bool) -> Any:
    model = _model().to(_dtype(kind))
    optimizer = _ours(model, kind, saved=True)
    for seed in range(STEPS):
        _batch(model, optimizer, seed)
    dcp.save({"opt": App(optimizer) if wrap else optimizer, "model": model}, checkpoint_id=folder)
    for seed in range(STEPS, 2 * STEPS):
        _batch(model, optimizer, seed)
    kept = _kept(model, optimizer)
    optimizer.close()
    return kept


def _load_itself(rank: int, world_size: int, folder: str, kind: str, wrap: bool, fresh: bool) -> Any:
    model = _model().to(_dtype(kind))
    optimizer = _ours(model, kind)
    if not fresh:
        _batch(model, optimizer, 99)
    assert fresh is not any(optimizer.state.values()) or kind in ("SGD", "Adagrad")
    dcp.load({"opt": App(optimizer) if wrap else optimizer, "model": model}, checkpoint_id=folder)
    for seed in range(STEPS, 2 * STEPS):
        _batch(model, optimizer, seed)
    kept = _kept(model, optimizer)
    optimizer.close()
    return kept


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_given_to_dcp_goes_on(kind: str, world_size: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    wanted = run_processes(world_size, _save_itself, folder, kind, False, timeout=LONG)
    for fresh in (True, False):
        found = run_processes(world_size, _load_itself, folder, kind, False, fresh, timeout=LONG)
        assert_bitwise(found, wanted, f"fresh: {fresh}")
    assert_bitwise(run_processes(3 - world_size, _load_itself, folder, kind, False, True, timeout=LONG)[0], wanted[0])


def test_one_inside_another_stateful(tmp_path: Path) -> None:
    wanted = run_processes(2, _save_itself, str(tmp_path), "AdamW", True, timeout=LONG)
    found = run_processes(2, _load_itself, str(tmp_path), "AdamW", True, True, timeout=LONG)
    assert_bitwise(found, wanted)


def _load_unknown(rank: int, world_size: int, folder: str) -> None:
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(_groups(model), Unknown)
    dcp.save({"opt": optimizer}, checkpoint_id=folder)
    with pytest.raises(zero_opt.StateDictError, match=r"would load no state of parameter 0.*opt.load_state_dict\(\)"):
        dcp.load({"opt": optimizer}, checkpoint_id=folder)
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_class_that_nothing_is_known_of_is_refused(world_size: int, tmp_path: Path) -> None:
    run_processes(world_size, _load_unknown, str(tmp_path), timeout=LONG)


def _load_dtensors(rank: int, world_size: int, folder: str) -> None:
    for offload in (None, zero_opt.CPUOffload()):
        net, name = fsdp_models.sharded_net(fsdp_models.mesh_of((world_size,))), f"{folder}/{offload is None}"
        optimizer = fsdp_models.sharded_optimizer(net, offload=offload)
        fsdp_models.backward(net, 0, rank)
        optimizer.step()
        wanted = fsdp_models.local_state(optimizer)
        dcp.save({"opt": optimizer}, checkpoint_id=name)
        optimizer.close()
        optimizer = fsdp_models.sharded_optimizer(net, offload=offload)
        dcp.load({"opt": optimizer}, checkpoint_id=name)
        assert_bitwise(fsdp_models.local_state(optimizer), wanted)
        assert any(wanted)
        optimizer.close()


def test_dtensors_are_loaded(tmp_path: Path) -> None:
    run_processes(2, _load_dtensors, str(tmp_path), timeout=LONG)


def _from_selective(rank: int, world_size: int, folder: Path, steps: int) -> None:
    """A sharded checkpoint of Selective, and the same as one dict, go on alike under no offload."""
    policy = zero_opt.WorkerOffload(selective=zero_opt.Selective(0.1, 4))
    model = _model()
    saving = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, offload=policy)
    for seed in range(steps):
        _step(model, saving, seed)
    dcp.save(zero_opt.sharded_state_dict(saving), checkpoint_id=folder)
    saving.consolidate_state_dict()
    whole = [saving.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(whole, 0)
    saving.close()
    results = []
    for loads in (False, True):
        other = copy.deepcopy(model)
        optimizer = zero_opt.ShardedOptimizer(other.parameters(), torch.optim.AdamW)
        if loads:
            saved = zero_opt.sharded_state_dict(optimizer)
            dcp.load(saved, checkpoint_id=folder)
            zero_opt.load_sharded_state_dict(optimizer, saved)
        else:
            optimizer.load_state_dict(whole[0])
        _step(other, optimizer, steps)
        results.append([param.detach() for param in other.parameters()])
        optimizer.close()
    assert_bitwise(*results)


@pytest.mark.parametrize("steps", [3, 4])
def test_a_sharded_checkpoint_of_selective_loads_under_another_offload(tmp_path: Path, steps: int) -> None:
    run_processes(2, _from_selective, tmp_path, steps)
