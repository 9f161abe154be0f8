"""Over several ranks a ShardedOptimizer still does what the plain class does, for every class that can be sharded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import AT_STEP, OVERLAPPED
from test.support.torch_variants import INFOS, SCHEDULES, Make, Variant, plain, scheduled, variants
from zero_opt.reduction.grad_norm import clip_factor

STEPS = 4
SHARDED = [name for name in INFOS if name != "LBFGS"]
ALREADY = zero_opt.AlreadyReduced()
NATIVE = {"Adam": zero_opt.CPUAdam, "AdamW": zero_opt.CPUAdamW}


def sharded(variant: Variant, reduction: Any = ALREADY) -> Make:
    """Makes ours. All ranks bring the same gradients, so that their mean over two is those."""
    return lambda params, kwargs: zero_opt.ShardedOptimizer(params, variant.cls, reduction=reduction, **kwargs)


def oracle(variant: Variant) -> Make:
    """Makes the plain class; of torch's fused Adam, which changes bits with where a tensor is cut, the native one."""
    if variant.kwargs.get("fused") and variant.name in NATIVE:
        decay = 0 if variant.name == "Adam" else 0.01  # an int, as Adam's default
        return lambda params, kwargs: NATIVE[variant.name](params, **{"weight_decay": decay, **kwargs})
    return plain(variant)


def facts(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], rank: int = 0) -> list[Any]:
    """Parameters, defaults, groups and state dict (on rank 0). Collective."""
    if isinstance(optimizer, zero_opt.ShardedOptimizer):
        optimizer.consolidate_state_dict(to=0)
    groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    defaults = {key: value for key, value in optimizer.defaults.items() if key not in ("state", "threads")}
    saved = optimizer.state_dict() if rank == 0 else None
    return [[param.detach().clone() for param in params], defaults, groups, saved]


