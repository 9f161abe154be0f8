"""Every kind of parameter, param group and process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_opt
from test.support.actors import Actor, assert_same_as_plain, make_params, plain_actor, rank_actor
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import AT_STEP, OVERLAPPED, values

ALREADY = zero_opt.AlreadyReduced()
ALL = pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP, ALREADY], ids=lambda policy: type(policy).__name__)
BOTH = pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP], ids=lambda policy: type(policy).__name__)
STEPS = 6

# ---------------------------------------------------------------------------------------------------------------------
# layouts and dtypes


def odd_params() -> list[nn.Parameter]:
    """One of every layout and dtype."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    tensors = [
        randn(70, 9).t(),
        randn(20, 30)[:, ::3],  # gaps
        randn(4, 6, 5, 3).to(memory_format=torch.channels_last),
        randn(3, 40, 5).permute(1, 2, 0),
        randn(1)[0],
        randn(0, 3),
        randn(1, 65, 1),
        randn(200),
        randn(300, dtype=torch.float64),
        randn(37, 5, dtype=torch.float64).t(),
        randn(130, dtype=torch.complex64),
        randn(200)[100:],  # in the middle of a storage
    ]
    return [nn.Parameter(tensor) for tensor in tensors]


def _odd_grads(step: int, rank: int, params: Iterable[Tensor]) -> list[Tensor]:
    found = []
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + 100 * rank + index)
        found.append(torch.randn(param.shape, generator=generator, dtype=param.dtype))
    return found


def _mean(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


def _fill(params: list[nn.Parameter], step: int, rank: int, world_size: int, reduction: Any) -> None:
    if isinstance(reduction, zero_opt.AlreadyReduced):
        local = [_odd_grads(step, peer, params) for peer in range(world_size)]
        for param, *grads in zip(params, *local, strict=True):
            param.grad = _mean(grads)  # contiguous, whatever the parameter is
    else:
        torch.autograd.backward(params, _odd_grads(step, rank, params))


def _train_odd(rank: int, world_size: int, reduction: Any, cls: Any, norm: float | None) -> list[Tensor]:
    params = odd_params()
    where = [(id(param), param.data_ptr(), param.stride(), param.storage_offset()) for param in params]
    options = {"max_grad_norm": norm}
    optimizer = zero_opt.ShardedOptimizer(params, cls, lr=0.01, reduction=reduction, **options)  # type: ignore[arg-type]
    for step in range(STEPS):
        optimizer.zero_grad()
        _fill(params, step, rank, world_size, reduction)
        optimizer.step()
    assert where == [(id(param), param.data_ptr(), param.stride(), param.storage_offset()) for param in params]
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    for index, entry in state.items():
        for key, value in entry.items():
            assert key == "step" or value.shape == params[index].shape
    optimizer.close()
    return [param.detach().contiguous() for param in params]


@ALL
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.RMSprop])
def test_layouts_and_dtypes_in_one_group(cls: Any, reduction: Any) -> None:
    # The oracle's parameters are contiguous: on a strided one torch takes its scalar path, which rounds otherwise.
    params = [nn.Parameter(param.detach().contiguous()) for param in odd_params()]
    optimizer = cls(params, lr=0.01)
    for step in range(STEPS):
        for param, *grads in zip(params, *(_odd_grads(step, rank, params) for rank in range(3)), strict=True):
            param.grad = _mean(grads)
        optimizer.step()
    for found in run_threads(3, _train_odd, reduction, cls, None):
        assert_bitwise(found, [param.detach() for param in params])


