"""Parameters that users write to after construction: on some ranks alone it is an error, else nobody notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zero_opt
from test.support.harness import assert_bitwise, copies_of, run_processes, run_threads
from test.support.scenario import values

OVERLAPPED, AT_STEP, REDUCED = zero_opt.Overlapped(0.001), zero_opt.AtStep(0.001), zero_opt.AlreadyReduced()
REDUCTIONS = pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP, REDUCED], ids=lambda p: type(p).__name__)


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 30), nn.Linear(30, 5, bias=False))
    for number, param in enumerate(model.parameters()):
        param.data = values(1, 0, 0, number, tuple(param.shape)).clone()
    return model.to(dtype)


def _named(model: nn.Module, cls: Any = torch.optim.AdamW, **options: Any) -> zero_opt.ShardedOptimizer:
    return zero_opt.ShardedOptimizer(list(model.named_parameters()), cls, lr=0.1, **options)


def _backward(model: nn.Module, step: int) -> None:
    """Gradients that are the same on all ranks, as AlreadyReduced wants them."""
    params = [param for param in model.parameters() if param.requires_grad]
    grads = [values(step + 2, 0, 0, i, tuple(param.shape)).to(param.dtype) for i, param in enumerate(params)]
    torch.autograd.backward(params, grads)


def _train(model: nn.Module, optimizer: Any, *steps: int) -> None:
    for step in steps:
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def _other(model: nn.Module) -> dict[str, Tensor]:
    """What somebody else has trained."""
    return {key: value.detach() * 2 + 1 for key, value in model.state_dict().items()}


def _whole(model: nn.Module) -> None:
    model.load_state_dict(_other(model))


def _one_element(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("1.weight")[2, 3] += 1


def _repoint(model: nn.Module) -> None:
    param = model.get_parameter("1.weight")
    param.data = param.data + 1


Edit = Callable[[nn.Module], None]
EDITS = pytest.mark.parametrize("edit", [_whole, _one_element, _repoint], ids=lambda edit: str(edit.__name__))


def _go_on(model: nn.Module, optimizer: Any, src: int, steps: int) -> None:
    """Do what the refusal says, repeat the step and take another one."""
    zero_opt.broadcast_params(model, src=src)
    optimizer.step()
    optimizer.zero_grad()
    _train(model, optimizer, steps + 1)
    optimizer.flush()
    optimizer.close()


def _edit_one(rank: int, world_size: int, edit: Edit, options: dict[str, Any], who: int, steps: int) -> Any:
    """The message, values before and after the refused step, and values after all goes on."""
    model = _model(options.pop("dtype", torch.float32))
    optimizer = _named(model, **options)
    _train(model, optimizer, *range(steps))
    optimizer.flush()
    if rank == who:
        edit(model)
    before = copies_of(model)
    _backward(model, steps)
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.step()
    refused = copies_of(model)
    with pytest.raises(zero_opt.RankMismatch, match="broadcast_params"):  # it is not forgotten
        optimizer.step()
    _go_on(model, optimizer, who, steps)
    return str(caught.value), before, refused, copies_of(model)


def _edit_all(rank: int, world_size: int, edit: Edit, options: dict[str, Any], steps: int) -> list[Tensor]:
    model = _model(options.pop("dtype", torch.float32))
    optimizer = _named(model, **options)
    _train(model, optimizer, *range(steps))
    optimizer.flush()
    edit(model)
    _train(model, optimizer, steps, steps + 1)
    optimizer.flush()
    optimizer.close()
    return copies_of(model)


def _check(world_size: int, edit: Edit, options: dict[str, Any], who: int, steps: int) -> None:
    found = run_processes(world_size, _edit_one, edit, options, who, steps)
    assert len({message for message, *_ in found}) == 1
    message = found[0][0]
    assert f"written to on rank {who} alone" in message and "broadcast_params" in message
    assert "(1.weight)" in message and ("(0.weight)" in message) == (edit is _whole)
    for _, before, refused, _ in found:
        assert_bitwise(before, refused)
    wanted = run_processes(world_size, _edit_all, edit, options, steps)
    assert_bitwise([after for *_, after in found], wanted)


@EDITS
@REDUCTIONS
def test_a_parameter_written_to_on_one_rank_is_refused_on_all(edit: Edit, reduction: Any) -> None:
    _check(2, edit, {"reduction": reduction}, 0, 1)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("who", [0, 2])
def test_at_the_first_step_as_later_whichever_rank_it_was(steps: int, who: int) -> None:
    _check(3, _whole, {}, who, steps)


@pytest.mark.parametrize(
    "options",
    [
        {"offload": zero_opt.CPUOffload(), "dtype": torch.bfloat16},
        {"precision": zero_opt.MixedPrecision(torch.float32), "dtype": torch.bfloat16},
        {"offload": zero_opt.WorkerOffload()},
        {"offload": zero_opt.WorkerOffload(delay=1), "dtype": torch.bfloat16},
    ],
    ids=["host", "masters", "worker", "delayed"],
)
def test_wherever_the_shard_lives(options: dict[str, Any]) -> None:
    _check(2, _whole, {"fused": True, **options}, 1, 2)


def _edit_while_it_gathers(rank: int, world_size: int, steps: int) -> str:
    model = _model()
    reduction = zero_opt.Overlapped(0.001, overlap_param_gather=model)
    optimizer = _named(model, reduction=reduction)
    for step in range(steps):
        model(torch.ones(3, 6)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            model.load_state_dict(_other(model))  # on every rank
    if rank == 1:
        model.load_state_dict(_other(model))
    model(torch.ones(3, 6)).mean().backward()
    with pytest.raises(zero_opt.RankMismatch, match=r"0\.weight.*on rank 1 (alone|more often)") as caught:
        optimizer.step()
    optimizer.close()
    return str(caught.value)


def test_what_arrives_in_the_background_is_no_edit() -> None:
    for steps, where in ((3, "rank 1 alone"), (4, "rank 1 more often than on rank 0")):
        for message in run_processes(2, _edit_while_it_gathers, steps):
            assert f"written to on {where}" in message


def _unlike(rank: int, world_size: int, options: dict[str, Any], steps: int, sent: bool) -> Any:
    """All ranks write other values, equally often; see `_edit_one`.

    Args:
        sent: whether rank 0 has changed another parameter too, and sent it to the others: no mistake.
    """
    model = _model()
    optimizer = _named(model, **options)
    _train(model, optimizer, *range(steps))
    optimizer.flush()
    with torch.no_grad():
        model.get_parameter("1.weight").mul_(1 + rank)
        if sent and rank == 0:
            model.get_parameter("0.weight").add_(1)
    if sent:
        dist.broadcast(model.get_parameter("0.weight").data, 0)
    before = copies_of(model)
    _backward(model, steps)
    for _ in range(4):  # it is not forgotten
        with pytest.raises(zero_opt.RankMismatch) as caught:
            optimizer.step()
    assert_bitwise(copies_of(model), before)
    _go_on(model, optimizer, 0, steps)
    return str(caught.value), copies_of(model)


@pytest.mark.parametrize("options", [{}, {"offload": zero_opt.WorkerOffload(delay=1), "fused": True}], ids=["", "late"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("sent", [False, True], ids=["alone", "beside-uneven-ones"])
def test_other_values_that_every_rank_has_written(sent: bool, steps: int, options: dict[str, Any]) -> None:
    (message, first), (other, second) = run_processes(2, _unlike, options, steps, sent)
    assert message == other and "(1.weight)" in message and "(0.weight)" not in message
    assert "written to on every rank, as by noise without a common seed" in message
    assert_bitwise(first, second)


def _renormalized(rank: int, world_size: int) -> str:
    """An embedding whose forward writes to the rows that it looks up: on each rank other ones."""
    torch.manual_seed(0)
    embedding = nn.Embedding(8, 4, max_norm=0.5)
    optimizer = zero_opt.ShardedOptimizer(embedding.parameters(), torch.optim.SGD, lr=0.1)
    embedding(torch.tensor([rank, 2])).sum().backward()
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.step()
    optimizer.close()
    return str(caught.value)


def test_an_embedding_that_renormalizes_what_it_looks_up() -> None:
    for message in run_processes(2, _renormalized):
        assert "nn.Embedding(max_norm=...)" in message


# ---------------------------------------------------------------------------------------------------------------------
# what is no mistake


def _views_that_share_a_counter(rank: int, world_size: int) -> list[Tensor]:
    """Parameters cut out of one tensor: a gather of one of them raises the version counter of all."""
    flat = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    model = nn.ParameterList([nn.Parameter(flat[start : start + 1000]) for start in (0, 1000, 2000)])
    reduction = zero_opt.AtStep(0.001, overlap_param_gather=model)
    # Each parameter belongs to one rank, so ranks write to different ones.
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), _Whole, lr=0.1, reduction=reduction)
    for step in range(3):
        _train(model, optimizer, step)
    optimizer.flush()
    optimizer.close()
    return copies_of(model)


class _Whole(torch.optim.SGD):
    """Not known to be elementwise."""


def test_our_own_writes_are_no_edits_of_parameters_that_share_a_version_counter() -> None:
    first, second = run_processes(2, _views_that_share_a_counter)
    assert_bitwise(first, second)


def _everything_alike(rank: int, world_size: int, reduction: Any, offload: Any) -> list[Tensor]:
    """Weights are clipped, swapped for their average and back, loaded; state is loaded and flushed."""
    model = _model()
    optimizer = _named(model, reduction=reduction, offload=offload, fused=True)
    average = _other(model)
    for step in range(6):
        _train(model, optimizer, step)
        optimizer.flush()
        with torch.no_grad():
            if step == 1:
                for param in model.parameters():
                    param.clamp_(-1, 1)
            if step == 2 and rank == 0:  # to evaluate on one rank
                kept = copies_of(model)
                model.load_state_dict(average)
                for param, value in zip(model.parameters(), kept, strict=True):
                    param.copy_(value)
            if step == 3:
                model.load_state_dict(average)
        if step == 4:
            optimizer.load_state_dict(optimizer.state_dict())
    optimizer.flush()
    optimizer.close()
    return copies_of(model)


@REDUCTIONS
@pytest.mark.parametrize(
    "offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()], ids=["device", "host", "worker"]
)
def test_edits_that_leave_all_ranks_alike_are_none_of_our_business(reduction: Any, offload: Any) -> None:
    first, second = run_processes(2, _everything_alike, reduction, offload)
    assert_bitwise(first, second)


def _sent_by_hand(rank: int, world_size: int, dtype: torch.dtype, offload: Any) -> list[Tensor]:
    """Version counters see nothing of what is written through ``.data``: only rank 0's do."""
    model = _model(dtype)
    optimizer = _named(model, offload=offload, fused=True)
    _train(model, optimizer, 0)
    if rank == 0:
        _whole(model)
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    _train(model, optimizer, 1, 2)
    optimizer.close()
    return copies_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()], ids=["device", "host", "worker"]
)
def test_weights_that_one_rank_has_sent_to_the_others_are_taken_over_on_all(dtype: torch.dtype, offload: Any) -> None:
    found = run_processes(2, _sent_by_hand, dtype, offload)
    wanted = run_processes(2, _edit_all, _whole, {"dtype": dtype, "offload": offload, "fused": True}, 1)
    assert_bitwise(found, wanted)


