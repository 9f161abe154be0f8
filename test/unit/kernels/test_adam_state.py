"""AdamState: bf16 and fp16 params with masters, compact moments, and state dicts that fit all of them."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import zero_opt
from zero_opt import AdamState, CPUAdam, CPUAdamW
from zero_opt.errors import ConfigError, ConfigTypeError, StateDictError, ZeroOptWarning
from zero_opt.kernels import AdamHypers, AdamUpdate, adam_update_
from zero_opt.kernels.adam_state import HIGHEST_BASES, follow_param, joined_master, remainder_of

FORMS = [
    AdamState(moments, master)
    for moments, master in itertools.product(("float32", "bfloat16", "block8"), ("float32", "split"))
]
forms = pytest.mark.parametrize("form", FORMS, ids=str)
SHAPES = [(13, 11), (64,), (), (3, 0), (200, 7)]


def gradients(params: list[Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def params(dtype: torch.dtype = torch.bfloat16) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def masters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state_dict()["state"].values():
        yield state["master"]


@pytest.mark.parametrize("master", ["float32", "split"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "block8"])
def test_the_master_is_the_param_of_an_fp32_run(master: str, moments: str) -> None:
    narrow, wide = params(), [Parameter(p.detach().float()) for p in params()]
    a = CPUAdamW(narrow, lr=1e-2, state=AdamState(moments, master))
    b = CPUAdamW(wide, lr=1e-2, state=AdamState(moments))
    for seed in range(5):
        gradients(narrow, seed)
        for p, q in zip(narrow, wide):
            q.grad = p.grad.float() if p.grad is not None else None
        a.step()
        b.step()
        assert all(torch.equal(master, q) for master, q in zip(masters(a), wide))
    if master == "float32":
        assert all(torch.equal(p, q.bfloat16()) for p, q in zip(narrow, wide))
    else:
        assert all(torch.equal(p, rounded_away(q.detach())) for p, q in zip(narrow, wide))


@pytest.mark.parametrize("amsgrad", [False, True])  # in registers where it can be, and by the general loop
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "block8"])
def test_a_zero_that_is_written_is_a_zero(moments: str, amsgrad: bool) -> None:
    """What a split master keeps beside the param is another value's: below 0, it would make a NaN of 0 and of -0."""
    found = []
    for master in ("float32", "split"):
        (param,) = [Parameter(torch.linspace(-3.0, 3.0, 333).bfloat16())]
        optimizer = CPUAdamW([param], lr=1e-2, state=AdamState(moments, master), amsgrad=amsgrad)
        gradients([param], 0)
        optimizer.step()
        with torch.no_grad():
            param[::2] = 0.0
            param[1::4] = -0.0
        (held,) = masters(optimizer)
        assert held[param == 0].abs().max() < 1e-38
        gradients([param], 1)
        optimizer.step()
        (held,) = masters(optimizer)
        found.append(torch.cat([held[::2], held[1::4]]))
    assert torch.equal(*found)


def rounded_away(values: Tensor) -> Tensor:
    return ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def test_masters_are_split_and_joined_as_the_kernel_does_it() -> None:
    ordinary = torch.randn(200, generator=torch.Generator().manual_seed(0))
    odd = [0x7FC00000, 0x7FC00001, 0x7F800001, -1, -0x400000, 0x7F800000, -0x800000, 0, -0x80000000, 0x7F7FFFFF, 0x8000]
    master = torch.cat([ordinary, torch.tensor(odd, dtype=torch.int32).view(torch.float32)])
    moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
    quiet = torch.tensor(0x7FC00000, dtype=torch.int32)
    bits = torch.where(master.isnan(), quiet, master.view(torch.int32))
    upper, lower = rounded_away(bits.view(torch.float32)), bits.to(torch.int16)
    param, remainder = upper.clone(), master.view(torch.int32).to(torch.int16)  # NaNs have other bits yet
    unchanging = AdamHypers(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True)
    arrays = {"param": param, "remainder": remainder, "grad": torch.zeros_like(master), **moments}
    adam_update_([AdamUpdate(name="p", hypers=unchanging, step=1.0, **arrays)])
    for mine, native in ((upper, param), (lower, remainder), (remainder_of(upper, master), remainder)):
        assert torch.equal(mine.view(torch.int16), native.view(torch.int16))
    assert torch.equal(joined_master(upper, lower).view(torch.int32), bits)


