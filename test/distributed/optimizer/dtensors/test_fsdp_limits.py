"""Parameters sharded by ``fully_shard``: what is refused, and when."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_opt
from test.support.fsdp_models import WIDTH, backward, local_state, locals_of, mesh_of, sharded_net, sharded_optimizer
from test.support.harness import assert_bitwise, run_processes
from zero_opt.errors import (
    ConfigConflict,
    ConfigError,
    ConfigTypeError,
    ParamsUnsharded,
    RankMismatch,
    StateDictError,
    StepPending,
    UnsupportedOptimizer,
    UnsupportedParam,
)

WORKER, LATER = zero_opt.WorkerOffload(), zero_opt.WorkerOffload(delay=1)
EARLY = zero_opt.WorkerOffload(speculate=True)
AdamW, reduced = torch.optim.AdamW, zero_opt.AlreadyReduced()


def _refuse(error: type[Exception], words: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(error, match=words):
        call(*args, **options)


def _copies(rank: int, world_size: int) -> None:
    net = sharded_net(mesh_of((world_size,)))
    for offload in (None, zero_opt.CPUOffload()):
        optimizer = sharded_optimizer(net, offload=offload)
        backward(net, 0, rank)
        optimizer.step()
        for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda opt: torch.save(opt, io.BytesIO())):
            _refuse(ConfigTypeError, r"cannot be copied or pickled: .* save opt\.state_dict\(\)", copied, optimizer)
        backward(net, 1, rank)
        optimizer.step()
        optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_are_refused(world_size: int) -> None:
    run_processes(world_size, _copies)


def _construction(rank: int, world_size: int) -> None:
    net = sharded_net(mesh_of((world_size,)))
    make, params = zero_opt.ShardedOptimizer, list(net.parameters())
    mesh = params[0].device_mesh  # type: ignore[attr-defined]
    plain = nn.Parameter(torch.ones(3))
    summed = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    named = [("a", params[0]), ("b", plain)]
    _refuse(ConfigConflict, "leave process_group out", make, params, AdamW, dist.group.WORLD)
    _refuse(ConfigConflict, "not DDP", make, params, AdamW, reduction=zero_opt.DDPHook())
    background = zero_opt.Overlapped(overlap_param_gather=net)
    _refuse(ConfigConflict, "gathers in the forward", make, params, AdamW, reduction=background)
    precision = zero_opt.MixedPrecision(reduce_dtype=torch.bfloat16)
    _refuse(ConfigConflict, "MixedPrecisionPolicy", make, params, AdamW, precision=precision)
    precision = zero_opt.MixedPrecision(between_hosts_dtype=torch.bfloat16)
    _refuse(ConfigConflict, "leave between_hosts_dtype out", make, params, AdamW, precision=precision)
    for reduction in (reduced, zero_opt.AtStep()):
        _refuse(ConfigConflict, "which A.* does at step", make, params, AdamW, offload=EARLY, reduction=reduction)
    for kind in (zero_opt.CPUOffload, zero_opt.WorkerOffload):
        by_columns = kind(selective=zero_opt.Selective())
        _refuse(ConfigConflict, "leave selective out", make, params, AdamW, offload=by_columns)
    for offload in (None, WORKER):
        _refuse(UnsupportedParam, "plain tensor among DTensors", make, [*params, plain], AdamW, offload=offload)
        _refuse(UnsupportedParam, r"position|parameter 1", make, named, AdamW, offload=offload)
        _refuse(UnsupportedParam, "sums over ranks", make, [summed], AdamW, offload=offload)
    _refuse(UnsupportedOptimizer, "the DTensors themselves", make, params, torch.optim.Muon, offload=WORKER)
    optimizer = make([plain], AdamW)
    _refuse(UnsupportedParam, "make another optimizer", optimizer.add_param_group, {"params": params})
    assert len(optimizer.param_groups) == 1
    optimizer.close()
    for offload in (None, WORKER):
        optimizer = sharded_optimizer(net, offload=offload)
        _refuse(UnsupportedParam, "plain tensor", optimizer.add_param_group, {"params": [plain]})
        _refuse(ConfigError, r"\[0, 1\]", optimizer.consolidate_state_dict, 2)
        _refuse(ConfigTypeError, "must be a rank", optimizer.consolidate_state_dict, "0")
        _refuse(ConfigError, "max_norm", optimizer.clip_grad_norm_, -1)
        optimizer.close()


def test_what_cannot_be_meant_is_refused_with_the_way_out() -> None:
    run_processes(2, _construction)


def _accepted(rank: int, world_size: int) -> None:
    """Any reduction that p.grad of FSDP satisfies; plain parameters beside DTensors where their gradient is said to."""
    found = []
    for reduction in (zero_opt.Overlapped(), zero_opt.AtStep(), reduced):
        for offload in (None, WORKER):
            net = sharded_net(mesh_of((world_size,)))
            extra = nn.Parameter(torch.ones(WIDTH))
            params = [*net.parameters(), *([extra] if reduction is reduced else [])]
            # Of both kinds at once torch's classes take none but one by one.
            options = {"fused": True} if offload or reduction is not reduced else {"foreach": False}
            optimizer = zero_opt.ShardedOptimizer(params, AdamW, reduction=reduction, offload=offload, **options)
            for step in range(2):
                backward(net, step, rank)
                extra.grad = torch.full((WIDTH,), 0.5)
                optimizer.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
            found.append([*locals_of(net.parameters()), extra.detach()])
            optimizer.close()
    assert_bitwise(found[:-2], found[:1] * 4)  # the plain one's gradient is part of the norm
    for one, other in zip(found[-1], found[-2], strict=True):  # for-loop and fused formulas differ in the last bits
        torch.testing.assert_close(one, other)
    assert not torch.equal(found[-1][-1], torch.ones(WIDTH))


def test_a_reduction_that_has_happened_is_accepted() -> None:
    run_processes(2, _accepted)


def _unsharded(rank: int, world_size: int) -> None:
    net = sharded_net(mesh_of((world_size,)))
    sharded_params = list(net.parameters())
    net(torch.ones(4, WIDTH))  # the root keeps what it has gathered, for the backward
    for offload in (None, WORKER):
        _refuse(ParamsUnsharded, r"call model.reshard\(\)", sharded_optimizer, net, offload=offload)
    whole = fully_shard(nn.Linear(4, 4), mesh=mesh_of((world_size,)))
    whole(torch.ones(2, 4))  # no parameter looks like one of FSDP
    _refuse(ParamsUnsharded, r"'weight' of shape \(4, 4\)", zero_opt.ShardedOptimizer, whole.parameters(), AdamW)
    plain = zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3))], AdamW)
    _refuse(ParamsUnsharded, "unsharded", plain.add_param_group, {"params": whole.parameters()})
    plain.close()
    net.reshard()
    for offload in (None, WORKER, LATER, EARLY):
        optimizer = sharded_optimizer(net, offload=offload)
        for step in range(2):
            backward(net, step, rank)
            before, state = locals_of(sharded_params), local_state(optimizer)
            with torch.no_grad():
                net(torch.ones(4, WIDTH))  # an evaluation between backward and step
            _refuse(ParamsUnsharded, r"is unsharded: .*before step\(\)", optimizer.step)
            assert_bitwise([locals_of(sharded_params), local_state(optimizer)], [before, state])
            net.reshard()
            pending = net.unshard(async_op=True)
            _refuse(ParamsUnsharded, r"is being unsharded", optimizer.step)
            assert_bitwise([locals_of(sharded_params), local_state(optimizer)], [before, state])
            pending.wait()
            net.reshard()
            optimizer.step()
        if offload is LATER:
            net(torch.ones(4, WIDTH))
            _refuse(ParamsUnsharded, "unsharded", optimizer.flush)
            net.reshard()
            _refuse(StepPending, "flush", optimizer.state_dict)
            optimizer.flush()
        optimizer.close()


def test_gathered_copies_are_neither_taken_nor_left_behind() -> None:
    run_processes(2, _unsharded)


def _cast(rank: int, world_size: int) -> None:
    for offload in (WORKER, LATER, EARLY):
        net = sharded_net(mesh_of((world_size,)), MixedPrecisionPolicy())
        optimizer = sharded_optimizer(net, offload=offload)
        net.to(torch.bfloat16)
        net(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().sum().backward()
        _refuse(UnsupportedParam, "was torch.float32 .* and is torch.bfloat16", optimizer.step)
        optimizer.close()


def test_a_model_that_is_cast_later_is_refused_in_the_step() -> None:
    run_processes(2, _cast)


def _misfits(rank: int, world_size: int) -> None:
    for offload in (None, WORKER):
        net = sharded_net(mesh_of((world_size,)))
        optimizer = sharded_optimizer(net, offload=offload)
        backward(net, 0, rank)
        optimizer.step()
        saved, before = copy.deepcopy(optimizer.state_dict()), local_state(optimizer)
        part = copy.deepcopy(saved)
        saved["state"][0]["exp_avg"] = torch.zeros(3, 3)
        _refuse(StateDictError, "exp_avg.* shape", optimizer.load_state_dict, saved)
        part["state"][0]["exp_avg"] = part["state"][0]["exp_avg"].to_local()
        _refuse(StateDictError, "exp_avg.* shape", optimizer.load_state_dict, part)
        assert_bitwise(local_state(optimizer), before)
        optimizer.close()


def test_state_that_does_not_fit_changes_nothing() -> None:
    run_processes(2, _misfits)


# -- other DTensors ---------------------------------------------------------------------------------------------------


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(torch.tanh(self.a(x))).clone()
        return out


def _two_dimensions(rank: int, world_size: int) -> None:
    """Tensor parallel by FSDP: rows of one parameter are cut twice, and columns and rows of the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: list[Any] = []
    for offload in (False, None, WORKER):
        net = _Mlp()
        parallelize_module(net, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        plain = AdamW(net.parameters(), lr=0.02, fused=True)
        optimizer: Any = (
            plain
            if offload is False
            else zero_opt.ShardedOptimizer(net.parameters(), AdamW, offload=offload, fused=True, lr=0.02)
        )
        norms = []
        for step in range(3):
            net(torch.full((4, 16), 0.1 + (rank // 2) + step)).square().mean().backward()
            exact = sum(p.grad.full_tensor().double().square().sum() for p in net.parameters())  # type: ignore[union-attr]
            if offload is not False:
                norm = optimizer.clip_grad_norm_(1e9)
                assert abs(norm.double() - exact.sqrt()) <= exact.sqrt() * 2**-24  # type: ignore[union-attr]
                norms.append(norm)
            optimizer.step()
            optimizer.zero_grad()
        found.append([locals_of(net.parameters()), local_state(optimizer)])
        if offload is not False:
            optimizer.consolidate_state_dict(to=0)
            saved = optimizer.state_dict()
            if rank == 0:
                whole = saved["state"]
                assert whole[0]["exp_avg"].shape == (64, 16) and not isinstance(whole[0]["exp_avg"], DTensor)
            sent = [saved]
            dist.broadcast_object_list(sent, 0)
            optimizer.load_state_dict(sent[0])
            assert_bitwise(local_state(optimizer), found[0][1])
            optimizer.close()
    assert_bitwise(found[1], found[0], "device")
    assert_bitwise(found[2], found[0], "worker")


def test_two_dimensional_meshes() -> None:
    run_processes(4, _two_dimensions)


def _without_fsdp(rank: int, world_size: int) -> None:
    """DTensors that the user has made, cut by columns; re-pointed on the way."""
    mesh = mesh_of((world_size,))
    found = []
    for offload in (None, WORKER, EARLY):
        param = nn.Parameter(distribute_tensor(torch.arange(64.0).view(4, 16), mesh, [Shard(1)]))
        optimizer = zero_opt.ShardedOptimizer([param], AdamW, lr=0.1, offload=offload, fused=True)
        for step in range(4):
            if step == 2:
                param.data = distribute_tensor(torch.full((4, 16), 2.0), mesh, [Shard(1)])
            param.grad = distribute_tensor(torch.full((4, 16), 1.0 + step), mesh, [Shard(step % 2)])
            optimizer.step()
        found.append(locals_of([param]))
        optimizer.close()
    assert_bitwise(found[1], found[0], "worker")
    assert_bitwise(found[2], found[0], "speculating")


def test_dtensors_without_fsdp() -> None:
    """Gradients that are cut otherwise than their parameter are brought to where they are stepped."""
    run_processes(2, _without_fsdp)


def _repointed_part(rank: int, world_size: int) -> None:
    """This rank's part of a DTensor, re-pointed to another shape: its state is no DTensor of the parameter any more."""
    mesh = mesh_of((world_size,))
    param = nn.Parameter(distribute_tensor(torch.arange(64.0).view(4, 16), mesh, [Shard(1)]))
    optimizer = zero_opt.ShardedOptimizer([param], AdamW, lr=0.1, offload=WORKER, fused=True)
    param.grad = distribute_tensor(torch.ones(4, 16), mesh, [Shard(1)])
    optimizer.step()
    optimizer.zero_grad()
    part: Any = param
    part._local_tensor.data = torch.ones(4, 5)
    optimizer.flush()
    for save in (partial(zero_opt.sharded_state_dict, optimizer), partial(optimizer.consolidate_state_dict, 0)):
        with pytest.raises(zero_opt.UnsupportedParam, match="parameter 0"):
            save()
    optimizer.close()


def test_state_of_a_part_of_another_shape_is_refused() -> None:
    run_processes(2, _repointed_part)


def _shared_cores(rank: int, world_size: int) -> Any:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=LATER)
    engine: Any = optimizer._engine
    confined = engine.placement._confined
    optimizer.close()
    return confined is None


def test_ranks_of_one_host_share_its_cores() -> None:
    assert run_processes(2, _shared_cores) == [True, True]


def _norm_without_a_rank(rank: int, world_size: int) -> str:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = zero_opt.ShardedOptimizer(net.parameters(), AdamW, fused=True, max_grad_norm=1.0)
    backward(net, 0, rank)
    if rank:
        os._exit(7)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_rank_that_is_lost_while_the_norm_is_taken_has_a_name() -> None:
    message, _ = run_processes(2, _norm_without_a_rank, expect_errors=True)
    assert isinstance(message, str)
    assert "rank 1" in message and "while step() waits for it" in message, message


def _limits_that_differ(rank: int, world_size: int, offload: Any) -> list[str]:
    net, said = sharded_net(mesh_of((world_size,))), []
    for one, other in (
        ({"max_grad_norm": 1.0}, {"max_grad_norm": 2.0}),
        ({"max_grad_norm": 1.0}, {}),
        ({}, {"checks": zero_opt.Checks(nonfinite="raise")}),
    ):
        with pytest.raises(RankMismatch) as caught:
            sharded_optimizer(net, offload=offload, **(other if rank else one))
        said.append(str(caught.value))
    optimizer = sharded_optimizer(net, offload=offload, max_grad_norm=0.5)
    before = locals_of(net.parameters())
    backward(net, 0, rank)
    with pytest.raises(RankMismatch) as caught:
        optimizer.clip_grad_norm_(1.0 + rank)
    said.append(str(caught.value))
    with pytest.raises(RankMismatch) as caught:
        optimizer.step() if rank else optimizer.clip_grad_norm_(3.0)
    said.append(str(caught.value))
    assert_bitwise(locals_of(net.parameters()), before)
    optimizer.clip_grad_norm_(3.0)
    optimizer.step()
    assert not torch.equal(locals_of(net.parameters())[0], before[0])
    optimizer.close()
    return said


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["none", "cpu"])
def test_norms_that_ranks_do_not_clip_to_alike_are_refused_on_every_rank(offload: Any) -> None:
    for said in run_processes(2, _limits_that_differ, offload):
        for message, words in zip(
            said,
            (
                "max_grad_norm: 1.0 on rank 0, 2.0 on rank 1",
                "max_grad_norm: 1.0 on rank 0, None on rank 1",
                "checks.nonfinite: 'ignore' on rank 0, 'raise' on rank 1",
                "clipped to: 1.0 on rank 0, 2.0 on rank 1",
                "rank 0 called clip_grad_norm_() where rank 1 called step()",
            ),
            strict=True,
        ):
            assert words in message, message


# -- the first FSDP ---------------------------------------------------------------------------------------------------


def _fsdp1(rank: int, world_size: int, original: bool) -> str:
    model = FullyShardedDataParallel(nn.Linear(30, 4), device_id=torch.device("cpu"), use_orig_params=original)
    with pytest.raises(UnsupportedParam) as caught:
        zero_opt.ShardedOptimizer(model.parameters(), AdamW, reduction=reduced)
    return str(caught.value)


@pytest.mark.parametrize("original", [False, True])
def test_parameters_of_fsdp1_are_refused(original: bool) -> None:
    for message in run_processes(2, _fsdp1, original):
        assert "(FSDP1)" in message and "use torch.distributed.fsdp.fully_shard" in message