def _wrapped_late(rank: int, world_size: int) -> list[Tensor]:
    """DDP overwrites the parameters of all ranks but the first, after the optimizer has been made of them."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 30), nn.Linear(30, 5))
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, reduction=REDUCED)
    wrapped = DistributedDataParallel(model)
    for _ in range(3):
        wrapped(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return copies_of(model)


def test_ddp_may_come_after_the_optimizer() -> None:
    first, second = run_processes(2, _wrapped_late)
    assert_bitwise(first, second)


def _uneven(rank: int, world_size: int, clip: Sequence[int]) -> Any:
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(list(model.named_parameters()), torch.optim.AdamW)
    message = ""
    try:
        with Join([optimizer]):
            for step in range(2 + 2 * rank):
                model(torch.ones(3, 6)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step in clip:
                    with torch.no_grad():
                        for param in model.parameters():
                            param.clamp_(-0.1, 0.1)
    except zero_opt.RankMismatch as error:
        message = str(error)
    return message, copies_of(model)


def test_ranks_without_inputs_are_asked_too() -> None:
    (quiet, first), (_, second) = run_processes(2, _uneven, [0, 1])
    assert quiet == ""
    assert_bitwise(first, second)
    for message, _ in run_processes(2, _uneven, [2]):
        assert "written to on rank 1 alone" in message


# ---------------------------------------------------------------------------------------------------------------------
# parameters that are frozen


def _thaw(rank: int, world_size: int, who: Sequence[int]) -> str:
    model = _model()
    frozen = model.get_parameter("0.weight")
    frozen.requires_grad_(False)
    optimizer = _named(model)
    _train(model, optimizer, 0)
    if rank in who:
        with torch.no_grad():
            frozen.add_(1)
    _train(model, optimizer, 1)  # while it is frozen it is the ranks' own
    frozen.requires_grad_(True)
    _backward(model, 2)
    message = ""
    try:
        optimizer.step()
    except zero_opt.RankMismatch as error:
        message = str(error)
        zero_opt.broadcast_params(model)
        optimizer.step()
    optimizer.close()
    return message


@pytest.mark.parametrize("who", [[0], [1], [0, 1], []])
def test_a_parameter_written_to_on_one_rank_while_frozen_is_refused_when_it_is_thawed(who: list[int]) -> None:
    for message in run_threads(2, _thaw, who):
        assert ("(0.weight)" in message and "broadcast_params" in message) == (len(who) == 1)


def _tie(rank: int, world_size: int, offload: Any, after: int) -> None:
    model = _model()
    optimizer = _named(model, fused=True, offload=offload)
    _train(model, optimizer, *range(after))
    model[0].bias.data = model[1].weight.data.view(-1)[:30]
    _backward(model, after)
    with pytest.raises(zero_opt.errors.UnsupportedParam, match=r"0\.bias.* and .*1\.weight.* share memory"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("world_size", "offload"), [(2, None), (1, zero_opt.CPUOffload()), (2, zero_opt.CPUOffload())], ids=str
)
def test_parameters_that_are_re_pointed_into_one_another_are_refused(world_size: int, offload: Any, after: int) -> None:
    run_threads(world_size, _tie, offload, after)


def _replaced_after_the_group(rank: int, world_size: int) -> list[str]:
    optimizer = zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW)
    dist.destroy_process_group()
    param = nn.Parameter(torch.ones(3))
    optimizer.param_groups[0]["params"] = [param]
    param.sum().backward()
    said = []
    for _ in range(2):
        with pytest.raises(zero_opt.ProcessGroupError) as caught:
            optimizer.step()
        said.append(str(caught.value))
    optimizer.close()
    return said


def test_parameters_that_come_once_the_group_is_destroyed_leave_the_optimizer_as_it_was() -> None:
    for first, again in run_processes(2, _replaced_after_the_group):
        assert first == again and "the process group was destroyed" in first
