"""CPUAdam and CPUAdamW are torch's fused Adam and AdamW: same bits, same state, same interface."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from test.support.harness import assert_bitwise
from zero_opt.kernels import CPUAdam, CPUAdamW
from zero_opt.policies import AdamState

PAIRS = [(CPUAdam, torch.optim.Adam), (CPUAdamW, torch.optim.AdamW)]
SIZES = [64, 4096, 64 * 501]  # multiples of 64: torch's kernel has another path for a ragged tail
both = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["Adam", "AdamW"])


def same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    """Equal bits in all params and in all state, with the same keys in the same order."""
    for left, right in zip(all_params(a), all_params(b)):
        one, other = a.state[left], b.state[right]
        if list(one) != list(other) or not torch.equal(left, right):
            return False
        if not all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one):
            return False
    return True


def all_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def twins(sizes: list[int], seed: int = 0) -> tuple[list[Parameter], list[Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(size, generator=generator) for size in sizes]
    return [Parameter(v.clone()) for v in values], [Parameter(v.clone()) for v in values]


def give_grads(ours: list[Parameter], theirs: list[Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p, q in zip(ours, theirs):
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (seed % 5 - 3)
        q.grad = p.grad.clone()


@both
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.2, 0.99), (0.0, 0.0)])
def test_bits_of_torch(ours: Any, theirs: Any, amsgrad: bool, maximize: bool, betas: tuple[float, float]) -> None:
    mine, plain = twins(SIZES)
    options = {"betas": betas, "amsgrad": amsgrad, "maximize": maximize}
    a, b = ours(mine, **options), theirs(plain, fused=True, **options)
    for step in range(30):
        for optimizer in (a, b):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step % 7)
            optimizer.param_groups[0]["weight_decay"] = 0.03 * (step % 4)
        give_grads(mine, plain, step)
        a.step()
        b.step()
        assert same_state(a, b)


@both
def test_a_thousand_steps(ours: Any, theirs: Any) -> None:
    mine, plain = twins([64 * 20])
    a, b = ours(mine), theirs(plain, fused=True)
    for step in range(1000):
        for optimizer in (a, b):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + step % 11)
            optimizer.param_groups[0]["weight_decay"] = 0.01 * (step % 3)
        give_grads(mine, plain, step)
        a.step()
        b.step()
    assert same_state(a, b)


@both
def test_groups_that_differ_and_params_without_gradient(ours: Any, theirs: Any) -> None:
    mine, plain = twins([128] * 4)

    def groups(p: list[Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": p[:2], "lr": torch.tensor(0.02), "betas": (0.8, 0.95)},
            {"params": p[2:], "eps": 1e-3, "maximize": True, "amsgrad": True, "weight_decay": 0.3},
        ]

    a, b = ours(groups(mine)), theirs(groups(plain), fused=True)
    for step in range(6):
        give_grads(mine, plain, step)
        for p in (mine[step % 4], plain[step % 4]):
            p.grad = None
        a.step()
        b.step()
        assert same_state(a, b)
    assert [a.state[p]["step"].item() for p in mine] == [4.0, 4.0, 5.0, 5.0]


@both
def test_state_dict_is_torchs(ours: Any, theirs: Any) -> None:
    mine, plain = twins([64, 128])
    a, b = ours(mine, amsgrad=True), theirs(plain, amsgrad=True, fused=True)
    give_grads(mine, plain, 0)
    a.step()
    b.step()
    assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]
    assert a.defaults == b.defaults
    state = a.state[mine[0]]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert state["step"].shape == () and state["step"].dtype is torch.float32
    into_torch, into_ours = theirs(plain, fused=True), ours(mine)
    into_torch.load_state_dict(a.state_dict())
    into_ours.load_state_dict(b.state_dict())
    give_grads(mine, plain, 1)
    into_torch.step()
    into_ours.step()
    assert same_state(into_ours, into_torch)


@both
def test_loads_an_unfused_state_dict(ours: Any, theirs: Any) -> None:
    mine, plain = twins([64])
    give_grads(mine, plain, 0)
    source = theirs(plain, foreach=True)
    source.step()
    a = ours(mine)
    a.load_state_dict(source.state_dict())
    assert a.param_groups[0]["fused"] is True
    assert a.param_groups[0]["foreach"] is None
    a.step()
    assert a.state[mine[0]]["step"].item() == 2.0


@both
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_copies_go_on_alike(ours: Any, theirs: Any, clone: Callable[[Any], Any]) -> None:
    mine, plain = twins([64])
    a = ours(mine)
    give_grads(mine, plain, 0)
    a.step()
    b = clone(a)
    (copied,) = all_params(b)
    for optimizer, p in ((a, mine[0]), (b, copied)):
        p.grad = torch.ones(64)
        optimizer.step()
    assert same_state(a, b)
    assert isinstance(b, theirs)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.empty(16, 8).t(),
    "channels_last": lambda: torch.empty(2, 4, 4, 4).to(memory_format=torch.channels_last),
    "strided": lambda: torch.empty(8, 32)[:, ::2],
    "offset": lambda: torch.empty(129)[1:],
    "expanded_size_one": lambda: torch.empty(1, 128).as_strided((1, 128), (0, 1)),
    "zero_dim": lambda: torch.empty(()),
    "zero_size": lambda: torch.empty(0, 3),
}


@both
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("contiguous_grad", [False, True])
def test_any_layout_is_updated_in_place(ours: Any, theirs: Any, layout: str, contiguous_grad: bool) -> None:
    base = LAYOUTS[layout]()
    torch.nn.init.normal_(base) if base.numel() else None
    param = Parameter(base)
    flat = Parameter(base.detach().clone(memory_format=torch.contiguous_format))
    address, strides = param.data_ptr(), param.stride()
    a, b = ours([param], amsgrad=True), ours([flat], amsgrad=True)
    for _ in range(3):
        grad = torch.randn(param.shape)
        flat.grad = grad
        param.grad = grad.clone() if contiguous_grad else torch.empty_like(param).copy_(grad)
        a.step()
        b.step()
        assert torch.equal(param, flat)
        assert all(torch.equal(a.state[param][key], b.state[flat][key]) for key in a.state[param])
    assert (param.data_ptr(), param.stride()) == (address, strides)


def test_neighbours_of_a_strided_param_are_left_alone() -> None:
    storage = torch.ones(8, 32)
    param = Parameter(storage[:, ::2])
    param.grad = torch.ones(8, 16)
    CPUAdam([param]).step()
    assert torch.equal(storage[:, 1::2], torch.ones(8, 16))
    assert not (storage[:, ::2] == 1).any()


def test_a_lazily_negated_gradient_counts_as_what_it_reads() -> None:
    param, other = Parameter(torch.ones(64)), Parameter(torch.ones(64))
    param.grad = torch._neg_view(torch.full((64,), 2.0))
    other.grad = torch.full((64,), -2.0)
    for p in (param, other):
        CPUAdam([p]).step()
    assert torch.equal(param, other)


@given(cuts=st.lists(st.integers(0, 500), max_size=5), amsgrad=st.booleans())
def test_params_cut_anywhere_step_to_the_same_bits(cuts: list[int], amsgrad: bool) -> None:
    (whole,), (cut,) = twins([500])
    edges = [0, *sorted(cuts), 500]
    pieces = [Parameter(cut.detach()[i:j]) for i, j in itertools.pairwise(edges)]
    a, b = CPUAdamW([whole], amsgrad=amsgrad), CPUAdamW(pieces, amsgrad=amsgrad)
    for step in range(2):
        whole.grad = torch.randn(500, generator=torch.Generator().manual_seed(step))
        for piece, i, j in zip(pieces, edges, edges[1:]):
            piece.grad = whole.grad[i:j]
        a.step()
        b.step()
    assert torch.equal(whole, cut)


def test_autograd_is_told_what_changed() -> None:
    param = Parameter(torch.ones(64))
    optimizer = CPUAdam([param])
    loss = (param * param).sum()
    param.grad = torch.ones(64)
    before = param._version
    optimizer.step()
    assert param._version > before
    assert optimizer.state[param]["exp_avg"]._version > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    param = Parameter(torch.ones(64))
    optimizer = CPUAdam([param])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 64.0
    assert optimizer.state[param]["step"].item() == 1.0


def test_hooks_and_schedulers_see_the_step() -> None:
    param = Parameter(torch.ones(64))
    optimizer = CPUAdamW([param], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=5)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for _ in range(3):
        param.grad = torch.ones(64)
        optimizer.step()
        scheduler.step()
    assert seen == [1, 1, 1]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (torch.ones(4, dtype=torch.bfloat16), TypeError, "param 1 of group 0 .*float32, got torch.bfloat16"),
        (torch.ones(4).to_sparse(), TypeError, "param 1 of group 0 .*dense"),
        (torch.ones(1).expand(4), ValueError, "param 1 of group 0 .*share memory"),
    ],
)
def test_bad_params_are_refused_by_name(bad: Tensor, error: type[Exception], message: str) -> None:
    message = message.replace(" .*", ".*")
    with pytest.raises(error, match=message):
        CPUAdam([torch.ones(4), bad])
    with pytest.raises(error, match=message.replace("group 0.*", "group 0 \\('bad'\\).*")):
        CPUAdam([("good", torch.ones(4)), ("bad", bad)])
    optimizer = CPUAdamW([torch.ones(4)])
    with pytest.raises(error, match="param 0 of group 1"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1


def test_a_param_without_memory_can_be_asked_about_but_not_stepped() -> None:
    param = Parameter(torch.ones(4, device="meta"))
    optimizer = CPUAdam([param])
    param.grad = torch.ones(4, device="meta")
    with pytest.raises(TypeError, match="param 0 of group 0 must be on the CPU, got device meta"):
        optimizer.step()


def test_a_bad_gradient_or_state_stops_the_step_before_anything_is_written() -> None:
    first, second = Parameter(torch.ones(64)), Parameter(torch.ones(64))
    optimizer = CPUAdam([first, second])
    first.grad = torch.ones(64)
    second.grad = torch.ones(64).to_sparse()
    with pytest.raises(TypeError, match="grad of CPUAdam param 1 of group 0 must be dense"):
        optimizer.step()
    assert not optimizer.state
    second.grad = torch.ones(64)
    optimizer.step()
    kept = first.detach().clone()
    optimizer.state[second]["exp_avg"] = torch.ones(32)
    with pytest.raises(ValueError, match="exp_avg of CPUAdam param 1 of group 0 must have shape"):
        optimizer.step()
    assert torch.equal(first, kept)
    assert optimizer.state[first]["step"].item() == 1.0


def test_amsgrad_needs_its_state() -> None:
    param = Parameter(torch.ones(64))
    param.grad = torch.ones(64)
    optimizer = CPUAdam([param])
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad cannot be switched on"):
        optimizer.step()


@both
@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}, {"differentiable": True}, {"lr": -1.0}])
def test_options_that_cannot_hold_are_refused(ours: Any, theirs: Any, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option)) if "lr" not in option else "learning rate"):
        ours([torch.ones(4)], **option)


WITHOUT_THE_EXTENSION = """
import sys
sys.modules["zero_opt._native"] = None
import torch, zero_opt.cpu_adam
try:
    zero_opt.CPUAdam([torch.ones(4)])