@BOTH
def test_clipping_reaches_every_layout(reduction: Any) -> None:
    """Clipped runs agree between reductions: nothing steps an unclipped copy."""
    expected = run_threads(2, _train_odd, reduction, torch.optim.SGD, 0.5)
    free = run_threads(2, _train_odd, reduction, torch.optim.SGD, None)
    assert not torch.equal(free[0][0], expected[0][0])
    for found in run_threads(2, _train_odd, ALREADY, torch.optim.SGD, 0.5):
        for one, other in zip(found, expected[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def _half(rank: int, world_size: int, reduction: Any) -> list[Tensor]:
    params = [nn.Parameter(values(9, 0, 0, i, shape).bfloat16()) for i, shape in enumerate([(130, 3), (64,), (1000,)])]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.5, momentum=0.5, reduction=reduction)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(params, [grad.bfloat16() for grad in _odd_grads(step, rank, params)])
        optimizer.step()
    optimizer.close()
    return [param.detach() for param in params]


@BOTH
def test_bf16_is_summed_in_fp32_and_rounded_once(reduction: Any) -> None:
    params = [nn.Parameter(values(9, 0, 0, i, shape).bfloat16()) for i, shape in enumerate([(130, 3), (64,), (1000,)])]
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.5)
    for step in range(STEPS):
        for param, *grads in zip(params, *(_odd_grads(step, rank, params) for rank in range(3)), strict=True):
            param.grad = _mean([grad.bfloat16().float() for grad in grads]).bfloat16()
        optimizer.step()
    for found in run_threads(3, _half, reduction):
        assert_bitwise(found, [param.detach() for param in params])


def _refused(rank: int, world_size: int, make: Callable[[], Tensor]) -> str:
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3)), make()], torch.optim.SGD, lr=0.1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: nn.Parameter(torch.ones(3, 1).expand(3, 4)), "share memory"),
        (lambda: nn.Parameter(torch.ones(10).as_strided((4, 3), (2, 1))), "share memory"),
        (lambda: nn.Parameter(torch.ones(3, device="meta")), "meta"),
        (lambda: torch.ones(3).to_sparse().requires_grad_(), "sparse"),
    ],
)
def test_parameters_that_cannot_be_sharded_are_named(make: Any, what: str) -> None:
    for message in run_threads(2, _refused, make):
        assert what in message and "parameter 1 " in message


def _complex_in_fp32(rank: int, world_size: int) -> list[str]:
    """Refused when constructed, and in an added group."""
    messages, precision = [], zero_opt.MixedPrecision(reduce_dtype=torch.float32)
    z = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        zero_opt.ShardedOptimizer([z], torch.optim.SGD, precision=precision)
    messages.append(str(caught.value))
    optimizer = zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD, precision=precision)
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        optimizer.add_param_group({"params": [z]})
    messages.append(str(caught.value))
    optimizer.close()
    return messages


def test_complex_gradients_are_not_reduced_in_a_real_dtype() -> None:
    for messages in run_threads(2, _complex_in_fp32):
        assert "parameter 0 " in messages[0] and "parameter 1 " in messages[1]
        assert all("torch.complex64" in message and "reduce_dtype" in message for message in messages)


# ---------------------------------------------------------------------------------------------------------------------
# frozen, unfrozen, re-pointed


def freeze_and_unfreeze(actor: Actor) -> None:
    """Some frozen from the start, among them a whole bucket; then others; then none."""
    frozen = {0: {0, 7}, 2: {0, 3, 4}, 4: set(), 6: set(range(9)), 7: {1}}
    for number in range(9):
        for index, param in enumerate(actor.params):
            if number in frozen:
                param.requires_grad_(index not in frozen[number])
        actor.optimizer.zero_grad()
        actor.backward(number, everyone=True)
        actor.optimizer.step()


def unfreeze_more_than_there_was(actor: Actor) -> None:
    """More buckets become trainable at once than were exchanged before."""
    for number in range(4):
        for index, param in enumerate(actor.params):
            param.requires_grad_(number != 1 or index == 7)
        actor.optimizer.zero_grad()
        actor.backward(number, everyone=True)
        actor.optimizer.step()


def freeze_with_a_gradient(actor: Actor) -> None:
    """torch steps whatever has a gradient, trainable or not."""
    for number in range(5):
        actor.backward(number, everyone=True)
        actor.params[1].requires_grad_(number % 2 == 0)
        actor.optimizer.step()
        if number % 2:
            actor.optimizer.zero_grad()


def freeze_before_construction(actor: Actor) -> None:
    for number in range(4):
        actor.optimizer.zero_grad()
        actor.params[4].requires_grad_(number > 1)
        actor.backward(number, everyone=True)
        actor.optimizer.step()


