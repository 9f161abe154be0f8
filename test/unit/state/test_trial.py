"""What a class makes of a step, found out on zeros."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

import zero_opt
from zero_opt.state import state_dict
from zero_opt.state.trial import StateSizes, Trial, is_known, state_after_a_step, trial_of


class _Refusing(torch.optim.SGD):
    """Its step fails."""

    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("not today")


class _Alarmed(torch.optim.SGD):
    """In its step comes a signal."""

    def step(self, closure: Any = None) -> Any:
        signal.raise_signal(signal.SIGALRM)


@pytest.mark.usefixtures("alarm")
def test_what_a_signal_handler_raises_is_not_the_class_s() -> None:
    with pytest.raises(TimeoutError, match="no more time"):
        state_after_a_step(_Alarmed, {}, torch.zeros(2))
    with pytest.raises(TimeoutError, match="no more time"):
        StateSizes(_Alarmed, {}).of(0, {}, (2,), torch.float32)


@pytest.mark.usefixtures("alarm")
def test_what_a_signal_handler_raises_in_a_load_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.1, offload=zero_opt.CPUOffload())

    def alarmed(*given: Any) -> Trial:
        signal.raise_signal(signal.SIGALRM)
        return trial_of(*given)

    monkeypatch.setattr(state_dict, "trial_of", alarmed)
    with pytest.raises(TimeoutError, match="no more time"):
        optimizer.load_state_dict(torch.optim.SGD([param], lr=0.5).state_dict())
    optimizer.close()


def test_what_is_known() -> None:
    assert is_known(torch.optim.AdamW) and is_known(torch.optim.Adafactor) and is_known(zero_opt.CPUAdam)
    assert not is_known(_Refusing)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.SparseAdam])
def test_state_is_that_of_a_step_with_zeros(cls: type[torch.optim.Optimizer]) -> None:
    param = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    param.grad = torch.zeros(2, 2, layout=torch.sparse_coo if cls is torch.optim.SparseAdam else torch.strided)
    plain = cls([param])
    plain.step()
    made = state_after_a_step(cls, {"lr": 0.5}, torch.zeros(2, 2))
    torch.testing.assert_close(dict(made), dict(plain.state[param]), rtol=0, atol=0)


def test_what_cannot_be_stepped_has_no_state() -> None:
    assert state_after_a_step(_Refusing, {}, torch.zeros(2)) == {}
    assert state_after_a_step(torch.optim.SGD, {"lr": -1.0}, torch.zeros(2)) == {}


def test_hyperparameters_of_the_user_are_neither_kept_nor_changed() -> None:
    hypers = {"lr": torch.tensor(0.5), "betas": (0.5, 0.5)}
    state_after_a_step(torch.optim.AdamW, hypers, torch.zeros(2))
    assert sorted(hypers) == ["betas", "lr"] and hypers["lr"] == torch.tensor(0.5)


def test_a_trial_keeps_no_gradient_even_of_a_step_that_failed() -> None:
    trial = Trial(_Refusing, torch.zeros(2), {"lr": 0.5}, momentum=0.5)
    assert trial.hypers["lr"] == 0.5 and trial.hypers["momentum"] == 0.5
    with pytest.raises(ArithmeticError):
        trial.step()
    assert trial.param.grad is None and trial.state == {}


def test_what_a_class_writes_to_its_arguments_stays_within_the_trial() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["counts"].append(1)
                group["lr"] += 1

    hypers, lr = {"counts": [0]}, torch.tensor(1.0)
    trial = Trial(Counting, torch.zeros(2), hypers, lr=lr)
    trial.step()
    assert trial.hypers["counts"] == [0, 1] and float(trial.hypers["lr"]) == 2
    trial.set_hypers({**hypers, "lr": lr})
    trial.step()
    assert trial.hypers["counts"] == [0, 1] and trial.hypers.keys() == {"counts", "lr"}
    assert hypers == {"counts": [0]} and float(lr) == 1