def test_fp16_params_with_a_master() -> None:
    narrow, wide = params(torch.float16), [Parameter(p.detach().float()) for p in params(torch.float16)]
    a, b = CPUAdam(narrow, state=AdamState(master="float32")), CPUAdam(wide)
    for seed in range(3):
        gradients(narrow, seed)
        for p, q in zip(narrow, wide):
            q.grad = p.grad.float() / 8 if p.grad is not None else None
        a.step(grad_scale=0.125)
        b.step()
    assert all(torch.equal(p, q.half()) for p, q in zip(narrow, wide))


def test_params_of_several_dtypes_in_one_optimizer() -> None:
    mixed = [Parameter(torch.ones(64, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    optimizer = CPUAdam(mixed, state=AdamState(master="float32"))
    gradients(mixed, 0)
    optimizer.step()
    assert ["master" in optimizer.state[p] for p in mixed] == [False, True, True]


@forms
def test_state_dict_is_torchs_with_a_master(form: AdamState) -> None:
    ours = params()
    optimizer = CPUAdamW(ours, state=form, amsgrad=True)
    gradients(ours, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    stock = torch.optim.AdamW([Parameter(p.detach().float()) for p in ours], amsgrad=True, fused=True)
    for param in stock.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    stock.step()
    assert saved["param_groups"] == stock.state_dict()["param_groups"]
    for index, state in stock.state_dict()["state"].items():
        assert list(saved["state"][index]) == [*state, "master"]
        for key, value in state.items():
            assert (saved["state"][index][key].dtype, saved["state"][index][key].shape) == (value.dtype, value.shape)
    stock.load_state_dict(saved)


@forms
def test_loads_what_it_saved_and_goes_on_to_the_bit(form: AdamState) -> None:
    ours = params()
    a = CPUAdamW(ours, state=form)
    for seed in range(3):
        gradients(ours, seed)
        a.step()
    others = [Parameter(torch.zeros_like(p)) for p in ours]
    b = CPUAdamW(others, state=form)
    saved = copy.deepcopy(a.state_dict())
    before = copy.deepcopy(saved)
    b.load_state_dict(saved)
    for p, q in zip(ours, others):
        assert not q.any(), "the model is loaded by itself"
        q.data.copy_(p)
    for seed in range(3, 6):
        assert all(torch.equal(p, q) for p, q in zip(ours, others))
        for some in (ours, others):
            gradients(some, seed)
        a.step()
        b.step()
    for one, two in zip(a.state_dict()["state"].values(), b.state_dict()["state"].values()):
        assert all(torch.equal(one[key], two[key]) for key in one)
    for one, two in zip(saved["state"].values(), before["state"].values()):
        assert all(torch.equal(one[key], two[key]) for key in one), "the dict that was loaded has changed"


@pytest.mark.parametrize("master", ["float32", "split"])
def test_a_loaded_master_is_as_under_a_sharded_optimizer(master: str) -> None:
    """Load it and step, where the params are what was saved with it, other values, or loaded after it."""
    form, found = AdamState(master=master), []
    ours = params()
    trained = CPUAdamW(ours, lr=1e-2, state=form)
    gradients(ours, 0)
    trained.step()
    saved = copy.deepcopy(trained.state_dict())
    for made in (CPUAdamW, partial(zero_opt.ShardedOptimizer, optimizer_class=CPUAdamW, offload=zero_opt.CPUOffload())):
        for when in ("never", "before", "after"):
            others = [Parameter(torch.full_like(p, 0.75)) for p in ours]
            optimizer = made(others, lr=1e-2, state=form)
            for moment in ("before", "after"):
                for p, q in zip(ours, others) if when == moment else ():
                    q.data.copy_(p)
                if moment == "before":
                    before = [q.detach().clone() for q in others]
                    optimizer.load_state_dict(copy.deepcopy(saved))
                    assert all(torch.equal(p, q) for p, q in zip(before, others))
            gradients(others, 1)
            optimizer.step()
            found.append([*others, *masters(optimizer)])
            if isinstance(optimizer, zero_opt.ShardedOptimizer):
                optimizer.close()
    for alone, sharded in zip(found[:3], found[3:]):
        assert all(torch.equal(a, b) for a, b in zip(alone, sharded))


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "block8"])
@pytest.mark.parametrize("layout", ["channels_last", "strided"])
def test_any_layout(moments: str, layout: str) -> None:
    def made() -> Parameter:
        values = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))
        if layout == "channels_last":
            return Parameter(values.to(memory_format=torch.channels_last))
        return Parameter(values.repeat_interleave(2, 3)[..., ::2])

    param = made()
    address, strides = param.data_ptr(), param.stride()
    flat = Parameter(torch.empty_like(param).copy_(param.detach()).permute(0, 2, 3, 1).flatten())
    if layout == "strided":
        flat = Parameter(param.detach().flatten().clone())
    a, b = CPUAdam([param], state=AdamState(moments)), CPUAdam([flat], state=AdamState(moments))
    for seed in range(3):
        gradients([param], seed)
        grad = param.grad.permute(0, 2, 3, 1) if layout == "channels_last" else param.grad
        flat.grad = grad.flatten().clone()
        a.step()
        b.step()
        now = param.detach().permute(0, 2, 3, 1) if layout == "channels_last" else param.detach()
        assert torch.equal(now.flatten(), flat)
    assert (param.data_ptr(), param.stride()) == (address, strides)
    saved = a.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(
        (saved.permute(0, 2, 3, 1) if layout == "channels_last" else saved).flatten(),
        b.state_dict()["state"][0]["exp_avg"],
    )