def repoint_data(actor: Actor) -> None:
    for number in range(4):
        actor.optimizer.zero_grad()
        actor.backward(number, everyone=True)
        if number % 2:
            for param in actor.params[::2]:
                param.data = param.data.clone() * 0.5
        actor.optimizer.step()


def change_hyperparameters(actor: Actor) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(actor.optimizer, 0.7)
    for number in range(5):
        actor.optimizer.zero_grad()
        actor.backward(number)
        actor.optimizer.step()
        schedule.step()
        actor.optimizer.param_groups[1]["betas"] = (0.5 + number / 20, 0.9)


def step_with_a_closure(actor: Actor) -> None:
    for number in range(4):

        def closure(number: int = number) -> float:
            assert torch.is_grad_enabled()
            actor.optimizer.zero_grad()
            actor.backward(number)
            return number + 0.5

        assert actor.optimizer.step(closure) == number + 0.5


def add_groups(actor: Actor) -> None:
    for number in range(6):
        if number % 2:
            added = nn.Parameter(values(77, 0, 0, number, (90 + number, 3)).clone())
            where = [param.data_ptr() for param in actor.params]
            shown = [actor.optimizer.state.get(param) for param in actor.params]
            actor.optimizer.add_param_group({"params": [added], "lr": 0.3, "weight_decay": 0.2})
            actor.params.append(added)
            assert where == [param.data_ptr() for param in actor.params[:-1]]
            for param, state in zip(actor.params, shown, strict=False):
                assert actor.optimizer.state.get(param) is state
        actor.optimizer.zero_grad()
        actor.backward(number)
        actor.optimizer.step()


SCRIPTS = [
    freeze_and_unfreeze,
    unfreeze_more_than_there_was,
    freeze_with_a_gradient,
    freeze_before_construction,
    repoint_data,
    change_hyperparameters,
    step_with_a_closure,
    add_groups,
]


@pytest.mark.sampled(8)
@BOTH
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_parameters_and_groups_that_change(script: Any, reduction: Any) -> None:
    assert_same_as_plain(script, reduction)


@BOTH
def test_parameters_and_groups_that_change_in_real_processes(reduction: Any) -> None:
    def script(actor: Actor) -> None:
        for part in SCRIPTS:
            part(actor)

    assert_same_as_plain(script, reduction, world_size=2, run=run_processes)


def test_whole_param_classes_with_added_groups_and_frozen_params() -> None:
    for script in (add_groups, freeze_and_unfreeze):
        assert_same_as_plain(script, OVERLAPPED, cls=WholeSgd)


class WholeSgd(torch.optim.SGD):
    """Not known to be elementwise, since it is not SGD itself."""

    def __init__(self, params: Any, lr: float = 0.1, **kwargs: Any) -> None:
        super().__init__(params, lr=lr, momentum=0.9, **kwargs)


def _change_shape(rank: int, world_size: int) -> str:
    actor = rank_actor(rank)
    actor.params[1].data = torch.ones(66)
    actor.params[1].grad = None
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        actor.optimizer.step()
    return str(caught.value)


def test_a_parameter_that_changed_shape_is_named() -> None:
    for message in run_threads(2, _change_shape):
        assert "parameter 1 " in message and "66" in message


def _spoil_on_one_rank(rank: int, world_size: int, reduction: Any, clip: bool) -> tuple[str, list[Tensor]]:
    """Rank 1 re-points one parameter and spoils the next; all are told, and go on once it is mended."""
    actor = rank_actor(rank, reduction)
    optimizer: Any = actor.optimizer
    actor.backward(0, everyone=True)
    kept = actor.params[1].data
    if rank == 1:
        actor.params[0].data = actor.params[0].data.clone()
        actor.params[1].data = torch.ones(66)
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        optimizer.clip_grad_norm_(1.0) if clip else optimizer.step()
    actor.params[1].data = kept
    optimizer.zero_grad()
    actor.backward(1, everyone=True)
    optimizer.step()
    optimizer.close()
    return str(caught.value), [param.detach() for param in actor.params]


