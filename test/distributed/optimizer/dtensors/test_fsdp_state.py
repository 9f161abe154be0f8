"""State of an optimizer over DTensors: what the user sees, and how it is saved and loaded at any number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import zero_opt
from test.support.fsdp_models import (
    BF16,
    Net,
    backward,
    groups_of,
    local_state,
    locals_of,
    mesh_of,
    set_lr,
    sharded_net,
    sharded_optimizer,
)
from test.support.harness import assert_bitwise, run_processes

WORKER, LATER = zero_opt.WorkerOffload(), zero_opt.WorkerOffload(delay=1)
OFFLOADS = {"device": None, "worker": WORKER}


def _train(net: Net, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        set_lr(optimizer, step)
        optimizer.zero_grad()
        backward(net, step, rank)
        optimizer.step()
    optimizer.zero_grad()


def _whole(values: Any) -> Any:
    """State with everything in full shape."""
    return {
        index: {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in entry.items()}
        for index, entry in values.items()
    }


def _shown(rank: int, world_size: int) -> None:
    net = sharded_net(mesh_of((2, 2)))
    optimizer = sharded_optimizer(net, offload=WORKER)
    _train(net, optimizer, rank, range(2))
    for param in (net.up.weight, net.head.weight):
        state: Any = optimizer.state[param]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and type(state) is dict
        assert float(state["step"]) == 2 and not isinstance(state["step"], DTensor)
        moment = state["exp_avg"]
        assert (moment.shape, moment.stride(), moment.placements) == (param.shape, param.stride(), param.placements)
        assert moment.to_local().shape == param.to_local().shape
    shown, before = optimizer.state[net.up.weight], optimizer.state[net.up.weight]["exp_avg"].to_local().clone()
    backward(net, 3, rank)
    optimizer.step()
    assert optimizer.state[net.up.weight] is shown
    assert not torch.equal(shown["exp_avg"].to_local(), before)  # live
    held = sum(t.to_local().numel() * 4 for s in optimizer.state.values() for t in s.values() if isinstance(t, DTensor))
    with_masters = held * 3 // 2
    assert with_masters < optimizer.memory_report()["state"] < with_masters + 100
    optimizer.close()


def test_state_is_shown_as_dtensors_over_live_memory() -> None:
    run_processes(4, _shown)


def _edited(rank: int, world_size: int) -> None:
    """In place, replaced by one cut alike, by a whole tensor, by none at all."""
    found = []
    for offload in (False, WORKER):
        net = sharded_net(mesh_of((world_size,)))
        plain = torch.optim.AdamW(groups_of(net), lr=0.02, fused=True)
        optimizer: Any = plain if offload is False else sharded_optimizer(net, offload=offload)
        _train(net, optimizer, rank, range(2))
        up, down = optimizer.state[net.up.weight], optimizer.state[net.down.weight]
        up["exp_avg"].mul_(3)
        down["exp_avg"] = down["exp_avg"] * 2
        down["step"] = torch.tensor(7.0)
        if offload is False:
            up["exp_avg_sq"].fill_(0.25)
        else:
            up["exp_avg_sq"] = torch.full(net.up.weight.shape, 0.25)
        del optimizer.state[net.head.weight]
        _train(net, optimizer, rank, range(2, 4))
        found.append([locals_of(net.parameters()), local_state(optimizer)])
    assert_bitwise(found[1], found[0])


def test_edited_state_is_what_is_stepped() -> None:
    run_processes(2, _edited)


def _consolidated(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    for offload in (None, WORKER):
        net = sharded_net(mesh_of(shape))
        optimizer = sharded_optimizer(net, offload=offload)
        _train(net, optimizer, rank, range(3))
        expected = _whole({i: dict(s) for i, s in enumerate(map(optimizer.state.get, _params(optimizer))) if s})
        optimizer.consolidate_state_dict(to=1)
        saved = optimizer.state_dict()
        assert saved["state"].keys() == expected.keys()
        if rank != 1:
            assert all(isinstance(entry["exp_avg"], DTensor) for entry in saved["state"].values())
            assert_bitwise(_locals(saved["state"]), _locals(optimizer.state_dict()["state"]))
        else:
            assert_bitwise(saved["state"], expected)
            whole = Net()
            plain = torch.optim.AdamW(groups_of(whole), lr=1.0, fused=True)
            plain.load_state_dict(saved)
            assert_bitwise(plain.state_dict()["state"], expected)
        optimizer.state[net.up.weight]["exp_avg"].zero_()  # what was consolidated is not the state any more
        assert isinstance(optimizer.state_dict()["state"][0]["exp_avg"], DTensor)
        optimizer.close()


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _locals(states: Any) -> Any:
    return {
        index: {key: value.to_local() if isinstance(value, DTensor) else value for key, value in entry.items()}
        for index, entry in states.items()
    }


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["shards", "replicas"])
def test_a_plain_optimizer_loads_what_was_consolidated(shape: tuple[int, ...]) -> None:
    run_processes(torch.Size(shape).numel(), _consolidated, shape)


def _replace(optimizer: Any, param: Any) -> None:
    entry = optimizer.state[param]
    for value in (3.0, 7.0):  # the second may get the memory, and the identity, of what the first has replaced
        entry["exp_avg"] = torch.full_like(entry["exp_avg"], value)


def _replace_entry(optimizer: Any, param: Any) -> None:
    entry = optimizer.state[param]
    optimizer.state[param] = {**entry, "exp_avg": torch.full_like(entry["exp_avg"], 7.0)}


def _count(optimizer: Any, param: Any) -> None:
    optimizer.state[param]["number"] = 2


def _edited_at_version_0(rank: int, world_size: int, offload: Any, edit: Any) -> None:
    net = sharded_net(mesh_of((world_size,)))
    param, optimizer = net.up.weight, sharded_optimizer(net, offload=offload)
    _train(net, optimizer, rank, range(1))
    if offload is None:
        optimizer.state[param]["number"] = 1
    optimizer.consolidate_state_dict(to=0)
    saved = [optimizer.state_dict()]
    dist.broadcast_object_list(saved, 0)
    optimizer.load_state_dict(saved[0])
    optimizer.consolidate_state_dict(to=0)
    (index,) = [i for i, one in enumerate(_params(optimizer)) if one is param]
    before = optimizer.state_dict()["state"][index]
    assert isinstance(before["exp_avg"], DTensor) == (rank != 0)
    edit(optimizer, param)
    found = optimizer.state_dict()["state"][index]
    assert isinstance(found["exp_avg"], DTensor)
    if edit is _count:
        assert found["number"] == 2
    else:
        assert (found["exp_avg"].to_local() == 7).all()
    dist.barrier()
    optimizer.close()


@pytest.mark.parametrize("edit", [_replace, _replace_entry], ids=["by key", "by entry"])
@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_new_values_are_in_the_state_dict(offload: Any, edit: Any) -> None:
    run_processes(2, _edited_at_version_0, offload, edit)


def test_new_numbers_are_in_the_state_dict() -> None:
    run_processes(2, _edited_at_version_0, None, _count)


def _loaded(rank: int, world_size: int) -> None:
    """From itself, from torch's optimizer, whole, and from another mesh; training goes on with the same bits."""
    source_net = sharded_net(mesh_of((2, 2)), BF16)
    source = torch.optim.AdamW(groups_of(source_net), lr=0.02, fused=True)
    _train(source_net, source, rank, range(3))
    saved, values = copy.deepcopy(source.state_dict()), [p.full_tensor().detach() for p in source_net.parameters()]
    whole = {"state": _whole(saved["state"]), "param_groups": saved["param_groups"]}
    _train(source_net, source, rank, range(3, 5))
    for offload in (None, WORKER, LATER):
        for given, shape in ((saved, (2, 2)), (whole, (2, 2)), (saved, (4,))):
            net = sharded_net(mesh_of(shape), BF16)
            with torch.no_grad():
                for param, value in zip(net.parameters(), values, strict=True):
                    param.copy_(torch.distributed.tensor.distribute_tensor(value, param.device_mesh, param.placements))
            optimizer = sharded_optimizer(net, offload=offload, lr=1.0)
            optimizer.load_state_dict(given)
            state = _whole(optimizer.state_dict()["state"])
            assert_bitwise(state, whole["state"], f"{offload}, {shape}")
            if shape == (2, 2) and offload is not LATER:
                _train(net, optimizer, rank, range(3, 5))
                assert_bitwise(locals_of(net.parameters()), locals_of(source_net.parameters()), str(offload))
                assert_bitwise(local_state(optimizer), local_state(source), str(offload))
            optimizer.close()