def test_without_a_saved_master_the_param_is_it() -> None:
    ours = params()
    stock = torch.optim.AdamW(ours, fused=False, foreach=False)
    gradients(ours, 0)
    stock.step()
    optimizer = CPUAdamW(ours, state=AdamState(master="split"))
    with pytest.warns(ZeroOptWarning, match="no master saved for 5 params: their own values are taken"):
        optimizer.load_state_dict(stock.state_dict())
    assert all(torch.equal(master, p.float()) for master, p in zip(masters(optimizer), ours))


@forms
def test_a_maximum_of_none_is_none(form: AdamState) -> None:
    param = Parameter(torch.ones(64, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = CPUAdamW([param], state=form)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["max_exp_avg_sq"] = None
    optimizer.load_state_dict(copy.deepcopy(saved))
    loaded = optimizer.state_dict()["state"][0]
    assert loaded.pop("max_exp_avg_sq") is None
    assert all(torch.equal(loaded[key], saved["state"][0][key]) for key in loaded)
    optimizer.step()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_copies_keep_the_form(clone: Callable[[Any], Any]) -> None:
    ours = params()
    a = CPUAdamW(ours, state=AdamState("block8", "split"), threads=1, flush_denormals=True)
    gradients(ours, 0)
    a.step()
    b = clone(a)
    others = b.param_groups[0]["params"]
    for some, optimizer in ((ours, a), (others, b)):
        gradients(some, 1)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, others))
    assert b.state[others[0]]["exp_avg"].dtype is torch.uint8


@pytest.mark.parametrize("how", ["read", "clear", "load"])
@forms
def test_an_empty_entry_is_saved_as_it_is(form: AdamState, how: str) -> None:
    """As torch saves it: reading ``opt.state[p]`` before the first step makes one."""
    some = params()
    optimizer = CPUAdamW(some, state=form)
    if how != "read":
        gradients(some, 0)
        optimizer.step()
    if how == "load":
        saved = optimizer.state_dict()
        optimizer.load_state_dict({**saved, "state": {**saved["state"], 1: {}}})
    else:
        optimizer.state[some[1]].clear()
    saved = optimizer.state_dict()
    assert saved["state"][1] == {}
    assert sorted(saved["state"]) == ([1] if how == "read" else [0, 1, 2, 3, 4])
    optimizer.load_state_dict(saved)
    gradients(some, 1)
    optimizer.step()
    assert optimizer.state_dict()["state"][1]["step"] == 1


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, ["float32", "split"]), (torch.float16, ["float32"])])
def test_narrow_params_need_a_master(dtype: torch.dtype, kept: list[str]) -> None:
    """The error names all forms of it that the class keeps for the dtype."""
    param = Parameter(torch.ones(4, dtype=dtype))
    with pytest.raises(TypeError, match=r"must be torch.float32, got .*; state=zero_opt.AdamState\(master=") as caught:
        CPUAdam([param])
    assert [name for name in ("float32", "split") if f"'{name}'" in str(caught.value)] == kept
    for name in kept:
        CPUAdam([param], state=AdamState(master=name))
    if "split" not in kept:
        with pytest.raises(
            TypeError, match=r"torch.float32 or torch.bfloat16, got .*; state=.*master='float32'\) keeps"
        ):
            CPUAdam([param], state=AdamState(master="split"))