def parts(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What ``.state`` shows of every parameter."""
    state = dict(optimizer.state)
    return [
        {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.get(param, {}).items()}
        for param in params
    ]


def assert_parts(shown: Sequence[list[dict[str, Any]]], expected: list[dict[str, Any]]) -> None:
    """Every rank shows every key and scalar, and the ranks' tensors together are the plain class's."""
    for index, whole in enumerate(expected):
        ours = [rank_shown[index] for rank_shown in shown]
        for key, value in whole.items():
            pieces = [part[key] for part in ours]
            if not isinstance(value, Tensor):
                assert pieces == [value] * len(pieces)
            elif value.dim() == 0 and all(isinstance(p, Tensor) and p.dim() == 0 for p in pieces):
                for piece in pieces:
                    assert_bitwise(piece, value)
            else:
                assert_bitwise(torch.cat([piece.flatten() for piece in pieces]), value.flatten())
        assert all(part.keys() == whole.keys() for part in ours), (index, whole.keys(), ours)


def all_variants(name: str) -> list[Variant]:
    """In fp32, fp64 and, of the classes that take complex parameters, complex64."""
    dtypes = (torch.float64, torch.complex64) if INFOS[name].supports_complex else (torch.float64,)
    return list(variants(name, dtypes))


def run_variants(rank: int, world_size: int, name: str, reduction: Any, only: int | None) -> list[Any]:
    """Every variant of a class: its facts and parts, or the error that it ends in."""
    found: list[Any] = []
    for variant in all_variants(name)[:only]:
        params, optimizer = variant.params(), None
        try:
            optimizer = sharded(variant, reduction)(params, variant.arguments())
            for number in range(STEPS):
                variant_step(variant, optimizer, params, number)
            found.append([*facts(optimizer, params, rank), parts(optimizer, params)])
        except zero_opt.ZeroOptError as error:
            found.append(error)
        finally:
            if optimizer is not None:
                optimizer.close()  # type: ignore[attr-defined]
    return found


def rounding_bound(dtype: torch.dtype) -> float:
    """How far torch's fused kernels are from themselves when a tensor is cut, relative to numbers of about 1.

    They contract multiplications and additions in whole vectors but not in the rest of a tensor, which lies elsewhere
    in a shard. So each operation of a step, of which there are at most 8, may be rounded the other way.
    """
    return STEPS * 8 * torch.finfo(dtype).eps


def variant_step(variant: Variant, optimizer: Any, params: Sequence[Tensor], number: int) -> None:
    """One step; gradients arrive in a backward, and every second step leaves out a parameter."""
    optimizer.zero_grad()
    used = [index for index in range(len(params)) if number % 2 == 0 or index != 1]
    grads = [variant.grad(number, index, params[index].shape) for index in used]
    if variant.sparse or not params[0].requires_grad:
        for index, grad in zip(used, grads, strict=True):
            params[index].grad = grad
    else:
        torch.autograd.backward([params[index] for index in used], grads)
    optimizer.step()


@pytest.mark.sampled(15)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own code
@pytest.mark.parametrize("name", INFOS)
@pytest.mark.parametrize(("reduction", "only"), [(ALREADY, None), (OVERLAPPED, 3), (AT_STEP, 3)])
def test_every_variant(name: str, reduction: Any, only: int | None) -> None:
    runs = run_threads(2, run_variants, name, reduction, only)
    for number, variant in enumerate(all_variants(name)[:only]):
        found = [run[number] for run in runs]
        refused = refusal(variant, reduction)
        if refused is not None:
            for error in found:
                assert isinstance(error, refused[0]) and refused[1] in str(error), (variant.label, error)
            continue
        params = variant.params()
        optimizer = oracle(variant)(params, variant.arguments())
        for step in range(STEPS):
            variant_step(variant, optimizer, params, step)
        expected = facts(optimizer, params)
        for rank, result in enumerate(found):
            assert not isinstance(result, Exception), (variant.label, result)
            if variant.kwargs.get("fused") and variant.name not in NATIVE:
                bound = rounding_bound(params[0].dtype)
                torch.testing.assert_close(result[0], expected[0], rtol=bound, atol=bound)
                continue
            assert_bitwise(result[:3], expected[:3], f"{variant.label}, rank {rank}")
            if rank == 0:
                assert_bitwise(result[3], expected[3], variant.label)
            assert_parts([run[number][4] for run in runs], parts(optimizer, params))


def refusal(variant: Variant, reduction: Any) -> tuple[type[Exception], str] | None:
    """Why a variant cannot be sharded."""
    if variant.name == "LBFGS":
        return zero_opt.UnsupportedOptimizer, "evaluates the loss several times"
    if variant.kwargs.get("differentiable"):
        return zero_opt.UnsupportedOptimizer, "differentiable=True cannot be sharded"
    if variant.sparse and (variant.name != "SparseAdam" or isinstance(reduction, zero_opt.Overlapped)):
        return zero_opt.ZeroOptError, "sparse"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# clipping and schedules


def run_clipped(rank: int, world_size: int, name: str) -> list[Any]:
    """Steps whose gradients are clipped, with the norms they had."""
    variant, norms = all_variants(name)[0], []
    params = variant.params()
    optimizer = zero_opt.ShardedOptimizer(params, variant.cls, reduction=AT_STEP, **variant.arguments())
    for number in range(STEPS):
        variant.set_grads(params, number)
        norms.append(optimizer.clip_grad_norm_(1.5))
        optimizer.step()
    found = [norms, facts(optimizer, params, rank)]
    optimizer.close()
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [name for name in SHARDED if name != "SparseAdam"])
def test_clipping(name: str) -> None:
    """The plain class is given our coefficient, which is torch's up to the rounding of the norm."""
    variant, runs = all_variants(name)[0], run_threads(2, run_clipped, name)
    params = variant.params()
    optimizer = plain(variant)(params, variant.arguments())
    for number, norm in enumerate(runs[0][0]):
        variant.set_grads(params, number)
        torch.testing.assert_close(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]), norm)
        for param in params:
            assert param.grad is not None
            param.grad.mul_(clip_factor(norm, 1.5))
        optimizer.step()
    expected = facts(optimizer, params)
    assert_bitwise(runs[0][1], expected)
    assert_bitwise(runs[1][0], runs[0][0])
    assert_bitwise(runs[1][1][0], expected[0])