def test_state_of_torch_is_loaded_whole_or_cut_in_any_way() -> None:
    run_processes(4, _loaded)


def _with_masters(rank: int, world_size: int, folder: str) -> None:
    """bf16 parameters with fp32 masters, wherever those are; saved and loaded in the middle."""
    tiers: list[dict[str, Any]] = [
        {"precision": zero_opt.MixedPrecision(master_dtype=torch.float32)},
        {"offload": WORKER},
        {"offload": zero_opt.CPUOffload(ratio=0.5)},
        {"offload": zero_opt.NVMeOffload(folder)},
    ]
    mesh, found = mesh_of((world_size,)), []
    for tier in tiers:
        net, other = (sharded_net(mesh, ragged=True, dtype=torch.bfloat16) for _ in range(2))
        optimizer, resumed = sharded_optimizer(net, **tier), sharded_optimizer(other, **tier)
        _train(net, optimizer, rank, range(3))
        with torch.no_grad():
            for copied, param in zip(other.parameters(), net.parameters(), strict=True):
                copied.copy_(param)
        saved, places = zero_opt.sharded_state_dict(optimizer), zero_opt.sharded_state_dict(resumed)
        assert {"master", "exp_avg"} <= saved["state"][0].keys()
        assert all(places["state"][index].keys() == entry.keys() for index, entry in saved["state"].items())
        zero_opt.load_sharded_state_dict(resumed, saved)
        _train(net, optimizer, rank, range(3, 5))
        _train(other, resumed, rank, range(3, 5))
        assert_bitwise(locals_of(other.parameters()), locals_of(net.parameters()), str(tier))
        optimizer.consolidate_state_dict(to=0)
        found.append([locals_of(net.parameters()), optimizer.state_dict()["state"] if rank == 0 else None])
        optimizer.close()
        resumed.close()
    for tier, one in zip(tiers[1:], found[1:], strict=True):
        assert_bitwise(one, found[0], str(tier))