except zero_opt.NativeUnavailable as error:
    assert "not usable here" in str(error), error
else:
    sys.exit("constructed")
"""


def test_without_the_extension_only_construction_fails() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_THE_EXTENSION], check=True)


WRITES = {
    "in place": lambda param: param.copy_(torch.full_like(param, 0.5)),
    "other data": lambda param: setattr(param, "data", torch.full_like(param, 0.5)),
    "other dtype's view": lambda param: param.view(torch.int16).copy_(torch.full_like(param, 0.5).view(torch.int16)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_an_fp32_master_follows_a_param_that_is_written_to(write: Any, dtype: torch.dtype) -> None:
    def make(master: torch.Tensor | None) -> tuple[torch.nn.Parameter, CPUAdamW]:
        param = torch.nn.Parameter(torch.linspace(-1, 1, 200).to(dtype))
        optimizer = CPUAdamW([param], lr=1e-2, state=AdamState(master="float32"))
        param.grad = torch.ones_like(param)
        optimizer.step()
        with torch.no_grad():
            write(param)
        if master is not None:
            optimizer.state[param]["master"].copy_(master)
        return param, optimizer

    param, optimizer = make(None)
    told, expected = make(torch.full((200,), 0.5))
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], torch.full((200,), 0.5))
    for one in (optimizer, expected):
        one.step()
    assert_bitwise(param, told)
    assert param.max() < 0.5


def test_an_fp32_master_follows_data_that_come_to_lie_where_those_before_lay() -> None:
    memory = bytearray(128)
    param = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.bfloat16))
    optimizer = CPUAdamW([param], lr=1e-3, weight_decay=0.0, state=AdamState(master="float32"))
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data = torch.empty(0, dtype=torch.bfloat16)
    memory[:] = b"\xa0\x40" * 64  # bf16 5.0
    param.data = torch.frombuffer(memory, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["master"].round(), torch.full((64,), 5.0))


def test_a_loaded_fp32_master_is_kept_until_the_param_is_written_to() -> None:
    def trained() -> tuple[torch.nn.Parameter, CPUAdamW]:
        param = torch.nn.Parameter(torch.linspace(-1, 1, 200).bfloat16())
        param.grad = torch.ones_like(param)
        return param, CPUAdamW([param], lr=1e-3, state=AdamState(master="float32"))

    param, optimizer = trained()
    optimizer.step()
    loaded, other = trained()
    other.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        loaded.copy_(param)  # a model is often loaded after its optimizer; the master is more exact than this
    optimizer.step()
    other.step()
    assert_bitwise(loaded, param)
    assert_bitwise(other.state[loaded]["master"], optimizer.state[param]["master"])