def saved_on_rank_0(optimizer: Any, rank: int) -> Any:
    """Its full state dict on rank 0. Collective."""
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if rank == 0 else None


def run_schedules(rank: int, world_size: int, kinds: Sequence[tuple[str, Variant]]) -> list[Any]:
    """What every schedule does."""
    return [
        scheduled(schedule, variant, sharded(variant), partial(saved_on_rank_0, rank=rank))
        for schedule, variant in kinds
    ]


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_schedules(run: Any, tensor_lr: bool) -> None:
    kwargs = {"lr": torch.tensor(0.05) if tensor_lr else 0.05, "foreach": False}
    sgd, adamw = Variant("SGD", {**kwargs, "momentum": 0.9}, ""), Variant("AdamW", kwargs, "")
    kinds = [(schedule, variant) for schedule in SCHEDULES for variant in (sgd, adamw)]
    runs = run(2, run_schedules, kinds)
    for number, (schedule, variant) in enumerate(kinds):
        expected = scheduled(schedule, variant, plain(variant), lambda optimizer: optimizer.state_dict())
        for rank, found in enumerate(runs):
            assert_bitwise(found[number][:3], expected[:3], f"{schedule}, {variant.name}, rank {rank}")
        assert_bitwise(runs[0][number][3], expected[3], f"{schedule}, {variant.name}")


# ---------------------------------------------------------------------------------------------------------------------
# what is done to an optimizer from outside


def _assign(optimizer: Any, params: Sequence[Tensor]) -> None:
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [{**group, "lr": 0.02} for group in optimizer.param_groups]