def test_masters_of_dtensors_are_alike_wherever_they_are(tmp_path: Path) -> None:
    run_processes(2, _with_masters, str(tmp_path))


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _save(rank: int, world_size: int, folder: Path, offload: Any, own: bool) -> Any:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=offload)
    _train(net, optimizer, rank, range(3))
    dcp.save({"optimizer": _state_dict(net, optimizer, own=own)}, checkpoint_id=folder)
    return {name: _whole({0: optimizer.state.get(p, {})})[0] for name, p in net.named_parameters()}


def _load(rank: int, world_size: int, folder: Path, offload: Any, own: bool) -> Any:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=offload)
    found = {"optimizer": _state_dict(net, optimizer, own=own)}
    dcp.load(found, checkpoint_id=folder)
    if own:
        zero_opt.load_sharded_state_dict(optimizer, found["optimizer"])
    else:
        set_optimizer_state_dict(net, optimizer, found["optimizer"])
    return {name: _whole({0: optimizer.state.get(p, {})})[0] for name, p in net.named_parameters()}


def _state_dict(net: Net, optimizer: zero_opt.ShardedOptimizer, *, own: bool) -> Any:
    return zero_opt.sharded_state_dict(optimizer) if own else get_optimizer_state_dict(net, optimizer)


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
@pytest.mark.parametrize("own", [False, True], ids=["torch", "ours"])
def test_a_checkpoint_is_loaded_at_another_number_of_ranks(tmp_path: Path, offload: Any, own: bool) -> None:
    saved = run_processes(2, _save, tmp_path, offload, own)
    loaded = run_processes(3, _load, tmp_path, offload, own)
    for found in (*saved[1:], *loaded):
        assert_bitwise(found, saved[0])


def _full(rank: int, world_size: int) -> None:
    """As torch's optimizer gives it."""
    found, options = [], StateDictOptions(full_state_dict=True, cpu_offload=True)
    for make in (lambda net: torch.optim.AdamW(groups_of(net), lr=0.02, fused=True), sharded_optimizer):
        net = sharded_net(mesh_of((world_size,)))
        optimizer = make(net)
        _train(net, optimizer, rank, range(2))
        found.append(get_optimizer_state_dict(net, optimizer, options=options))
    assert_bitwise(found[1], found[0])
    assert bool(found[0]) == (dist.get_rank() == 0)


def test_torch_gathers_the_full_state() -> None:
    run_processes(2, _full)
