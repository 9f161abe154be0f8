"""fp32 masters of bf16 and fp16 parameters, on the device and in host memory: the bits of a run on fp32 parameters."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_opt
from test.support.half_params import HALVES, STEPS, backward, edit, gradient, make_params, train
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB, OVERLAPPED, values

MASTERS = zero_opt.MixedPrecision(master_dtype=torch.float32)
SPLIT = zero_opt.MixedPrecision(master_dtype="split")
ON_DEVICE: dict[str, Any] = {"precision": MASTERS}
ON_HOST: dict[str, Any] = {"offload": zero_opt.CPUOffload()}
AT_ONCE = {"initial_accumulator_value": 0.1}
# With an fp32 reference of the same formula.
CLASSES: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "fused": (torch.optim.AdamW, {"fused": True}, zero_opt.CPUAdamW, {}),
    "native": (zero_opt.CPUAdam, {"amsgrad": True}, zero_opt.CPUAdam, {"amsgrad": True}),
    "loop": (torch.optim.Adam, {"fused": False, "foreach": False}, torch.optim.Adam, {"foreach": False}),
    "foreach": (torch.optim.Adam, {"foreach": True}, torch.optim.Adam, {"foreach": True}),
    "made at once": (torch.optim.Adagrad, AT_ONCE | {"fused": False}, torch.optim.Adagrad, AT_ONCE),
    "made at once, native": (torch.optim.Adagrad, AT_ONCE | {"fused": True}, zero_opt.CPUAdagrad, AT_ONCE),
    "whole": (torch.optim.Muon, {}, torch.optim.Muon, {}),
}


def simulate(world_size: int, cls: Any, dtype: torch.dtype, scale: float = 1.0, **options: Any) -> Any:
    """The same by the class on fp32 parameters, from which those of ``dtype`` are cast."""
    params = make_params(cls, dtype)
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = cls(masters, lr=0.02, **options)
    seen = []
    for step in range(STEPS):
        for at, master in enumerate(masters):
            master.grad = None
            if (step + at) % 3:
                total = sum(gradient(params, step, rank, at).float() for rank in range(world_size))
                master.grad = (torch.as_tensor(total) / world_size).to(dtype).float().mul_(scale)
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master)
        seen.append([param.detach().clone() for param in params])
        edit(params, step)
        if step == 2:
            masters[0].data.view(-1)[3:200] = params[0].detach().float().view(-1)[3:200]
    return seen, optimizer.state_dict()["state"], masters


def assert_as_simulated(runs: Any, simulated: Any) -> None:
    """Parameters of all ranks after every step, the state, and masters in it that nothing has rounded."""
    seen, state, masters = simulated
    for rank, (found, _) in enumerate(runs):
        assert_bitwise(found, seen, f"rank {rank}")
    for index, entry in runs[0][1]["state"].items():
        assert_bitwise(entry.pop("master"), masters[index].detach(), f"master {index}")
        assert_bitwise(entry, state[index], f"state {index}")


@pytest.mark.parametrize("where", [ON_DEVICE, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("name", CLASSES)
def test_bits_of_fp32_parameters_that_are_cast(name: str, where: dict[str, Any]) -> None:
    """Parameters unused now and then, one that the user writes to."""
    cls, options, reference, own = CLASSES[name]
    for world_size, dtype in ((1, torch.bfloat16), (2, torch.float16), (2, torch.bfloat16)):
        runs = run_processes(world_size, partial(train, cls=cls, dtype=dtype, **options, **where))
        assert_as_simulated(runs, simulate(world_size, reference, dtype, **own))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_split_master_is_the_fp32_one(world_size: int) -> None:
    """Only ties are rounded the other way, in the parameter; the state dict has the master itself."""
    options: dict[str, Any] = {"fused": True}
    for where in ({"precision": SPLIT}, {"precision": SPLIT, "offload": zero_opt.CPUOffload()}):
        runs = run_processes(
            world_size, lambda r, w, at=where: train(r, w, torch.optim.Adam, torch.bfloat16, 2, **options, **at)
        )
        params = make_params(torch.optim.Adam, torch.bfloat16)
        plain = zero_opt.CPUAdam(params, lr=0.02, state=zero_opt.AdamState(master="split"))
        for step in range(2):
            for at, param in enumerate(params):
                grads = [gradient(params, step, rank, at).float() for rank in range(world_size)]
                total = torch.as_tensor(sum(grads)) / world_size
                param.grad = total.to(param.dtype) if (step + at) % 3 else None
            plain.step()
        for seen, _ in runs:
            assert_bitwise(seen[-1], [param.detach() for param in params])
        assert_bitwise(runs[0][1]["state"], plain.state_dict()["state"])


def _resume(rank: int, world_size: int, saved: Any, params: list[Tensor], options: dict[str, Any]) -> Any:
    """Go on for a step from a state dict and the parameters saved with it."""
    held = [nn.Parameter(param.clone()) for param in params]
    optimizer = zero_opt.ShardedOptimizer(held, torch.optim.AdamW, lr=0.02, reduction=OVERLAPPED, **options)
    optimizer.load_state_dict(saved)
    backward(held, 1, rank)
    optimizer.step()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in held], state


TIERS: dict[str, dict[str, Any]] = {
    "device": ON_DEVICE,
    "host": ON_HOST,
    "split": {"precision": SPLIT},
    "worker": {"offload": zero_opt.WorkerOffload()},
}


@pytest.mark.parametrize("to", TIERS)
def test_a_state_of_one_tier_goes_on_in_another(to: str) -> None:
    """With the same masters and moments at another world size; the parameter may round ties otherwise."""
    fused: dict[str, Any] = {"fused": True}
    seen, saved = run_processes(2, lambda r, w: train(r, w, torch.optim.AdamW, torch.bfloat16, 2, **ON_HOST, **fused))[
        0
    ]
    expected = run_processes(1, _resume, saved, seen[-1], {**ON_DEVICE, **fused})[0]
    runs = run_processes(2, lambda r, w: _resume(r, w, saved, seen[-1], {**TIERS[to], **fused}))
    # Both ranks have the gradients of their own number: compare with ranks of the other tier, not with one rank.
    others = run_processes(2, lambda r, w: _resume(r, w, saved, seen[-1], {**ON_DEVICE, **fused}))
    assert set(expected[1]) == set(runs[0][1])
    assert_bitwise(runs[0][1], others[0][1])
    if to != "split":
        assert_bitwise([found for found, _ in runs], [found for found, _ in others])


def _without_master(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    params = make_params(torch.optim.AdamW, torch.bfloat16)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.02, reduction=OVERLAPPED, **options)
    state = {
        at: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(p.shape), "exp_avg_sq": torch.ones(p.shape)}
        for at, p in enumerate(params)
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    masters = [optimizer.state_dict()["state"][at]["master"] for at in range(len(params))]
    optimizer.close()
    return masters, [param.detach().float() for param in params]


@pytest.mark.parametrize("where", ["device", "host", "split"])
def test_without_a_saved_master_the_parameter_is_it(where: str, caplog: pytest.LogCaptureFixture) -> None:
    masters, params = _without_master(0, 1, {**TIERS[where], "fused": True})
    assert_bitwise(masters, params)
    assert [record.message for record in caplog.records] == [
        f"no master was saved for {len(params)} parameters: their own values are taken"
    ]


@pytest.mark.parametrize("where", [ON_DEVICE, ON_HOST], ids=["device", "host"])
def test_a_class_without_state_has_its_masters_saved(where: dict[str, Any]) -> None:
    """Steps of less than half a unit in the last place move nothing but the master."""
    options: dict[str, Any] = {"lr": 1e-3, "reduction": zero_opt.AtStep(), **where}
    params = [nn.Parameter(torch.ones(70, dtype=torch.bfloat16))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, **options)
    for _ in range(3):
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    resumed = [nn.Parameter(param.detach().clone()) for param in params]
    other = zero_opt.ShardedOptimizer(resumed, torch.optim.SGD, **options)
    other.load_state_dict(optimizer.state_dict())
    for held, stepped in ((params, optimizer), (resumed, other)):
        for _ in range(3):
            held[0].grad = torch.ones_like(held[0])
            stepped.step()
    assert_bitwise(resumed[0].detach(), params[0].detach())
    assert_bitwise(other.state_dict()["state"], optimizer.state_dict()["state"])
    assert_bitwise(optimizer.state_dict()["state"][0]["master"].bfloat16(), params[0].detach())
    assert params[0].detach().unique().item() < 1


def test_masters_that_nothing_here_steps_are_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """A plain optimizer that is given them goes on as one of ``torch.optim``, and the log says what that loses."""
    _, saved = train(0, 1, torch.optim.AdamW, torch.bfloat16, 1, **ON_DEVICE, fused=True)
    params = make_params(torch.optim.AdamW, torch.bfloat16)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.02, reduction=OVERLAPPED)
    optimizer.load_state_dict(saved)
    (message,) = [record.message for record in caplog.records if "masters" in record.message]
    assert message.startswith(f"masters were saved for {len(saved['state'])} parameters, the first of them parameter 1")
    assert "MixedPrecision(master_dtype=torch.float32) goes on from the masters" in message


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_master_that_is_replaced_or_dropped_is_followed(where: str) -> None:
    params = make_params(torch.optim.AdamW, torch.bfloat16)
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, fused=True, lr=0.0, weight_decay=0.0, **TIERS[where]
    )
    backward(params, 0, 0)
    optimizer.step()
    other = torch.full(params[1].shape, 3.25)
    optimizer.state[params[1]]["master"] = other
    del optimizer.state[params[2]]
    optimizer.step()
    assert_bitwise(params[1].detach(), other.to(torch.bfloat16))
    assert optimizer.state[params[1]]["master"] is not other
    assert optimizer.state[params[1]]["step"] == 2
    assert optimizer.state[params[2]]["step"] == 1
    optimizer.close()


@pytest.mark.parametrize("reduction", [OVERLAPPED, zero_opt.AtStep(BUCKET_MB), zero_opt.AlreadyReduced()])
def test_clipping_is_part_of_the_step(reduction: Any) -> None:
    """The gradient is widened, then scaled."""
    cls, dtype = torch.optim.AdamW, torch.bfloat16
    params = make_params(cls, dtype)
    backward(params, 0, 0)
    norm = torch.stack([param.grad.double().square().sum() for param in params if param.grad is not None]).sum().sqrt()
    factor = float(torch.clamp(0.5 / (norm.float() + 1e-6), max=1.0))
    for options, reference in (({"fused": True}, zero_opt.CPUAdamW), ({"fused": False}, cls)):
        held = make_params(cls, dtype)
        optimizer = zero_opt.ShardedOptimizer(
            held, cls, reduction=reduction, max_grad_norm=0.5, lr=0.02, **options, **ON_HOST
        )
        backward(held, 0, 0)
        optimizer.step()
        optimizer.close()
        masters = [nn.Parameter(param.detach().float()) for param in make_params(cls, dtype)]
        plain = reference(masters, lr=0.02)
        for at, master in enumerate(masters):
            master.grad = gradient(params, 0, 0, at).float().mul_(factor) if at % 3 else None
        plain.step()
        assert_bitwise([param.detach() for param in held], [master.detach().to(dtype) for master in masters])


def _clipped(rank: int, world_size: int, reduction: Any, options: dict[str, Any], how: str) -> Any:
    """Parameters and state after steps that are clipped, by one way or the other."""
    params = make_params(torch.optim.AdamW, torch.float32 if options == NARROWED["narrow"] else torch.bfloat16)
    limit = 5.0 if how == "max_grad_norm" else None
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, lr=0.02, fused=True, reduction=reduction, max_grad_norm=limit, **options
    )
    for step in range(3):
        backward(params, step, rank)
        if how != "max_grad_norm":
            norm = optimizer.clip_grad_norm_(5.0)
            assert norm > 5.0
        if how == "twice":
            assert optimizer.clip_grad_norm_(100.0) == pytest.approx(5.0, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in params], state


NARROWED: dict[str, dict[str, Any]] = {
    **TIERS,
    "narrow": {"precision": zero_opt.MixedPrecision(reduce_dtype=torch.bfloat16)},
    "speculates": {"offload": zero_opt.WorkerOffload(speculate=True)},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("where", "reduction"),
    [*product(NARROWED, [OVERLAPPED]), *product([*TIERS, "narrow"], [zero_opt.AtStep(BUCKET_MB)])],
)
def test_a_clip_before_the_step_is_part_of_it(where: str, reduction: Any) -> None:
    """Scaled by itself, a narrow gradient would be rounded once more."""
    options = NARROWED[where]
    expected = run_processes(2, _clipped, reduction, options, "max_grad_norm")
    for how in ("before", "twice"):
        assert_bitwise(run_processes(2, _clipped, reduction, options, how), expected, how)


@pytest.mark.parametrize("dropped", [False, True])
def test_what_comes_after_a_clip_is_not_clipped(dropped: bool) -> None:
    """It is added to gradients that are, or takes their place."""
    params = make_params(torch.optim.AdamW, torch.bfloat16)
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, lr=0.02, fused=True, reduction=OVERLAPPED, **ON_DEVICE
    )
    backward(params, 0, 0)
    factor = torch.clamp(5.0 / (optimizer.clip_grad_norm_(5.0) + 1e-6), max=1.0)
    if dropped:
        for param in params:
            param.grad = None
    backward(params, 0, 1)
    optimizer.step()
    optimizer.close()
    masters = [nn.Parameter(param.detach().float()) for param in make_params(torch.optim.AdamW, torch.bfloat16)]
    for at, master in enumerate(masters):
        if at % 3:
            before, after = (gradient(params, 0, rank, at) for rank in (0, 1))
            master.grad = (after if dropped else (before.float() * factor).bfloat16() + after).float()
    zero_opt.CPUAdamW(masters, lr=0.02).step()
    assert_bitwise([param.detach() for param in params], [master.detach().bfloat16() for master in masters])


@pytest.mark.parametrize("reduction", [OVERLAPPED, zero_opt.AtStep()])
def test_a_clip_ends_with_its_gradients(reduction: Any) -> None:
    """Also where zero_grad() drops them without a step."""
    params, others = (make_params(torch.optim.AdamW, torch.bfloat16) for _ in range(2))
    for held in (params, others):
        optimizer = zero_opt.ShardedOptimizer(held, torch.optim.AdamW, reduction=reduction, fused=True, **ON_DEVICE)
        if held is params:
            backward(held, 0, 0)
            optimizer.clip_grad_norm_(1e-3)
            optimizer.zero_grad()
        for step in (1, 2):
            backward(held, step, 0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    assert_bitwise([param.detach() for param in params], [param.detach() for param in others])


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": SPLIT}, zero_opt.UnsupportedOptimizer, "fused=True"),
        ({"precision": SPLIT, "fused": False, **ON_HOST}, zero_opt.UnsupportedOptimizer, "native kernel alone"),
        (
            {"precision": SPLIT, "offload": zero_opt.CPUOffload(selective=zero_opt.Selective())},
            zero_opt.ConfigConflict,
            "Selective keeps fp32 moments and masters",
        ),
    ],
)
def test_what_cannot_be_split(options: dict[str, Any], error: type[Exception], message: str) -> None:
    params = make_params(torch.optim.AdamW, torch.bfloat16)
    with pytest.raises(error, match=message):
        zero_opt.ShardedOptimizer(params, torch.optim.AdamW, **options)


def test_only_bf16_is_split() -> None:
    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 0 .* is torch.float16"):
        zero_opt.ShardedOptimizer(
            make_params(torch.optim.AdamW, torch.float16), torch.optim.AdamW, fused=True, precision=SPLIT
        )


def test_a_split_group_stays_with_the_kernel() -> None:
    params = make_params(torch.optim.AdamW, torch.bfloat16)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=True, precision=SPLIT)
    saved = {"state": {}, "param_groups": [{**optimizer.state_dict()["param_groups"][0], "fused": None}]}
    optimizer.param_groups[0]["fused"] = False
    backward(params, 0, 0)
    with pytest.raises(zero_opt.UnsupportedOptimizer, match="fused=True alone"):
        optimizer.step()
    with pytest.raises(zero_opt.StateDictError, match="native kernel alone"):
        optimizer.load_state_dict(saved)
    optimizer.close()


# -- loss scaling -----------------------------------------------------------------------------------------------------


def _train_scaled(rank: int, world_size: int, dtype: torch.dtype, reduction: Any, where: dict[str, Any]) -> Any:
    """Step 1 overflows, on rank 1 alone where ranks have gradients of their own."""
    params = make_params(torch.optim.AdamW, dtype)
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, fused=True, lr=0.02, reduction=reduction, max_grad_norm=1.0, **where
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=100)
    seen, scales = [], []
    for step in range(3):
        optimizer.zero_grad()
        bad = step == 1 and (rank == 1 or isinstance(reduction, zero_opt.AlreadyReduced))
        loss = sum((param * gradient(params, step, 0, at)).sum() for at, param in enumerate(params))
        state = {index: {k: v.clone() for k, v in s.items()} for index, s in enumerate(optimizer.state.values())}
        scaler.scale(torch.as_tensor(loss) * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert_bitwise(dict(enumerate(optimizer.state.values())), state)
        seen.append([param.detach().clone() for param in params])
        scales.append(scaler.get_scale())
    optimizer.close()
    return seen, scales


@pytest.mark.parametrize("reduction", [OVERLAPPED, zero_opt.AlreadyReduced()])
@pytest.mark.parametrize("dtype", HALVES)
def test_loss_scaling_skips_on_all_ranks(dtype: torch.dtype, reduction: Any) -> None:
    """The same as without a scale, which is a power of two; fp16 gradients are unscaled in the step."""
    for where in (ON_DEVICE, ON_HOST):
        runs = run_processes(2, _train_scaled, dtype, reduction, where)
        assert_bitwise(runs[0], runs[1])
        seen, scales = runs[0]
        assert scales == [2.0**4, 2.0**3, 2.0**3]
        assert_bitwise(seen[1], seen[0])
        params = make_params(torch.optim.AdamW, dtype)
        plain = zero_opt.ShardedOptimizer(
            params, torch.optim.AdamW, fused=True, lr=0.02, reduction=zero_opt.AtStep(), max_grad_norm=1.0, **ON_DEVICE
        )
        for step in (0, 2):
            for at, param in enumerate(params):
                param.grad = gradient(params, step, 0, at)
            plain.step()
        plain.close()
        assert_bitwise(seen[2], [param.detach() for param in params])


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_backwards_are_added_up_in_the_accumulation_dtype(dtype: torch.dtype | None) -> None:
    """In bf16 the small gradients of later backwards are lost."""
    params = [nn.Parameter(torch.zeros(200, dtype=torch.bfloat16))]
    optimizer = zero_opt.ShardedOptimizer(
        params,
        torch.optim.SGD,
        lr=1.0,
        momentum=0.5,
        precision=zero_opt.MixedPrecision(torch.float32, accumulate_dtype=dtype),
    )
    for value in (1.0, 2.0**-10, 2.0**-10):
        torch.autograd.backward(params, [torch.full((200,), value, dtype=torch.bfloat16)])
    optimizer.step()
    expected = 1.0 if dtype is None else 1 + 2.0**-9
    assert_bitwise(optimizer.state[params[0]]["master"], torch.full((200,), -expected))
    assert optimizer.memory_report()["grad_shards"] >= 200 * (4 if dtype else 2)
    optimizer.close()


def _edited_and_saved(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The parameter as edited, its master in a state dict taken then, and the parameter after that and a step."""
    param = nn.Parameter(values(3, 0, 0, 0, (40, 9)).bfloat16())
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=0.01, reduction=OVERLAPPED, **options)
    for step in range(2):
        param.backward(values(step, 2, rank, 0, (40, 9)).bfloat16())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with torch.no_grad():
                param[:, 2:5].mul_(100)
            edited = param.detach().clone()
            if world_size > 1:
                dist.barrier()  # each rank serves its part as edited
            state_dict = optimizer.state_dict()
            optimizer.load_state_dict(state_dict)
    optimizer.close()
    return edited, state_dict["state"][0]["master"], param.detach().clone()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_saved_after_an_edit_has_it(world_size: int, tmp_path: Any) -> None:
    ways: list[dict[str, Any]] = [ON_DEVICE, ON_HOST]
    ways += [{"offload": zero_opt.WorkerOffload()}, {"offload": zero_opt.NVMeOffload(tmp_path)}]
    ways += [{"offload": zero_opt.CPUOffload(selective=zero_opt.Selective(ratio, 4, 1))} for ratio in (0.0, 0.5, 1.0)]
    after = []
    for way in ways:
        for edited, master, param in run_processes(world_size, _edited_and_saved, way):
            assert torch.equal(master.reshape(edited.shape).bfloat16(), edited)
            after.append(param)
    assert all(torch.equal(param, after[0]) for param in after)