def test_classes_without_split_masters_advise_none() -> None:
    with pytest.raises(TypeError, match=r"got torch.bfloat16; state=zero_opt.AdamState\(master='float32'\) keeps"):
        zero_opt.CPUSGD([Parameter(torch.ones(4, dtype=torch.bfloat16))])


def test_forms_are_checked() -> None:
    with pytest.raises(ConfigError, match="moments must be one of"):
        AdamState(moments="int4")
    with pytest.raises(ConfigError, match="master must be one of"):
        AdamState(master="half")
    with pytest.raises(ConfigTypeError, match=r"state must be a zero_opt.AdamState, got 'block8'"):
        CPUAdam([torch.ones(4)], state="block8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads must be a positive integer or None, got 0"):
        CPUAdam([torch.ones(4)], threads=0)


def test_8_bit_moments_must_lie_as_the_param_does() -> None:
    param = Parameter(torch.ones(8, 8))
    optimizer = CPUAdam([param], state=AdamState("block8"))
    param.grad = torch.ones(8, 8)
    optimizer.step()
    state = optimizer.state[param]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    state["exp_avg_base"] = state["exp_avg_base"].clone()
    with pytest.raises(ValueError, match="8-bit moments of CPUAdam param 0 of group 0 must lie in memory as the param"):
        optimizer.step()


CODED = [
    (AdamState("block8"), torch.float32, "exp_avg"),
    (AdamState("block8"), torch.float32, "exp_avg_sq_base"),
    (AdamState("float32", "split"), torch.bfloat16, "remainder"),
]


@pytest.mark.parametrize("how", ["as stepped", "copied", "loaded"])
@pytest.mark.parametrize(("form", "dtype", "key"), CODED, ids=str)
def test_codes_that_were_written_to_are_not_taken_for_values(
    form: AdamState, dtype: torch.dtype, key: str, how: str
) -> None:
    ours = params(dtype)
    optimizer = CPUAdamW(ours, state=form)
    for seed in range(2):
        gradients(ours, seed)
        optimizer.step()
    if how == "copied":
        optimizer, ours = copy.deepcopy((optimizer, ours))
    saved = copy.deepcopy(optimizer.state_dict())
    if how == "loaded":
        optimizer.load_state_dict(saved)
    before = [param.detach().clone() for param in ours]
    optimizer.state[ours[0]][key].mul_(2)
    gradients(ours, 2)
    for call in (optimizer.step, optimizer.state_dict, optimizer.step):
        with pytest.raises(StateDictError, match=f"param 0 of group 0: state '{key}' was written to in place"):
            call()
    assert all(map(torch.equal, ours, before))
    optimizer.load_state_dict(saved)
    assert all(map(torch.equal, ours, before))
    optimizer.step()
    optimizer.state[ours[0]][key].mul_(2)
    optimizer.state.clear()
    optimizer.step()
    assert all(float(optimizer.state[param]["step"]) == 1 for param in ours)


def test_bf16_moments_are_values_whose_edits_take_effect() -> None:
    halved, plain = params(torch.float32), params(torch.float32)
    a, b = (CPUAdamW(these, state=AdamState("bfloat16")) for these in (halved, plain))
    for these, optimizer in ((halved, a), (plain, b)):
        gradients(these, 0)
        optimizer.step()
    a.state[halved[0]]["exp_avg"].mul_(0.5)
    saved = b.state_dict()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"] * 0.5
    b.load_state_dict(saved)
    for these, optimizer in ((halved, a), (plain, b)):
        gradients(these, 1)
        optimizer.step()
    assert all(map(torch.equal, halved, plain))


