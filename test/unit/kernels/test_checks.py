"""What the kernel must not be given an address of is refused by name, and nothing has changed then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import zero_opt
from test.support.wrapper_tensor import wrapped
from zero_opt import AdamState, CPUAdam, CPUAdamW
from zero_opt.errors import ConfigError, ConfigTypeError, UnsupportedParam
from zero_opt.kernels import AdamHypers, AdamUpdate, adam_update_, grad_squares
from zero_opt.kernels.checks import check_apart, check_tensor, has_memory, oddity, require_number, shared_pair

HYPERS = AdamHypers(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0, decoupled=True)
COMPACT = [AdamState("bfloat16"), AdamState("block8"), AdamState("bfloat16", "split")]


def stepped(form: AdamState, numel: int = 100, dtype: torch.dtype = torch.float32) -> tuple[Parameter, CPUAdamW]:
    param = Parameter(torch.ones(numel, dtype=dtype))
    optimizer = CPUAdamW([param], state=form)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return param, optimizer


def update(**given: Any) -> AdamUpdate:
    plain: dict[str, Any] = {name: torch.zeros(3) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    return AdamUpdate(**{"name": "culprit", "step": 1, "hypers": HYPERS, **plain, **given})


@pytest.mark.parametrize("form", COMPACT, ids=str)
def test_a_stand_in_cannot_be_loaded_into(form: AdamState) -> None:
    _, optimizer = stepped(form)
    other = CPUAdamW([Parameter(torch.zeros(100, device="meta"))], state=form)
    with pytest.raises(TypeError, match="CPUAdamW param 0 of group 0 must be on the CPU, got device meta"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("form", [AdamState(), *COMPACT], ids=str)
def test_the_default_device_does_not_matter(form: AdamState) -> None:
    params = [Parameter(torch.ones(8, 9)), Parameter(torch.ones(8, 9)[:, :5]), Parameter(torch.ones(9, 8).t())]
    plain = CPUAdamW([Parameter(p.detach().clone()) for p in params], state=form)
    optimizer = CPUAdamW(params, state=form)
    for p, q in zip(params, plain.param_groups[0]["params"]):
        p.grad, q.grad = torch.ones(p.shape), torch.ones(q.shape)
    params[0].grad = torch.ones(9, 8).t()
    plain.step()
    with torch.device("meta"):
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(params, plain.param_groups[0]["params"]))


def _shorter(param: Parameter, state: dict[str, Any]) -> None:
    param.data = torch.zeros(4)


def _no_storage(param: Parameter, state: dict[str, Any]) -> None:
    state["exp_avg_sq"].untyped_storage().resize_(0)


def _no_moment(param: Parameter, state: dict[str, Any]) -> None:
    del state["exp_avg"]


@pytest.mark.parametrize("harm", [_shorter, _no_storage, _no_moment])
@pytest.mark.parametrize("form", COMPACT, ids=str)
def test_state_that_does_not_fit_any_more_is_not_saved(form: AdamState, harm: Callable[..., None]) -> None:
    param, optimizer = stepped(form, 1 << 12)
    harm(param, optimizer.state[param])
    with pytest.raises((TypeError, ValueError), match="CPUAdamW param 0 of group 0"):
        optimizer.state_dict()


def test_a_param_that_is_another_by_now_is_noticed() -> None:
    buffer = torch.ones(64)
    param = Parameter(buffer)
    optimizer = CPUAdamW([param], lr=0.5)
    param.grad = torch.ones(64)
    optimizer.step()
    before = buffer.clone()
    param.data = buffer.view(torch.bfloat16)[:64]
    with pytest.raises(TypeError, match=r"param 0 of group 0 must be torch\.float32, got torch\.bfloat16"):
        optimizer.step()
    assert torch.equal(buffer, before)


def test_moments_follow_elements_when_strides_change() -> None:
    values, grads = torch.randn(6, 6), [torch.randn(6, 6) for _ in range(2)]
    results = []
    for optimizer_class in (CPUAdamW, torch.optim.AdamW):
        param = Parameter(values.clone())
        optimizer = optimizer_class([param], lr=0.1)
        for number, grad in enumerate(grads):
            if number:
                param.data = param.data.t()
                optimizer.state[param]["exp_avg"].t_()
            param.grad = grad.clone()
            optimizer.step()
        results.append([param.detach(), optimizer.state[param]["exp_avg"]])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_storage_made_smaller_is_noticed() -> None:
    param = Parameter(torch.zeros(1 << 12))
    param.grad = torch.ones(1 << 12)
    param.untyped_storage().resize_(64)
    with pytest.raises(ValueError, match="param 0 of group 0 reaches beyond its storage of 64 bytes"):
        CPUAdamW([param]).step()


def test_an_empty_view_may_begin_behind_its_storage() -> None:
    results = []
    for cls in (CPUAdamW, torch.optim.AdamW):
        params = [Parameter(torch.zeros(1, 7, 11)[1:1, 1:7:2, 1:11:2]), Parameter(torch.ones(3))]
        assert params[0].storage_offset() * 4 > params[0].untyped_storage().nbytes()
        for param in params:
            param.grad = torch.ones_like(param)
        cls(params).step()
        results.append(params[1].detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)


def test_params_that_share_elements_are_refused() -> None:
    buffer = torch.ones(4, 8)
    for first, other in ((buffer, buffer), (buffer[:, :5], buffer[:, 3:]), (buffer[1:3], buffer[2])):
        params = [Parameter(first), Parameter(other)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = CPUAdamW(params)
        with pytest.raises(ValueError, match=r"param \d of group 0 and .*param \d of group 0 share memory"):
            optimizer.step()
        assert not optimizer.state
        assert torch.equal(buffer, torch.ones(4, 8))
        with pytest.raises(ValueError, match="share memory"):
            adam_update_(
                update(name=str(n), param=p.detach(), grad=p.grad, exp_avg=p.grad.clone(), exp_avg_sq=p.grad.clone())
                for n, p in enumerate(params)
            )


def test_params_that_interleave_are_stepped() -> None:
    buffer = torch.ones(4, 8)
    params = [Parameter(buffer[:, :4]), Parameter(buffer[:, 4:6]), Parameter(buffer[0, 6:])]
    optimizer = CPUAdamW(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert int((buffer != 1).sum()) == 16 + 8 + 2


def test_check_apart_takes_neighbours_and_empty_tensors() -> None:
    buffer = torch.ones(10)
    check_apart([("a", buffer[:5]), ("b", buffer[5:]), ("c", buffer[2:2]), ("d", torch.ones(3))])


def _bad_shape(state: dict[str, Any]) -> None:
    state[1]["exp_avg"] = torch.zeros(1)


def _no_step(state: dict[str, Any]) -> None:
    del state[1]["step"]


def _no_tensor(state: dict[str, Any]) -> None:
    state[1]["exp_avg_sq"] = None


def _integers(state: dict[str, Any]) -> None:
    state[1]["master"] = torch.zeros(4, dtype=torch.int8)


@pytest.mark.parametrize("harm", [_bad_shape, _no_step, _no_tensor, _integers])
@pytest.mark.parametrize("form", [AdamState(master="float32"), AdamState("bfloat16", "split")], ids=str)
def test_a_state_dict_that_does_not_fit_changes_nothing(form: AdamState, harm: Callable[..., None]) -> None:
    params = [Parameter(torch.ones(4).bfloat16()) for _ in range(2)]
    optimizer = CPUAdamW(params, lr=0.5, state=form)
    for param in params:
        param.grad = torch.ones(4).bfloat16()
    optimizer.step()
    before = copy.deepcopy((optimizer.state_dict(), [param.detach() for param in params]))
    bad = copy.deepcopy(before[0])
    bad["state"][0]["master"] = torch.full((4,), 9.0)
    bad["param_groups"][0]["lr"] = 7.0
    harm(bad["state"])
    with pytest.raises((TypeError, ValueError), match="saved for CPUAdamW param 1 of group 0"):
        optimizer.load_state_dict(bad)
    after = (optimizer.state_dict(), [param.detach() for param in params])
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_master_says_nothing_about_an_fp32_param() -> None:
    _, narrow = stepped(AdamState(master="float32"), 4, torch.bfloat16)
    param, optimizer = stepped(AdamState(), 4)
    optimizer.load_state_dict(narrow.state_dict())
    with torch.no_grad():
        param.fill_(7.0)
    optimizer.step()
    assert bool((param > 6.9).all())


def test_entries_of_the_users_own_are_left_alone() -> None:
    param, optimizer = stepped(AdamState("block8"))
    saved = optimizer.state_dict()
    saved["state"][0]["tag"] = "x"
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[param]["tag"] == optimizer.state_dict()["state"][0]["tag"] == "x"


def test_hooks_see_torchs_form() -> None:
    param, optimizer = stepped(AdamState("block8"))
    seen: list[Any] = []
    optimizer.register_state_dict_post_hook(lambda _, packed: seen.append(packed["state"][0]["exp_avg"].dtype))
    optimizer.register_load_state_dict_post_hook(lambda self: seen.append(self.state[param]["exp_avg"].dtype))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.float32, torch.uint8]


def test_a_late_error_leaves_no_state_behind() -> None:
    params = [Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = CPUAdam(params)
    params[1].grad = torch.ones(4)
    optimizer.step()
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(3)
    params[0].grad = torch.ones(4)
    with pytest.raises(ValueError, match="exp_avg of CPUAdam param 1"):
        optimizer.step()
    assert params[0] not in optimizer.state
    fresh = CPUAdam([params[0]])
    with pytest.raises(TypeError):
        fresh.step(grad_scale="x")  # type: ignore[arg-type]
    fresh.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        fresh.step()
    assert not fresh.state


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exp_avg": None}, "culprit has no exp_avg"),
        ({"param": None}, "culprit has no param"),
        ({"hypers": None}, "hypers of culprit must be AdamHypers"),
        ({"step": "3"}, "step of culprit must be a number"),
        ({"step": 0}, "step of culprit counts from 1, got 0"),
        ({"step": float("nan")}, "step of culprit counts from 1, got nan"),
    ],
)
def test_errors_name_the_update(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        adam_update_([update(**given)])


def test_what_is_not_an_update_or_a_number_of_threads() -> None:
    with pytest.raises(TypeError, match="updates must be AdamUpdates, got int"):
        adam_update_([3])  # type: ignore[list-item]
    for threads in (0, -3):
        with pytest.raises(ValueError, match="threads must be a positive integer or None"):
            grad_squares([torch.ones(3)], threads=threads)
    with pytest.raises(TypeError, match="threads must be a positive integer or None"):
        grad_squares([torch.ones(3)], threads=2.5)  # type: ignore[arg-type]
    assert grad_squares([torch.ones(3)], threads=10**12).total == 3
    with pytest.raises(TypeError, match="flush_denormals must be True or False"):
        CPUAdam([torch.ones(3)], flush_denormals="no")  # type: ignore[arg-type]


def test_generators_are_taken() -> None:
    assert grad_squares(grad for grad in [torch.ones(3), torch.ones(4)]).total == 7
    taken = update()
    assert adam_update_(found for found in [taken]) == 0
    assert bool(taken.exp_avg_sq.equal(torch.zeros(3)))
    assert adam_update_(found for found in [update(grad=torch.full((3,), torch.inf))]) == 3


def test_uninitialized_params_are_stand_ins() -> None:
    layer = torch.nn.LazyLinear(3)
    optimizer = CPUAdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert all(param in optimizer.state for param in layer.parameters())


def test_weight_decay_that_underflows_is_still_added() -> None:
    results: list[Tensor] = []
    for optimizer_class in (CPUAdam, torch.optim.Adam):
        param = Parameter(torch.full((64,), torch.inf))
        optimizer = optimizer_class([param], weight_decay=1e-50, fused=True)
        param.grad = torch.ones(64)
        optimizer.step()
        results.append(optimizer.state[param]["exp_avg"])
    assert all(bool(result.isnan().all()) for result in results)


def test_the_mode_of_who_used_the_pool_first_does_not_matter() -> None:
    def nonzero(threads: int) -> int:
        param = Parameter(torch.zeros(1 << 18))
        optimizer = CPUAdamW([param], lr=0.0, threads=threads)
        param.grad = torch.full((1 << 18,), 1e-38)
        optimizer.step()
        return int((optimizer.state[param]["exp_avg"].view(torch.int32) != 0).sum())

    torch.set_flush_denormal(True)
    try:
        flushed = [nonzero(1), nonzero(2)]
    finally:
        torch.set_flush_denormal(False)
    assert flushed == [0, 0]
    assert [nonzero(1), nonzero(2)] == [1 << 18, 1 << 18]


def _param(value: Tensor | None = None, **options: Any) -> CPUAdamW:
    return CPUAdamW([Parameter(torch.ones(4) if value is None else value)], **options)


def _stepped_with(grad: Tensor, shape: tuple[int, ...] | None = None) -> None:
    optimizer = _param()
    param = optimizer.param_groups[0]["params"][0]
    if shape is not None:
        param.data = torch.ones(shape)
    param.grad = grad
    optimizer.step()


def _edited(key: str, value: Any) -> None:
    param, optimizer = stepped(AdamState(), 4)
    optimizer.state[param][key] = value
    optimizer.step()


def _loaded(key: str, value: Any, form: AdamState | None = None) -> None:
    _, optimizer = stepped(form or AdamState("bfloat16"), 4)
    saved = optimizer.state_dict()
    saved["state"][0][key] = value
    optimizer.load_state_dict(saved)


def _new_shape() -> None:
    param, optimizer = stepped(AdamState(), 4)
    param.data, param.grad = torch.ones(6), None
    param.grad = torch.ones(6)
    optimizer.step()


MISUSES: dict[str, tuple[Callable[[], Any], type[Exception], type[Exception]]] = {
    "a complex param": (lambda: _param(torch.ones(3, dtype=torch.complex64)), zero_opt.UnsupportedParam, TypeError),
    "a half without a master": (lambda: _param(torch.ones(3).half()), zero_opt.UnsupportedParam, TypeError),
    "elements over each other": (lambda: _param(torch.ones(1).expand(3)), zero_opt.ConfigError, ValueError),
    "threads=0": (lambda: _param(threads=0), zero_opt.ConfigError, ValueError),
    "threads='a'": (lambda: _param(threads="a"), zero_opt.ConfigTypeError, TypeError),
    "fused=False": (lambda: _param(fused=False), zero_opt.ConfigError, ValueError),
    "a sparse gradient": (lambda: _stepped_with(torch.ones(4).to_sparse()), zero_opt.UnsupportedParam, TypeError),
    "a param of another shape": (_new_shape, zero_opt.StateDictError, ValueError),
    "moments of another shape": (lambda: _edited("exp_avg", torch.ones(3)), zero_opt.StateDictError, ValueError),
    "moments that are no tensor": (lambda: _edited("exp_avg", 3.0), zero_opt.StateDictTypeError, TypeError),
    "no step": (lambda: _edited("step", None), zero_opt.StateDictTypeError, TypeError),
    "a step that is a string": (lambda: _edited("step", "3"), zero_opt.StateDictTypeError, TypeError),
    "a saved shape": (lambda: _loaded("exp_avg", torch.ones(3)), zero_opt.StateDictError, ValueError),
    "a saved string": (lambda: _loaded("exp_avg", "x"), zero_opt.StateDictTypeError, TypeError),
    "a saved sparse tensor": (
        lambda: _loaded("exp_avg", torch.ones(4).to_sparse()),
        zero_opt.StateDictError,
        TypeError,
    ),
    "a saved meta tensor": (lambda: _loaded("exp_avg", torch.ones(4).to("meta")), zero_opt.StateDictError, TypeError),
    "a saved step": (lambda: _loaded("step", "3"), zero_opt.StateDictTypeError, TypeError),
    "a complex step": (lambda: _loaded("step", torch.tensor(3j)), zero_opt.StateDictError, TypeError),
    "a step too large": (
        lambda: _loaded("step", torch.tensor(1e300, dtype=torch.float64)),
        zero_opt.StateDictError,
        ValueError,
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_every_error_is_ours_and_of_a_builtin_type(misuse: str) -> None:
    call, kind, builtin = MISUSES[misuse]
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, zero_opt.ZeroOptError)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_wrapper_has_no_memory_wherever_it_begins(offset: int) -> None:
    """The address of a view of one is not 0."""
    value = wrapped(2, 3, offset=offset)
    assert not has_memory(value)
    assert oddity(value) == "a WrapperTensor without memory of its own"
    with pytest.raises(UnsupportedParam, match=r"it has no memory of its own \(WrapperTensor\)"):
        check_tensor("it", value)
    assert shared_pair([value, wrapped(2, 3, offset=offset)]) is None
    assert has_memory(torch.ones(5)[offset:])
    assert has_memory(torch.ones(5)[5:])


@pytest.mark.parametrize("value", ["0.1", None, 1j, [0.1], torch.ones(2)])
def test_what_is_no_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigTypeError, match=r"^lr must be a number, got"):
        require_number("lr", value)


def test_nan_is_no_number() -> None:
    for value in (float("nan"), torch.tensor(float("nan"))):
        with pytest.raises(ConfigError, match=r"^lr is NaN"):
            require_number("lr", value)