@BOTH
@pytest.mark.parametrize("clip", [False, True], ids=["step", "clip"])
def test_a_parameter_spoilt_on_one_rank_is_named_on_all_and_nothing_is_half_done(clip: bool, reduction: Any) -> None:
    oracle = plain_actor(2, reduction)
    oracle.backward(1, everyone=True)
    oracle.optimizer.step()
    for message, params in run_processes(2, _spoil_on_one_rank, reduction, clip):
        assert "parameter 1 " in message and "66" in message
        assert_bitwise(params, [param.detach() for param in oracle.params])


# ---------------------------------------------------------------------------------------------------------------------
# tied, named, generated


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)
        self.middle = nn.Linear(20, 20)
        self.last.weight = self.first.weight

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.middle(self.first(value)).relu()).square().mean()  # type: ignore[no-any-return]


def _train_tied(rank: int, world_size: int, form: str) -> tuple[list[Tensor], Any]:
    model = Tied()
    forms: dict[str, Callable[[], Any]] = {
        "generator": model.parameters,
        "named": model.named_parameters,
        "list": lambda: list(model.parameters()),
        "groups": lambda: [{"params": model.parameters()}],
        "named groups": lambda: iter([{"params": model.named_parameters()}]),
    }
    optimizer = zero_opt.ShardedOptimizer(forms[form](), torch.optim.Adam, reduction=OVERLAPPED)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        optimizer.step()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in model.parameters()], state


@pytest.mark.parametrize("form", ["generator", "named", "list", "groups", "named groups"])
def test_tied_parameters_in_every_form(form: str) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.named_parameters() if "named" in form else model.parameters())
    for step in range(3):
        local = []
        for rank in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
            local.append([param.grad for param in model.parameters()])
        for param, *grads in zip(model.parameters(), *local, strict=True):
            param.grad = _mean(grads)
        optimizer.step()
    runs = run_processes(2, _train_tied, form)
    for params, _ in runs:
        assert_bitwise(params, [param.detach() for param in model.parameters()])
    assert_bitwise(runs[0][1], optimizer.state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# process groups


def _train_simply(rank: int, seed_rank: int, process_group: Any) -> list[Tensor]:
    actor = rank_actor(seed_rank, process_group=process_group)
    for number in range(3):
        actor.optimizer.zero_grad()
        actor.backward(number)
        actor.optimizer.step()
    return [param.detach() for param in actor.params]


def _expected_simply(world_size: int) -> list[Tensor]:
    oracle = plain_actor(world_size)
    for number in range(3):
        oracle.optimizer.zero_grad()
        oracle.backward(number)
        oracle.optimizer.step()
    return [param.detach() for param in oracle.params]


def _over_mesh(rank: int, world_size: int, two_dimensional: bool) -> list[Tensor]:
    if not two_dimensional:
        return _train_simply(rank, rank, init_device_mesh("cpu", (world_size,)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(zero_opt.RankMismatch, match="mesh of 2 x 2 ranks"):
        zero_opt.ShardedOptimizer(make_params(), torch.optim.Adam, mesh if rank == 3 else None)
    return _train_simply(rank, mesh["dp"].get_local_rank(), mesh["dp"])


def test_process_group_as_a_device_mesh() -> None:
    for params in run_processes(2, _over_mesh, False):
        assert_bitwise(params, _expected_simply(2))
    for params in run_processes(4, _over_mesh, True):
        assert_bitwise(params, _expected_simply(2))


def _over_subgroup(rank: int, world_size: int) -> list[Tensor]:
    """Only the members construct; then everyone does, although some have more groups than others."""
    members = dist.new_group([0, 2])
    alone = dist.new_group([1])
    if rank == 1:
        with pytest.raises(zero_opt.ProcessGroupError, match="not a member"):
            zero_opt.ShardedOptimizer(make_params(), torch.optim.Adam, members)
        plain = _train_simply(rank, 0, alone)
    else:
        _train_simply(rank, rank // 2, members)
        plain = _train_simply(rank, rank // 2, members)
    everyone = _train_simply(rank, rank, None)
    assert_bitwise(plain, _expected_simply(1 if rank == 1 else 2))
    return everyone


def test_process_group_of_some_ranks() -> None:
    for params in run_processes(3, _over_subgroup):
        assert_bitwise(params, _expected_simply(3))