@pytest.mark.parametrize("option", [{"state": AdamState("block8")}, {"threads": 1}, {"flush_denormals": True}], ids=str)
def test_what_is_the_same_for_all_params_is_refused_in_a_group(option: dict[str, Any]) -> None:
    (name,) = option
    given: list[dict[str, Any]] = [
        {"params": [Parameter(torch.ones(3))]},
        {"params": [Parameter(torch.ones(3))], **option},
    ]
    with pytest.raises(ConfigError, match=f"param group 1 has '{name}', which is the same for all params"):
        CPUAdamW(given)
    optimizer = CPUAdamW(given[:1])
    with pytest.raises(ConfigError, match=f"param group 1 has '{name}'"):
        optimizer.add_param_group(given[1])
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ConfigError, match=f"param group 1 has '{name}'"):
        zero_opt.ShardedOptimizer(given, CPUAdamW, offload=zero_opt.CPUOffload())


@pytest.mark.parametrize("cls", [CPUAdam, CPUAdamW])
def test_capturable_changes_nothing(cls: type[CPUAdam]) -> None:
    found = []
    for capturable in (False, True):
        ours = params(torch.float32)
        optimizer = cls(ours, capturable=capturable)
        for seed in range(3):
            gradients(ours, seed)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        found.append([param.detach() for param in ours])
    assert all(map(torch.equal, *found))


def test_subnormal_moments_are_flushed_only_if_asked_for() -> None:
    for flush, expected in ((False, True), (True, False)):
        param = Parameter(torch.ones(64))
        optimizer = CPUAdam([param], lr=1e-3, flush_denormals=flush)
        param.grad = torch.full((64,), 2.0**-126)
        optimizer.step()
        assert bool(optimizer.state[param]["exp_avg"].any()) is expected


def test_how_many_gradients_were_not_finite() -> None:
    ours = [Parameter(torch.ones(70)), Parameter(torch.ones(3))]
    optimizer = zero_opt.CPUAdam(ours)
    gradients(ours, 0)
    optimizer.step()
    assert optimizer.nonfinite_grads == 0
    for p in ours:
        p.grad[1:3] = torch.tensor([torch.inf, torch.nan])
    optimizer.step()
    assert optimizer.nonfinite_grads == 4


@pytest.mark.parametrize("value", [-1e-9, -torch.inf])
@pytest.mark.parametrize("key", ["exp_avg_sq", "max_exp_avg_sq"])
@pytest.mark.parametrize("form", [AdamState(), *FORMS], ids=str)
def test_means_of_squares_below_0_are_refused(form: AdamState, key: str, value: float) -> None:
    """8-bit moments would lose their sign."""
    ours = params(torch.float32 if form.master is None else torch.bfloat16)
    optimizer = CPUAdamW(ours, state=form, amsgrad=True)
    gradients(ours, 0)
    optimizer.step()
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    saved["state"][4][key][17, 3] = value
    for beside in (1.0, torch.nan):  # which torch takes for the least
        saved["state"][4][key][2, 1] = beside
        with pytest.raises(StateDictError, match=f"{key} saved for CPUAdamW param 4 of group 0 has values below 0"):
            optimizer.load_state_dict(saved)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(value, after[at][name]) for at in after for name, value in before["state"][at].items())
    saved["state"][4][key][17, 3] = -0.0
    optimizer.load_state_dict(saved)


def test_the_highest_base_is_that_of_a_block_that_is_not_finite() -> None:
    param = Parameter(torch.zeros(64))
    optimizer = CPUAdamW([param], state=AdamState("block8"))
    gradients([param], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    for key in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][key][5] = torch.inf
    optimizer.load_state_dict(saved)
    assert {key: int(optimizer.state[param][key]) for key in HIGHEST_BASES} == HIGHEST_BASES


def test_a_master_is_kept_that_rounds_to_the_param_with_ties_either_way() -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00008000, 0x7F7F8000], dtype=torch.int32)
    masters = torch.cat([bits, bits | -0x80000000]).view(torch.float32)
    to_even = masters.bfloat16()
    away = ((masters.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    assert (to_even != away).any()
    for param in (to_even, away):
        followed = masters.clone()
        follow_param(followed, param)
        assert torch.equal(followed, masters)
    for units in (-2, -1, 1, 2):
        param = (to_even.view(torch.int16) + units).to(torch.int16).view(torch.bfloat16)
        written = (param != to_even) & (param != away) & ~param.isnan()
        followed = masters.clone()
        follow_param(followed, param)
        assert written.any()
        assert torch.equal(followed[written], param[written].float())
