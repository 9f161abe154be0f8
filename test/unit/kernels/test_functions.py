"""The kernels as functions: what they check, stage and return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zero_opt.kernels import AdamHypers, AdamUpdate, adam_update_, copy_, grad_squares, sum_count

HYPERS = AdamHypers(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
ROLES = ("param", "grad", "exp_avg", "exp_avg_sq")


def update(**tensors: Tensor) -> AdamUpdate:
    given: dict[str, Any] = {role: torch.rand(64) for role in ROLES}
    return AdamUpdate(name="x", hypers=HYPERS, step=1.0, **{**given, **tensors})


def clone(of: AdamUpdate) -> AdamUpdate:
    tensors = {**of.arrays(), "grad": of.grad}
    return AdamUpdate(
        name=of.name, hypers=of.hypers, step=of.step, **{role: tensor.clone() for role, tensor in tensors.items()}
    )


def test_the_function_takes_any_mix_of_steps_and_hypers() -> None:
    updates, expected = [], []
    for step, lr in ((1.0, 0.1), (5.0, 0.2)):
        hypers = AdamHypers(lr=lr, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
        tensors = {name: torch.rand(64) for name in ROLES}
        alone = {name: t.clone() for name, t in tensors.items()}
        updates.append(AdamUpdate(name="x", hypers=hypers, step=step, **tensors))
        adam_update_([AdamUpdate(name="x", hypers=hypers, step=step, **alone)])
        expected.append(alone["param"])
    adam_update_(updates)
    assert all(torch.equal(update.param, want) for update, want in zip(updates, expected))


def test_scale_count_and_copy_out_in_one_pass() -> None:
    grad = torch.randn(64).bfloat16()
    grad[3] = torch.inf
    one = update(grad=grad, out=torch.zeros(64, dtype=torch.float16))
    many = clone(one)
    assert adam_update_([one], grad_scale=0.25) == 1
    scaled = AdamUpdate(
        name="x",
        hypers=HYPERS,
        step=1.0,
        param=many.param,
        grad=grad.float() * 0.25,
        exp_avg=many.exp_avg,
        exp_avg_sq=many.exp_avg_sq,
    )
    adam_update_([scaled])
    assert one.param.equal(many.param) or bool(one.param[3].isnan())
    assert torch.equal(one.out.nan_to_num(), one.param.half().nan_to_num()) if one.out is not None else False


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"beta1": 0.4}, {"decoupled": False}])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_loops_that_convert_give_the_bits_of_those_that_do_not(moments: torch.dtype, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decoupled": True,
    }
    hypers = AdamHypers(**{**given, **options})
    master, grad = torch.randn(1000), torch.randn(1000).bfloat16()
    results = []
    for split in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            state = {role: torch.full((1000,), 0.25, dtype=moments) for role in ("exp_avg", "exp_avg_sq")}
            param = master.clone()
            if split:
                bits = master.view(torch.int32)
                param = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
                state["remainder"] = bits.to(torch.int16)
            adam_update_([AdamUpdate(name="x", hypers=hypers, step=3.0, param=param, grad=grad.to(dtype), **state)])
            if split:
                high = param.view(torch.int16).int() << 16
                param = (high + state["remainder"].int()).view(torch.float32)
            results.append([param, state["exp_avg"], state["exp_avg_sq"]])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0]))


def test_out_of_other_strides_is_written_too() -> None:
    out = torch.zeros(64, 2, dtype=torch.bfloat16)
    one = update(out=out[:, 0])
    adam_update_([one])
    assert torch.equal(out[:, 0], one.param.bfloat16()) and not out[:, 1].any()


def test_a_split_master_of_any_layout() -> None:
    shaped = {"exp_avg": torch.zeros(8, 8), "exp_avg_sq": torch.zeros(8, 8), "grad": torch.randn(8, 8)}
    remainder = torch.randint(-100, 100, (8, 8), dtype=torch.int16)
    param = torch.randn(8, 8).bfloat16()
    plain = update(param=param.clone(), remainder=remainder.clone(), **{r: t.clone() for r, t in shaped.items()})
    turned = update(param=param.t().contiguous().t(), remainder=remainder.clone(), **shaped)
    for one in (plain, turned):
        adam_update_([one])
    assert torch.equal(plain.param, turned.param)
    assert torch.equal(plain.arrays()["remainder"], turned.arrays()["remainder"])


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"grad": torch.ones(64, dtype=torch.float64)}, TypeError, "grad of x must be torch.float32 or torch.bfloat16"),
        ({"grad": torch.ones(63)}, ValueError, r"grad of x must have shape \(64,\), got \(63,\)"),
        ({"param": torch.ones(64, dtype=torch.bfloat16)}, TypeError, "param of x must be torch.float32, got torch.bf"),
        ({"remainder": torch.ones(64, dtype=torch.int16)}, TypeError, "param of x must be torch.bfloat16, got"),
        ({"exp_avg": torch.ones(64, dtype=torch.float16)}, TypeError, "exp_avg of x must be torch.float32 or"),
        ({"exp_avg": torch.ones(64, dtype=torch.bfloat16)}, TypeError, "exp_avg and exp_avg_sq of x must have one dty"),
        ({"max_exp_avg_sq": torch.ones(64).bfloat16()}, TypeError, "max_exp_avg_sq of x must be torch.float32"),
        ({"out": torch.ones(64, dtype=torch.int8)}, TypeError, "out of x must be"),
        ({"exp_avg_sq": torch.ones(1).expand(64)}, ValueError, "exp_avg_sq of x has elements that may share memory"),
        (
            {role: torch.zeros(64, dtype=torch.uint8) for role in ("exp_avg", "exp_avg_sq")},
            TypeError,
            "x has no exp_avg_base",
        ),
        (
            {
                **{role: torch.zeros(64, dtype=torch.uint8) for role in ("exp_avg", "exp_avg_sq")},
                **{role: torch.zeros(2, dtype=torch.int16) for role in ("exp_avg_base", "exp_avg_sq_base")},
            },
            ValueError,
            r"exp_avg_base of x must have shape \(1,\), got \(2,\)",
        ),
    ],
)
def test_bad_tensors_are_named_and_nothing_is_written(
    tensors: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    good = update()
    before = good.param.clone()
    with pytest.raises(error, match=message):
        adam_update_([good, update(**tensors)])
    assert torch.equal(good.param, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_grad_squares(threads: int) -> None:
    grads = [torch.randn(300, 400), torch.randn(7).bfloat16(), torch.randn(8, 9).half().t(), torch.zeros(0)]
    expected = sum(float(g.double().square().sum()) for g in grads)
    found = grad_squares(grads, threads=threads)
    assert found.nonfinite == 0 and found.total == pytest.approx(expected, rel=1e-12)
    grads[1][2] = torch.nan
    assert grad_squares(grads).nonfinite == 1


def test_grad_squares_of_a_lazily_negated_or_strided_gradient() -> None:
    values = torch.arange(12.0).view(3, 4)
    for grad in (torch._neg_view(values), values[:, ::2], values.t()):
        assert grad_squares([grad]).total == float(grad.square().sum())
    with pytest.raises(TypeError, match="gradient 1 must be dense"):
        grad_squares([values, values.to_sparse()])


def test_grad_squares_of_known_sums() -> None:
    """They are believed, and only added up."""
    grads = [torch.ones(5000), torch.ones(3)]
    sums = torch.tensor([4096.0, 904.0], dtype=torch.float64)
    assert sum_count(5000) == 2 and sum_count(0) == 0
    assert grad_squares(grads, [sums, None]).total == 5003.0
    assert grad_squares(grads, [sums + 1.0, None]).total == 5005.0
    with pytest.raises(ValueError, match="the sums of gradient 0"):
        grad_squares(grads, [sums[:1], None])
    with pytest.raises(TypeError, match="the sums of gradient 0"):
        grad_squares(grads, [sums.float(), None])


def test_copies_and_what_cannot_be_copied() -> None:
    sources = [torch.randn(300), torch.randn(7).bfloat16(), torch.zeros(0)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_(targets, sources, threads=2)
    assert all(map(torch.equal, targets, sources))
    assert [target._version for target in targets] == [1, 1, 1]
    for target, source in ((torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2).double())):
        with pytest.raises(ValueError, match="in pairs of one dtype"):
            copy_([target], [source])
    with pytest.raises(ValueError, match="contiguous CPU tensors"):
        copy_([torch.zeros(4)[::2]], [torch.zeros(2)])