def _in_full(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Other values, in the parameters' shapes."""
    for index, param in enumerate(params):
        entry = optimizer.state[param]
        entry["exp_avg"] = torch.linspace(0, 1 + index, param.numel()).view(param.shape)
        if index % 2:
            entry["step"] = torch.tensor(7.0 + index)


def _whole_entries(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Other dicts, in full."""
    for param in params[::2]:
        moments = {key: torch.full(param.shape, 0.25) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(5.0), **moments}


def _in_place(optimizer: Any, params: Sequence[Tensor]) -> None:
    for param in params:
        optimizer.state[param]["exp_avg"].mul_(0.5)
        optimizer.state[param]["step"].fill_(9.0)


EDITS: dict[str, Callable[[Any, Sequence[Tensor]], None]] = {
    "assigned": _assign,
    "cleared": lambda optimizer, params: optimizer.state.clear(),
    "one dropped": lambda optimizer, params: optimizer.state.pop(params[4]),
    "values replaced": _in_full,
    "entries replaced": _whole_entries,
    "in place": _in_place,
}


def run_edited(rank: int, world_size: int, edit: str, steps_before: int, offload: Any) -> list[Any]:
    """State and groups are changed between steps."""
    variant = Variant("AdamW", {}, "")
    params = variant.params()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=OVERLAPPED, offload=offload)
    for number in range(steps_before):
        variant_step(variant, optimizer, params, number)
    EDITS[edit](optimizer, params)
    for number in range(2, 5):
        variant_step(variant, optimizer, params, number)
    found = [*facts(optimizer, params, rank), parts(optimizer, params)]
    optimizer.close()
    return found


@pytest.mark.sampled(7)
@pytest.mark.parametrize("offload", [None, zero_opt.WorkerOffload()], ids=["device", "worker"])
@pytest.mark.parametrize(("edit", "steps_before"), [*((edit, 2) for edit in EDITS), ("entries replaced", 0)])
def test_edits_take_effect(edit: str, steps_before: int, offload: Any) -> None:
    runs = (run_threads if offload is None else run_processes)(2, run_edited, edit, steps_before, offload)
    variant = Variant("AdamW", {}, "")
    params = variant.params()
    optimizer = torch.optim.AdamW(params) if offload is None else zero_opt.CPUAdamW(params)
    for number in range(steps_before):
        variant_step(variant, optimizer, params, number)
    EDITS[edit](optimizer, params)
    for number in range(2, 5):
        variant_step(variant, optimizer, params, number)
    expected = facts(optimizer, params)
    for rank, found in enumerate(runs):
        assert_bitwise(found[0], expected[0], f"rank {rank}")
    assert_bitwise(runs[0][3]["state"], expected[3]["state"])
    assert_parts([found[4] for found in runs], parts(optimizer, params))


def run_apart(rank: int, world_size: int) -> list[list[float]]:
    """The step counts that are shown of four parameters after each of three steps; all but the first lack two."""
    params, shown = [torch.nn.Parameter(torch.zeros(64)) for _ in range(4)], []
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=zero_opt.AtStep())
    for number in range(3):
        for index, param in enumerate(params):
            param.grad = torch.ones(64) if index % 2 == 0 or number == 0 else None
        optimizer.step()
        shown.append([float(optimizer.state[param]["step"]) for param in params])
    optimizer.close()
    return shown


def test_params_that_are_used_apart_show_their_own_counts() -> None:
    for shown in run_threads(2, run_apart):
        assert shown == [[1, 1, 1, 1], [2, 1, 2, 1], [3, 1, 3, 1]]


def run_delayed(rank: int, world_size: int) -> list[list[float]]:
    """The step counts that are shown after each of three delayed steps, and after the last has landed."""
    variant, shown = Variant("AdamW", {}, ""), []
    params = variant.params()
    offload = zero_opt.WorkerOffload(delay=1)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=OVERLAPPED, offload=offload)

    def read() -> list[float]:
        return [float(optimizer.state[param]["step"]) if param in optimizer.state else 0.0 for param in params]

    for number in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(params, [variant.grad(number, i, param.shape) for i, param in enumerate(params)])
        optimizer.step()
        shown.append(read())
    optimizer.flush()
    shown.append(read())
    optimizer.close()
    return shown


def test_a_delayed_step_shows_once_it_has_landed() -> None:
    for shown in run_processes(2, run_delayed):
        assert shown == [[float(count)] * 5 for count in (0, 1, 2, 3)]


def run_refused(rank: int, world_size: int) -> list[str]:
    """What cannot be done over several ranks says so on every rank, and changes nothing."""
    variant, messages = Variant("AdamW", {}, ""), []
    params = variant.params()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=OVERLAPPED)
    variant_step(variant, optimizer, params, 0)
    before, groups = [param.detach().clone() for param in params], optimizer.param_groups
    for kind, call in (
        (zero_opt.ConfigTypeError, lambda: optimizer.step(None, note=1)),
        (zero_opt.ConfigTypeError, lambda: optimizer.__setstate__({"state": {}, "param_groups": []})),
        (AttributeError, lambda: optimizer.no_such_method()),
    ):
        with pytest.raises(kind) as caught:
            call()  # type: ignore[no-untyped-call]
        messages.append(str(caught.value))
    torch.autograd.backward(params, [torch.ones_like(param) for param in params])
    if rank == 1:
        optimizer.param_groups = [{**groups[0], "params": params[:2]}]
    with pytest.raises(zero_opt.ZeroOptError) as refused:
        optimizer.step()
    messages.append(str(refused.value))
    optimizer.param_groups = groups
    assert_bitwise([param.detach() for param in params], before)
    optimizer.step()
    optimizer.close()
    return messages


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    for messages in run_threads(2, run_refused):
        for message, part in zip(
            messages,
            ["got ['note']", "load_state_dict()", "no attribute 'no_such_method'", "put those back, in their order"],
            strict=True,
        ):
            assert part in message


def run_hooked(rank: int, world_size: int) -> Counter[str]:
    """One step under every kind of step hook, and the label it has in a profile."""
    variant, called = Variant("AdamW", {}, ""), Counter[str]()
    params = variant.params()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=OVERLAPPED)
    handles = [
        register_optimizer_step_pre_hook(lambda opt, *_: called.update([f"global pre {opt is optimizer}"])),
        register_optimizer_step_post_hook(lambda opt, *_: called.update([f"global post {opt is optimizer}"])),
        optimizer.register_step_pre_hook(lambda opt, *_: called.update([f"pre {opt is optimizer}"])),
        optimizer.register_step_post_hook(lambda opt, *_: called.update([f"post {opt is optimizer}"])),
    ]
    with torch.profiler.profile() as profiled:
        variant_step(variant, optimizer, params, 0)
    for handle in handles:
        handle.remove()
    called.update(event.name for event in profiled.events() if event.name.startswith("Optimizer.step"))
    kind, summary, held, *groups = repr(optimizer).splitlines()
    assert kind == "ShardedOptimizer (" and summary.startswith("AdamW on rank ")
    assert groups == repr(torch.optim.AdamW(params)).splitlines()[1:]
    optimizer.param_groups.clear()
    assert repr(optimizer).splitlines() == ["ShardedOptimizer (", summary, held, ")"]
    optimizer.close()
    return called


def test_step_hooks_run_once_on_every_rank() -> None:
    names = ["global pre", "pre", "post", "global post"]
    for called in run_processes(2, run_hooked):
        assert called == Counter([*(f"{name} True" for name in names), "Optimizer.step#ShardedOptimizer.step"])


def run_compiled(rank: int, world_size: int, reduction: Any) -> list[Any]:
    """A compiled training step, with all that the optimizer does inside it."""
    variant = Variant("AdamW", {"foreach": False}, "")
    params = variant.params()
    optimizer = sharded(variant, reduction)(params, variant.arguments())

    def train(number: float) -> None:
        loss = sum((param * number).square().sum() for param in params)
        loss.backward()  # type: ignore[union-attr]
        optimizer.clip_grad_norm_(1e9)  # which leaves gradients as they are
        zero_opt.clip_grad_norm_([optimizer], 1e9)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.flush()
        optimizer.load_state_dict(optimizer.state_dict())

    compiled = torch.compile(train, backend="eager")
    for number in range(3):
        compiled(number + 1.0)
    return facts(optimizer, params, rank)


@pytest.mark.parametrize("reduction", [ALREADY, OVERLAPPED, AT_STEP], ids=lambda policy: type(policy).__name__)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
def test_a_compiled_step(reduction: Any) -> None:
    variant = Variant("AdamW", {"foreach": False}, "")
    params = variant.params()
    optimizer = plain(variant)(params, variant.arguments())
    for number in range(3):
        optimizer.zero_grad()
        sum((param * (number + 1.0)).square().sum() for param in params).backward()  # type: ignore[union-attr]
        optimizer.step()
    expected = facts(optimizer, params)
    for rank, found in enumerate(run_processes(2, run_compiled, reduction)):
        assert_bitwise(found[0], expected[0], f"rank {rank}")


def run_scaled(rank: int, world_size: int, ours: bool) -> list[Any]:
    """Under DDP, with an overflow on rank 1 alone."""
    model = nn.Linear(16, 16)
    for param in model.parameters():
        nn.init.constant_(param, 0.01)
    wrapped = nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if ours:
        optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, reduction=ALREADY)
    scales = []
    for number in range(4):
        value = torch.full((3, 16), 1.0 + rank + number)
        loss = wrapped(value).square().mean() * (float("inf") if number == 1 and rank == 1 else 1.0)
        scaler.scale(loss).backward()
        if number % 2 == 0:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [scales, list(model.parameters()), facts(optimizer, list(model.parameters()), rank)[3]]


def test_grad_scaler_under_ddp() -> None:
    runs, expected = run_processes(2, run_scaled, True), run_processes(2, run_scaled, False)
    assert_bitwise(runs[0], expected[0])
    assert_bitwise(runs[1][:2], expected[1][:2])
    assert expected[0][0] == [2.0**8, 2.0**7, 2.0**7, 2.0**8]
